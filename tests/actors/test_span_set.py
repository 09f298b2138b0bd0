"""Spans that may not overlap, against a set of their positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.actors.span_set import SpanSet
from csps.protocols.span import Span


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from((1, 1, 2, 3, 4))),
        max_size=20,
    )
)
def test_a_span_is_taken_exactly_if_all_its_positions_are_free(
    spans: list[tuple[int, int, int]],
) -> None:
    taken: set[int] = set()
    spans_taken = SpanSet()
    for start, extent, step in spans:
        span = Span(start, start + extent, step)
        positions = set(span.positions)
        free = taken.isdisjoint(positions)
        assert spans_taken.add(span) == free
        taken |= positions if free else set()
