"""Spans and layouts against sets of positions."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.protocols.placement import (
    EMPTY,
    KvSpan,
    TokenSpan,
    contiguous,
    on_instance,
    place,
    round_robin,
    striped,
    zigzag,
)

SPANS = st.builds(
    lambda start, extent, step: TokenSpan(start, start + extent, step),
    st.integers(0, 60),
    st.integers(0, 200),
    st.integers(1, 30),
)


@settings(max_examples=examples(1000))
@given(SPANS, SPANS)
def test_an_intersection_has_the_positions_of_both(a: TokenSpan, b: TokenSpan) -> None:
    both = a.intersection(b)
    assert list(both) == sorted(set(a) & set(b))
    assert both == b.intersection(a)
    assert len(both) == len(list(both))


@settings(max_examples=examples(300))
@given(st.integers(0, 60), st.integers(-50, 200), st.integers(1, 30), st.integers(0, 300))
def test_a_span_is_a_range(start: int, extent: int, step: int, position: int) -> None:
    span, positions = TokenSpan(start, start + extent, step), range(start, start + extent, step)
    assert list(span) == list(positions)
    assert len(span) == len(positions)
    assert (position in span) == (position in positions)
    assert list(span.shifted(7)) == [p + 7 for p in positions]


def test_equal_positions_are_one_span() -> None:
    assert TokenSpan(3, 10, 4) == TokenSpan(3, 8, 4)
    assert TokenSpan(3, 4, 9) == TokenSpan(3, 4)
    assert TokenSpan(5, 5) == EMPTY == TokenSpan(9, 2, 3)


def test_spans_of_a_million_tokens_intersect_without_being_listed() -> None:
    a, b = TokenSpan(1, 10**12, 999_983), TokenSpan(5, 10**12, 1_000_003)
    both = a.intersection(b)
    assert both.step == 999_983 * 1_000_003 or len(both) <= 1
    assert all(p in a and p in b for p in both)


@settings(max_examples=examples(200))
@given(st.integers(0, 200), st.integers(1, 9))
def test_layouts_have_every_token_once(length: int, parts: int) -> None:
    bounds = [length * i // parts for i in range(parts + 1)]
    for layout in (contiguous(bounds), zigzag(length, parts), striped(length, parts)):
        assert len(layout) == parts
        tokens = sorted(chain.from_iterable(chain.from_iterable(layout)))
        assert tokens == list(range(length))
        assert all(span for spans in layout for span in spans)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_contiguous_parts_lie_between_their_bounds(bounds: list[int]) -> None:
    bounds.sort()
    for spans, (begin, end) in zip(contiguous(bounds), pairwise(bounds), strict=True):
        assert list(chain.from_iterable(spans)) == list(range(begin, end))


@settings(max_examples=examples(100))
@given(st.integers(1, 20), st.integers(1, 9))
def test_zigzag_shares_causal_pairs_evenly(chunk: int, parts: int) -> None:
    pairs = [
        sum(position + 1 for span in spans for position in span)
        for spans in zigzag(chunk * 2 * parts, parts)
    ]
    assert len(set(pairs)) == 1


@settings(max_examples=examples(100))
@given(st.integers(0, 50), st.integers(0, 100), st.permutations(range(5)))
def test_round_robin_takes_turns(start: int, tokens: int, instances: list[int]) -> None:
    kept = round_robin(start, start + tokens, instances)
    for position in range(start, start + tokens):
        keeper = instances[(position - start) % len(instances)]
        assert [i for i in instances if position in kept[i]] == [keeper]
    counts = [len(span) for span in kept.values()]
    assert sum(counts) == tokens
    assert max(counts) - min(counts) <= 1


def test_a_layout_is_placed_on_instances() -> None:
    placed = place(9, (4, 2), zigzag(8, 2))
    assert placed == (
        KvSpan(9, 4, TokenSpan(0, 2)),
        KvSpan(9, 4, TokenSpan(6, 8)),
        KvSpan(9, 2, TokenSpan(2, 4)),
        KvSpan(9, 2, TokenSpan(4, 6)),
    )
    assert on_instance(placed, 2) == placed[2:]
