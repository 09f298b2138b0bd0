"""The bytes of single tokens against transformers' tokenizers, which decode whole texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import make_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from csps.models.tokenizers.tokenizer import Tokenizer

WORDS = ("the", "naïve", "café", "你好", "🙂")
AddedToken: Any = transformers.AddedToken


def sentencepiece() -> dict[str, int]:
    """Build entries as in Llama 2: bytes, the space, words with and without one before them."""
    letters = {letter for word in WORDS for letter in word if letter.isascii()}
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    entries += [*sorted(letters), "▁t", "▁th", "▁the", "th", "the"]
    return {entry: index for index, entry in enumerate(entries)}


def llama(name: str) -> Callable[[], Any]:
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("t", "h"), ("th", "e")]
    cls: Any = getattr(transformers, name)
    return lambda: cls(vocab=sentencepiece(), merges=merges)


def byte_level(name: str) -> Callable[[], Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, "Ġt", "Ġth", "Ġthe", "ðŁ"]
    vocab = {entry: index for index, entry in enumerate(entries)}
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("ð", "Ł")]
    cls: Any = getattr(transformers, name)
    return lambda: cls(vocab=vocab, merges=merges)


FAMILIES = {
    "Llama 2": llama("LlamaTokenizer"),
    "Gemma": llama("GemmaTokenizer"),
    "GPT-2": byte_level("GPT2Tokenizer"),
    "Qwen 2": byte_level("Qwen2Tokenizer"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' own, of one family."""
    theirs = FAMILIES[request.param]()
    theirs.add_tokens([AddedToken("<|added one|>"), AddedToken("<你>", special=True)])
    model_dir: Path = tmp_path_factory.mktemp("tokenizer")
    theirs.save_pretrained(model_dir)
    return Tokenizer(model_dir), theirs


PARTS = st.one_of(
    st.sampled_from([*WORDS, " the", "  ", "\n", "<|added one|>", "<你>", "</s>", "▁"]),
    st.text(max_size=5),
)


@given(parts=st.lists(PARTS, max_size=12))
def test_joined_they_are_the_text(pair: tuple[Tokenizer, Any], parts: list[str]) -> None:
    ours, theirs = pair
    # Behind another token, because a text's first space may be taken away.
    ids = theirs.encode("x" + "".join(parts), add_special_tokens=False)
    first = ours.token_bytes(ids[0]).decode().lstrip(" ")
    joined = first.encode() + b"".join(map(ours.token_bytes, ids[1:]))
    whole = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert joined == whole.lstrip(" ").encode()


@pytest.mark.parametrize("pair", ["GPT-2", "Qwen 2"], indirect=True)
@given(data=st.data())
def test_bytes_that_are_no_text(pair: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=12))
    joined = b"".join(map(ours.token_bytes, ids))
    whole = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert joined.decode(errors="replace") == whole


@pytest.mark.parametrize("pair", ["Llama 2"], indirect=True)
def test_a_word_with_a_space_is_not_the_word_without(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    with_space, without = theirs.convert_tokens_to_ids(["▁the", "the"])
    assert ours.decode([with_space]) == ours.decode([without]) == "the"
    assert (ours.token_bytes(with_space), ours.token_bytes(without)) == (b" the", b"the")
    assert ours.token_bytes(theirs.convert_tokens_to_ids("<0xF0>")) == b"\xf0"


def test_a_byte_of_a_character(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("🙂\x00", add_special_tokens=False)
    assert [tokenizer.token_bytes(identifier) for identifier in ids] == [
        b"\xf0",
        b"\x9f",
        b"\x99",
        b"\x82",
        b"\0",
    ]
    assert tokenizer.token_bytes(10_000) == b""


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.Metaspace(), [b"to", b" ken"]),
        (decoders.WordPiece(), [b"to", "▁ken".encode()]),  # unknown to us: as it decodes alone
        (None, [b"to", "▁ken".encode()]),
    ],
)
def test_other_decoders(tmp_path: Path, decoder: Any, expected: list[bytes]) -> None:
    backend = Backend(models.BPE(vocab={"to": 0, "▁ken": 1}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1)] == expected
