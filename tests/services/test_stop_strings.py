"""Stop strings against an oracle that sees the whole text at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.services.http.answer import StopStrings

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first position at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(texts=st.lists(TEXT, max_size=8), stops=STOPS)
def test_shown_text_ends_before_the_stop_string(texts: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    characters = "".join(texts)
    shown = "".join(watch.push(character) for character in characters)
    if not watch.found:
        shown += watch.flush()
    assert (shown, watch.found) == cut_at_stop(characters, stops)


@given(texts=st.lists(TEXT, max_size=8), stops=STOPS)
def test_no_part_of_a_stop_string_is_ever_shown(texts: list[str], stops: list[str]) -> None:
    watch, shown = StopStrings(stops), ""
    for text_part in texts:
        shown += watch.push(text_part)
        assert not any(stop in shown for stop in stops)
    whole = "".join(texts)
    assert whole.startswith(shown)
    assert watch.found == any(stop in whole for stop in stops)


def test_text_that_cannot_become_a_stop_string_is_not_withheld() -> None:
    watch = StopStrings(["END"])
    assert watch.push("abc E") == "abc "
    assert watch.push("x") == "Ex"


def test_nothing_follows_a_stop_string() -> None:
    watch = StopStrings(["END"])
    assert watch.push("the END of") == "the "
    assert watch.push("more") == ""
