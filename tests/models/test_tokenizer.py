"""Tokenizer and streaming detokenizer against transformers and against decoding at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import make_checkpoint, make_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from csps.models.network.checkpoint_json import CheckpointError, InvalidTextError
from csps.models.tokenizers.tokenizer import Tokenizer

TEXTS = ["", "hello world", "  spaces  ", "naïve café, 你好, 🙂👩‍👩‍👧", "a</s>b", "line\nline\ttab"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model_dir = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(model_dir)
    return Tokenizer(model_dir)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Build a tokenizer as Llama 2's: words with U+2581 for the space, and a token for each byte of
    rare text."""
    model_dir = tmp_path_factory.mktemp("byte_fallback")
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁to", "ken", "s", "▁"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["<pad>"])
    backend.save(str(model_dir / "tokenizer.json"))
    return Tokenizer(model_dir)


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    make_tokenizer(tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        token_ids = ours.encode(text, add_special_tokens=special)
        assert token_ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(token_ids, skip) == theirs.decode(
                token_ids, skip_special_tokens=skip
            )


def test_end_tokens_are_the_models_and_the_tokenizers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, eos_token_id=[257, 259])
    assert Tokenizer(tmp_path).eos_token_ids == (257, 259)
    make_checkpoint(tmp_path, eos_token_id=259)
    assert Tokenizer(tmp_path).eos_token_ids == (259, 257)


@given(token_ids=st.lists(st.integers(0, 259)))
def test_streaming_any_tokens_gives_the_text_of_all(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    """Invalid UTF-8 included."""
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)


@given(text=st.text(max_size=200))
def test_streaming_any_text_gives_it_back(tokenizer: Tokenizer, text: str) -> None:
    assert streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text


@given(pieces=st.lists(st.sampled_from([*(chr(c) for c in range(0x4E00, 0x4E10)), "🙂", 257, 258])))
def test_streaming_byte_fallback(byte_fallback: Tokenizer, pieces: list[str | int]) -> None:
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += [piece] if isinstance(piece, int) else [1 + b for b in piece.encode()]
    assert streamed(byte_fallback, token_ids) == byte_fallback.decode(token_ids)


def test_a_character_comes_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    assert [detokenizer.push(token) for token in token_ids] == ["a", "", "", "", "🙂", "b"]


def test_an_unfinished_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    first, second, *_ = tokenizer.encode("🙂", add_special_tokens=False)
    assert detokenizer.push(first) + detokenizer.push(second) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(cycle=st.lists(st.integers(0, 255), min_size=1, max_size=5))
def test_endless_repetition_neither_waits_nor_grows(tokenizer: Tokenizer, cycle: list[int]) -> None:
    """Most bytes are no text; an answer can be full of them."""
    token_ids, detokenizer, text = cycle * 60, tokenizer.detokenizer(), ""
    for count, token in enumerate(token_ids):
        text += detokenizer.push(token)
        assert len(detokenizer._window) <= 65
        assert text or count <= 64
    assert text + detokenizer.flush() == tokenizer.decode(token_ids)


def test_special_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(map(detokenizer.push, tokenizer.encode("x</s>"))) == "<s>x</s>"


def test_many_hidden_tokens_take_no_space_from_the_next_word(byte_fallback: Tokenizer) -> None:
    """Decoders drop the space before the first word, and here the words before were long ago."""
    word, pad = (byte_fallback._backend.token_to_id(entry) for entry in ("▁to", "<pad>"))
    token_ids = [word, *[pad] * 100, word]
    assert streamed(byte_fallback, token_ids) == byte_fallback.decode(token_ids) == "to to"


@pytest.mark.parametrize(("text", "where"), [("\ud800", 0), ("fine until \udfff here", 11)])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str, where: int) -> None:
    with pytest.raises(InvalidTextError, match=f"lone surrogate at character {where}$"):
        tokenizer.encode(text)


def test_a_missing_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found.*save_pretrained"):
        Tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer(tmp_path)


def test_truncation_left_from_training_is_switched_off(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("a long prompt")) == 14
