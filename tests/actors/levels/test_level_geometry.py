from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from csa_cases import CsaCase, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.actors.attention.base.levels import LevelGeometry, LevelPart, spanning_parts
from csps.protocols.core.topology import Topology
from csps.protocols.gang.step_messages import PrefillChunk


def geometry_of(case: CsaCase) -> LevelGeometry:
    parts = spanning_parts(case.step.chunks, case.bounds)
    return LevelGeometry(parts=parts, levels=case.plan.segments(), nested=case.plan.nested)


def seen_pairs(geometry: LevelGeometry) -> Counter[tuple[int, int, int]]:
    """Count (level, part of the query, part of the key) in all segments, own parts included."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for level, segments in enumerate(geometry.levels, start=1):
        for members in segments:
            for sight in geometry.segment(level, members.start).sights:
                pairs.update((level, sight.part, key) for key in sight.sources)
    return pairs


@settings(max_examples=examples(200))
@given(case=cases(dropping=False))
def test_every_causal_pair_is_in_exactly_one_level(case: CsaCase) -> None:
    geometry = geometry_of(case)
    causal = {
        (query.index, key.index)
        for query in geometry.parts
        for key in geometry.parts
        if key.chunk == query.chunk and key.index <= query.index
    }
    pairs = seen_pairs(geometry)
    assert set(pairs.values()) <= {1}
    assert {(query, key) for _, query, key in pairs} == causal
    assert len(pairs) == len(causal)


@settings(max_examples=examples(100))
@given(case=cases(dropping=False))
def test_a_pair_is_in_the_nearest_level_that_holds_both(case: CsaCase) -> None:
    geometry = geometry_of(case)
    for level, query, key in seen_pairs(geometry):
        members = geometry.parts[query].member, geometry.parts[key].member
        together = [
            any(set(members) <= set(segment) for segment in segments)
            for segments in geometry.levels
        ]
        assert together.index(True) == level - 1


@settings(max_examples=examples(100))
@given(case=cases(dropping=False), nested=st.just(True))
def test_nested_levels_see_their_whole_segment(case: CsaCase, nested: bool) -> None:
    geometry = geometry_of(case.with_plan(nested=nested))
    seen = seen_pairs(geometry)
    for level, segments in enumerate(geometry.levels, start=1):
        for members in segments:
            inside = [part for part in geometry.parts if part.member in members]
            for query in inside:
                # The member of a part computes it at farther levels too, outside of the routes.
                last = query.index if level == 1 else query.index - 1
                for key in inside:
                    expected = key.chunk == query.chunk and key.index <= last
                    assert seen[level, query.index, key.index] == expected


def chunk(sequence_id: int, length: int) -> PrefillChunk:
    return PrefillChunk(sequence_id=sequence_id, start=0, length=length)


def test_only_chunks_of_several_members_have_parts() -> None:
    parts = spanning_parts([chunk(1, 13), chunk(2, 5), chunk(3, 12)], [0, 10, 20, 30])
    assert parts == (
        LevelPart(index=0, member=0, chunk=0, rows=slice(0, 10), start=0),
        LevelPart(index=1, member=1, chunk=0, rows=slice(0, 3), start=10),
        LevelPart(index=2, member=1, chunk=2, rows=slice(8, 10), start=0),
        LevelPart(index=3, member=2, chunk=2, rows=slice(0, 10), start=2),
    )


@pytest.mark.parametrize("levels", [1, 2])
def test_level_one_is_local_unless_it_is_the_only_one(levels: int) -> None:
    segments = Topology.of(["0-0-0", "0-0-1"]).levels(levels)
    geometry = LevelGeometry(parts=(), levels=segments)
    assert geometry.local_first_level == (levels == 2)


@settings(max_examples=examples(50))
@given(case=cases())
def test_parts_and_local_chunks_cover_the_batch(case: CsaCase) -> None:
    spread = sum(part.length for part in spanning_parts(case.step.chunks, case.bounds))
    ends = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    whole = sum(
        stop - start
        for start, stop in pairwise(ends)
        if any(a <= start and stop <= b for a, b in pairwise(case.bounds))
    )
    assert spread + whole == sum(case.lengths)
