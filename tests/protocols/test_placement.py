"""Spans and layouts against sets of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.protocols.core.placement import (
    KvSlice,
    Layout,
    Span,
    SpanIndex,
    contiguous,
    disjoint,
    place,
    rest_of,
    rests_of,
    round_robin,
    striped,
    striped_of,
    zigzag,
    zigzag_of,
)

SPANS = st.builds(
    lambda start, extent, step: Span(start, start + extent, step),
    st.integers(0, 60),
    st.integers(0, 200),
    st.integers(1, 30),
)


@settings(max_examples=examples(1000))
@given(SPANS, SPANS)
def test_an_intersection_has_the_positions_of_both(a: Span, b: Span) -> None:
    both = a.intersection(b)
    assert list(both.positions) == sorted(set(a.positions) & set(b.positions))
    assert both == b.intersection(a)
    assert both.length == len(both.positions)


@settings(max_examples=examples(500))
@given(SPANS, SPANS)
def test_a_span_is_its_intersection_with_another_and_the_rest(a: Span, b: Span) -> None:
    common, rest = a.intersection(b), a.without(b)
    left = sorted(chain.from_iterable(span.positions for span in rest))
    assert left == sorted(set(a.positions) - set(b.positions))
    for part in (common, *rest):
        assert part.length or part is common
        assert a.part(a.rows_of(part)) == part
        assert list(a.positions[a.rows_of(part)]) == list(part.positions)


@settings(max_examples=examples(300))
@given(st.integers(0, 60), st.integers(0, 200), st.integers(1, 30))
def test_a_span_is_a_range(start: int, extent: int, step: int) -> None:
    span, positions = Span(start, start + extent, step), range(start, start + extent, step)
    assert span.positions == positions
    assert span.length == len(positions)
    assert list(span.shifted(7).positions) == [p + 7 for p in positions]


@settings(max_examples=examples(300))
@given(st.lists(SPANS, max_size=8), st.lists(SPANS, max_size=4))
def test_an_index_finds_all_that_meet_a_span(spans: list[Span], others: list[Span]) -> None:
    index = SpanIndex(spans)
    for other in others:
        near = index.near(other)
        met = [number for number, span in enumerate(spans) if span.intersection(other).length]
        assert near == sorted(set(near))
        assert set(met) <= set(near)
    assert list(rests_of(others, spans)) == [rest_of(span, spans) for span in others]


@settings(max_examples=examples(300))
@given(st.lists(SPANS, max_size=4), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_spans_are_disjoint_if_no_position_is_there_twice(
    spans: list[Span], tokens: list[int]
) -> None:
    positions = list(chain.from_iterable(span.positions for span in spans))
    assert disjoint(spans) == (len(positions) == len(set(positions)))
    for layout in (zigzag_of(tokens), striped_of(tokens)):
        parts = [span for spans in layout for span in spans]
        assert disjoint(parts)
        assert Span(0, sum(tokens)).partitioned_by(parts)
        assert not disjoint([*parts, *parts[-1:]]) or not parts


@pytest.mark.parametrize("layout", [zigzag_of, striped_of])
def test_a_span_is_compared_with_few_of_a_large_group(
    layout: Callable[[Sequence[int]], Layout],
) -> None:
    """Chunks on 32, 64 and 128 instances, some of which have a token more."""
    spans, start = [], 0
    for size in (32, 64, 128):
        tokens = [100 + (part < size // 3) for part in range(size)]
        spans += [span.shifted(start) for parts in layout(tokens) for span in parts]
        start += sum(tokens)
    index = SpanIndex(spans)
    assert sum(len(index.near(span)) for span in spans) <= 3 * len(spans)


def test_equal_positions_are_one_span() -> None:
    assert Span(3, 10, 4) == Span(3, 8, 4)
    assert Span(3, 4, 9) == Span(3, 4)
    assert Span(5, 5) == Span(0, 0) == Span(7, 7, 3)


def test_spans_of_a_million_tokens_intersect_without_being_listed() -> None:
    a, b = Span(1, 10**12, 999_983), Span(5, 10**12, 1_000_003)
    both = a.intersection(b)
    assert both.step == 999_983 * 1_000_003 or both.length <= 1
    assert all(p in a.positions and p in b.positions for p in both.positions)


@settings(max_examples=examples(200))
@given(st.integers(0, 200), st.integers(1, 9))
def test_layouts_have_every_token_once(length: int, parts: int) -> None:
    bounds = [length * i // parts for i in range(parts + 1)]
    for layout in (contiguous(bounds), zigzag(length, parts), striped(length, parts)):
        assert len(layout) == parts
        tokens = sorted(chain.from_iterable(span.positions for spans in layout for span in spans))
        assert tokens == list(range(length))
        assert all(span.length for spans in layout for span in spans)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_contiguous_parts_lie_between_their_bounds(bounds: list[int]) -> None:
    bounds.sort()
    for spans, (begin, end) in zip(contiguous(bounds), pairwise(bounds), strict=True):
        assert [p for span in spans for p in span.positions] == list(range(begin, end))


@settings(max_examples=examples(100))
@given(st.integers(1, 20), st.integers(1, 9))
def test_zigzag_shares_causal_pairs_evenly(chunk: int, parts: int) -> None:
    pairs = [
        sum(position + 1 for span in spans for position in span.positions)
        for spans in zigzag(chunk * 2 * parts, parts)
    ]
    assert len(set(pairs)) == 1


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_zigzag_of_parts_that_differ_is_of_as_many_tokens(tokens: list[int]) -> None:
    layout = zigzag_of(tokens)
    assert [sum(span.length for span in spans) for spans in layout] == tokens
    every = sorted(chain.from_iterable(span.positions for spans in layout for span in spans))
    assert every == list(range(sum(tokens)))
    if len(set(tokens)) == 1 and tokens[0] % 2 == 0:
        assert layout == zigzag(sum(tokens), len(tokens))


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_striped_of_unequal_parts_alternates(tokens: list[int]) -> None:
    layout = striped_of(tokens)
    left, expected = list(tokens), []
    while any(left):
        for part in range(len(left)):
            if left[part]:
                left[part] -= 1
                expected.append(part)
    parts = {
        at: part for part, spans in enumerate(layout) for span in spans for at in span.positions
    }
    assert [parts[at] for at in range(sum(tokens))] == expected
    assert sum(span.length for spans in layout for span in spans) == sum(tokens)
    if len(set(tokens)) == 1:
        assert layout == striped(sum(tokens), len(tokens))


@settings(max_examples=examples(100))
@given(st.integers(0, 50), st.integers(0, 100), st.permutations(range(5)))
def test_round_robin_alternates(start: int, tokens: int, instances: list[int]) -> None:
    kept = round_robin(start, start + tokens, instances)
    for position in range(start, start + tokens):
        keeper = instances[(position - start) % len(instances)]
        assert [i for i in instances if position in kept[i].positions] == [keeper]
    counts = [span.length for span in kept.values()]
    assert sum(counts) == tokens
    assert max(counts) - min(counts) <= 1


def test_a_layout_is_placed_on_instances() -> None:
    assert place((4, 2), zigzag(8, 2), start=3) == (
        KvSlice(4, 3, 5),
        KvSlice(4, 9, 11),
        KvSlice(2, 5, 7),
        KvSlice(2, 7, 9),
    )
