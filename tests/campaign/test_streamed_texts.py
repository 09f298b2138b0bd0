"""Streamed answers of random tokens are the text of all tokens, for several kinds of tokenizers."""

from __future__ import annotations

from pathlib import Path

from property_examples import examples
from streamed_texts import TOKENIZERS, stream_texts

LONGEST_WINDOW = 64 + 8


def test_streamed_text_is_that_of_all_tokens(tmp_path: Path) -> None:
    count = examples(500)
    found = stream_texts(tmp_path, count=count, seed=1)
    assert not found.wrong
    assert found.answers == count * len(TOKENIZERS)
    assert found.longest_window <= LONGEST_WINDOW
