"""Long texts in pieces, and what is known of their tokens beforehand, against all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from csps.models.tokenizers import long_texts
from csps.models.tokenizers import tokenizer as tokenizer_module
from csps.models.tokenizers.long_texts import LongTexts
from csps.models.tokenizers.tokenizer import Tokenizer, TooManyTokens

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? We'll see; THEY'LL SEE.",
    "def main(args):\n\n    return [int(x) ** 2 for x in args if x]  # 12345 and 67\r\n\t\tpass",
    "naïve café, größer als 你好 or Ångström — «word» -- 3.14159  two  spaces   three",
]
SPECIAL = "<|begin|>"
LLAMA3, QWEN2 = sorted(
    (pattern for pattern in long_texts._CUT_AT_SPACES if pattern != long_texts._GPT2_WORDS),
    key=len,
    reverse=True,
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def by_words(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, BYTE_LEVEL])


WORDS: dict[str, tuple[Any, Any]] = {
    "GPT-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": (None, by_words(LLAMA3)),
    "Qwen 2": (normalizers.NFC(), by_words(QWEN2)),
}


def trained(normalizer: Any, words: Any) -> Backend:
    """Return a byte-level BPE with some merges, across words where it may."""
    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.post_processor = TemplateProcessing(
        single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, backend.token_to_id(SPECIAL))]
    )
    return backend


@pytest.fixture(scope="module", params=WORDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    trained(*WORDS[request.param]).save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (long_texts, tokenizer_module):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 8)


ALONE = "aZ éß你🙂19.,'-\n\r\t\u0301\u00a0\u2028\u3000"
TOGETHER = ["\r\n", "  ", "'s", "'LL", "don't", "word", " two", "e\u0301", SPECIAL, "<|be", "gin|>"]
parts = st.sampled_from([*ALONE, *TOGETHER])


@settings(max_examples=examples(300))
@given(text=st.lists(parts, max_size=60).map("".join) | st.text(max_size=60))
def test_pieces_have_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.long_texts.cut_at_spaces
    for special in (True, False):
        whole = tokenizer._encode(text, special)
        assert tokenizer.encode(text, special) == whole
        size = len(text.encode())
        assert tokenizer.long_texts.least_tokens(size) <= max(len(whole), 1)


def test_long_texts_are_cut(tokenizer: Tokenizer) -> None:
    """Otherwise the property would hold of nothing."""
    text = "words and more words, " * 100
    pieces = list(tokenizer.long_texts.pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > 100
    assert max(map(len, pieces)) < 20


@pytest.mark.parametrize("limit", [0, 1, 50, 300])
def test_tokenizing_stops_at_the_limit(tokenizer: Tokenizer, limit: int) -> None:
    text = "words and more words, " * 30
    tokens = len(tokenizer.encode(text))
    if tokens <= limit:
        assert len(tokenizer.encode(text, limit=limit)) == tokens
        return
    with pytest.raises(TooManyTokens) as stopped:
        tokenizer.encode(text, limit=limit)
    assert limit < stopped.value.at_least <= tokens


def test_a_text_that_cannot_fit_is_not_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = tokenizer.long_texts.longest_token_bytes
    assert longest is not None
    monkeypatch.setattr(tokenizer, "_encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode("a" * (100 * longest + 1), limit=100)
    assert refused.value.at_least == 101


def llama2(**options: Any) -> Backend:
    """Return a tokenizer of SentencePiece's kind: words with U+2581, a token for each byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁to", "ken", "s"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", **options))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


@given(text=st.text(max_size=60) | st.lists(parts, max_size=30).map("".join))
def test_tokens_of_sentencepiece_are_bounded_as_well(text: str) -> None:
    backend = llama2(byte_fallback=True)
    facts = LongTexts.of(backend)
    assert facts.longest_token_bytes is not None
    assert not facts.cut_at_spaces
    tokens = backend.encode(text, add_special_tokens=False).ids
    assert facts.least_tokens(len(text.encode())) <= max(len(tokens), 1)


def with_token(**options: Any) -> Backend:
    backend = trained(*WORDS["GPT-2"])
    backend.add_tokens([AddedToken("<x>", **options)])
    return backend


UNKNOWN: dict[str, Backend] = {
    "words are dropped": trained(None, pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="removed"), BYTE_LEVEL])),
    "spaces are merged": trained(normalizers.Replace(Regex(" +"), " "), WORDS["GPT-2"][1]),
    "the ends are stripped": trained(normalizers.Strip(), WORDS["GPT-2"][1]),
    "a token takes the spaces before it": with_token(lstrip=True),
    "a token takes the spaces behind it": with_token(rstrip=True),
    "unknown characters are one token": llama2(fuse_unk=True),
    "no model": Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_nothing_is_assumed_of_other_tokenizers(kind: str) -> None:
    assert LongTexts.of(UNKNOWN[kind]) == LongTexts(cut_at_spaces=False, longest_token_bytes=None)


@pytest.mark.parametrize(
    "words",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        by_words(r"\\S+\\s+|\\s+"),
    ],
)
def test_a_text_is_not_cut_at_words_of_another_kind(words: Any) -> None:
    facts = LongTexts.of(trained(None, words))
    assert facts.longest_token_bytes is not None
    assert not facts.cut_at_spaces


def test_a_token_with_words_in_it_is_not_cut() -> None:
    backend = trained(*WORDS["GPT-2"])
    backend.add_special_tokens(["<|end of text|>"])
    assert not LongTexts.of(backend).cut_at_spaces
