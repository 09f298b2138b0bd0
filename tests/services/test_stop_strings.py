"""Stop strings against an oracle that sees the whole text at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.openai.requests import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from csps.services.http.answer import StopStrings

CALLBACK_S = 0.05
"""Processor time that one callback of the event loop may take."""
TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=9), max_size=3)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first position at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def withheld_at(text: str, stops: list[str]) -> int:
    """Return how many characters at the end of the text may begin a stop string."""
    lengths = range(1, len(text) + 1)
    return max((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), default=0)


@given(texts=st.lists(TEXT, max_size=8), stops=STOPS)
def test_shown_text_ends_before_the_stop_string(texts: list[str], stops: list[str]) -> None:
    """However the text comes in pieces, and with no more withheld than must be."""
    watch, shown, whole = StopStrings(stops), "", ""
    for text in texts:
        shown, whole = shown + watch.push(text), whole + text
        cut, found = cut_at_stop(whole, stops)
        assert watch.found == found
        assert shown == (cut if found else whole[: len(whole) - withheld_at(whole, stops)])
    assert shown + watch.flush() == cut_at_stop(whole, stops)[0]


def test_text_that_cannot_become_a_stop_string_is_not_withheld() -> None:
    watch = StopStrings(["END"])
    assert watch.push("abc E") == "abc "
    assert watch.push("x") == "Ex"


def test_nothing_follows_a_stop_string() -> None:
    watch = StopStrings(["END"])
    assert watch.push("the END of") == "the "
    assert watch.push("more") == ""


@pytest.mark.parametrize("count", [1, MAX_STOP_STRINGS])
@pytest.mark.parametrize("length", [MAX_STOP_CHARACTERS, 100_000])
def test_withheld_text_costs_no_more_than_other_text(count: int, length: int) -> None:
    """After 320,000 withheld characters, one token took 1.5 s of the event loop."""
    watch = StopStrings(["a" * length + chr(ord("b") + index) for index in range(count)])
    spent_s = []
    for token in [*["a" * 128] * (length // 128), "x", "a" * 128, "y"]:
        before = time.thread_time()
        watch.push(token)
        spent_s.append(time.thread_time() - before)
    assert max(spent_s) < CALLBACK_S
