"""Log-probabilities of tokens that are less than a character, or more than their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import make_tokenizer

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.gang.messages import SampledToken, TokenLogprob
from csps.protocols.openai.responses import CompletionLogprobs
from csps.services.http.answer import AnswerText


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model_dir = tmp_path_factory.mktemp("byte_level")
    make_tokenizer(model_dir)
    return Tokenizer(model_dir)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "the"]
    cls: Any = transformers.LlamaTokenizer
    vocab = {entry: index for index, entry in enumerate(entries)}
    cls(vocab=vocab, merges=[]).save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def entries_of(tokenizer: Tokenizer, ids: list[int], top: list[int], **options: Any) -> Any:
    """The answer's text and its log-probabilities."""
    answer = AnswerText(tokenizer, **{"stop": (), "min_tokens": 0, "skip_special": True, **options})
    last = len(ids) - 1
    pieces = [
        answer.push(
            SampledToken(
                sequence_id=1,
                index=index,
                token=token,
                finish_reason="length" if index == last else None,
                logprob=-0.5,
                top_logprobs=tuple(TokenLogprob(token=it, logprob=-1.0) for it in top),
            )
        )
        for index, token in enumerate(ids)
    ]
    entries = [piece.logprob for piece in pieces if piece.logprob is not None]
    return "".join(piece.text for piece in pieces), entries


# But for U+FFFD: until more has come, it may be a character that is not complete.
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=20)
)
def test_bytes_and_offsets_are_those_of_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    shown, entries = entries_of(byte_level, ids, [])
    assert shown == text
    assert b"".join(entry.token_bytes for entry in entries) == text.encode()
    starts = [place for place, it in enumerate(text) for _ in it.encode()]
    assert [entry.offset for entry in entries] == starts


def test_alternatives_that_are_no_text_stay_apart(byte_level: Tokenizer) -> None:
    alternatives = byte_level.encode("é🙂", add_special_tokens=False)
    _, entries = entries_of(byte_level, byte_level.encode("ab"), alternatives)
    (first, *_) = CompletionLogprobs.of(entries).top_logprobs
    assert set(first) == {"<s>", *(f"\\x{byte:02x}" for byte in "é🙂".encode())}


def test_a_word_keeps_its_space(sentencepiece: Tokenizer) -> None:
    with_space, without = 259, 260
    text, entries = entries_of(
        sentencepiece, [with_space, with_space, without], [with_space, without]
    )
    assert text == "the thethe"
    assert [entry.token for entry in entries] == [" the", " the", "the"]
    assert [entry.offset for entry in entries] == [0, 3, 7]
    logprobs = CompletionLogprobs.of(entries)
    assert logprobs.text_offset == [0, 3, 7]
    assert set(logprobs.top_logprobs[0]) == {" the", "the"}


def test_a_hidden_token_takes_no_room(byte_level: Tokenizer) -> None:
    begin, *ids = byte_level.encode("ab")
    text, entries = entries_of(byte_level, [ids[0], begin, ids[1]], [])
    assert text == "ab"
    assert [(entry.token, entry.offset) for entry in entries] == [("a", 0), ("<s>", 1), ("b", 1)]


def test_a_held_back_beginning_of_a_stop_string_counts(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a END", add_special_tokens=False)
    text, entries = entries_of(byte_level, ids, [], stop=[" ENDE"])
    assert text == "a END"
    assert [entry.offset for entry in entries] == [0, 1, 2, 3, 4]
