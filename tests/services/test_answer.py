"""Log-probabilities of tokens that hold part of a character, or more than their text."""

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
    """Return the answer's text and its log-probabilities."""
    answer = AnswerText(tokenizer, **{"stop": (), "min_tokens": 0, "skip_special": True, **options})
    last = len(ids) - 1
    deltas = [
        answer.push(
            SampledToken(
                sequence_id=1,
                index=index,
                token=token,
                finish_reason="length" if index == last else None,
                logprob=-0.5,
                top_logprobs=tuple(TokenLogprob(token=other, logprob=-1.0) for other in top),
            )
        )
        for index, token in enumerate(ids)
    ]
    entries = [delta.logprob for delta in deltas if delta.logprob is not None]
    return "".join(part.text for delta in deltas for part in delta.parts), entries


# But for U+FFFD: until more has come, it may be a character that is not complete.
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=20)
)
def test_logprobs_have_the_bytes_and_offsets_of_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    shown, entries = entries_of(byte_level, ids, [])
    assert shown == text
    assert b"".join(entry.token_bytes for entry in entries) == text.encode()
    starts = [index for index, character in enumerate(text) for _ in character.encode()]
    assert [entry.offset for entry in entries] == starts


def test_alternatives_that_are_not_text_stay_distinct(byte_level: Tokenizer) -> None:
    alternatives = byte_level.encode("é🙂", add_special_tokens=False)
    _, entries = entries_of(byte_level, byte_level.encode("ab"), alternatives)
    (first, *_) = CompletionLogprobs.of(entries).top_logprobs
    assert set(first) == {"<s>", *(f"\\x{byte:02x}" for byte in "é🙂".encode())}


def test_a_words_token_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
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


def test_a_hidden_token_moves_no_offset(byte_level: Tokenizer) -> None:
    begin, *ids = byte_level.encode("ab")
    text, entries = entries_of(byte_level, [ids[0], begin, ids[1]], [])
    assert text == "ab"
    assert [(entry.token, entry.offset) for entry in entries] == [("a", 0), ("<s>", 1), ("b", 1)]


def test_withheld_text_counts_in_offsets(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a END", add_special_tokens=False)
    text, entries = entries_of(byte_level, ids, [], stop=[" ENDE"])
    assert text == "a END"
    assert [entry.offset for entry in entries] == [0, 1, 2, 3, 4]
