"""The consolidated all-to-all against the naive one, in which each level receives its own rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from csa_cases import CsaCase, cases
from hypothesis import given, settings
from property_examples import examples

from csps.actors.attention.base.levels import LevelGeometry, kept_counts, spanning_parts
from csps.actors.attention.csa.routes import HeadCounts, Kind, Routes, SegmentRoutes
from csps.protocols.attention.csa import CsaPlan, LayerGroup

several = settings(max_examples=examples(150))
Datum = tuple[Kind, int, int, int]
"""Kind, part, head, index in the head's kept order."""


def routes_of(case: CsaCase, layer: int = 1) -> Routes:
    parts = spanning_parts(case.step.chunks, case.bounds)
    ratios = case.schedule.head_ratios(layer)
    counts = HeadCounts(
        kept=tuple(
            tuple(kept_counts(case.plan, case.step.chunks, part, head) for head in ratios)
            for part in parts
        ),
        parts=parts,
        drop_queries=case.plan.drop_queries,
    )
    geometry = LevelGeometry(parts=parts, levels=case.plan.segments(), nested=case.plan.nested)
    return Routes(
        geometry,
        counts,
        heads=case.heads,
        kv_heads=case.kv_heads,
        micro_partitions=case.schedule.micro_partitions(layer),
    )


def segments_of(routes: Routes, member: int) -> Iterator[SegmentRoutes]:
    for level in routes.exchanged_levels:
        yield routes.segment(level, member)


def sent(routes: Routes, member: int) -> Counter[Datum]:
    """Count what other members send to one member, over all levels."""
    data: Counter[Datum] = Counter()
    for segment in segments_of(routes, member):
        for step in segment.steps:
            for send_slice in segment.owner(member).send_slices(step):
                own = routes.counts.parts[send_slice.part].member == member
                if own or send_slice.reused_from is not None:
                    continue
                for head in range(send_slice.heads.start, send_slice.heads.stop):
                    for token in range(send_slice.tokens.start, send_slice.tokens.stop):
                        data[send_slice.kind, send_slice.part, head, token] += 1
    return data


def needed(case: CsaCase, routes: Routes, member: int) -> set[Datum]:
    """Return the data of other members with which one member computes at any level."""
    data: set[Datum] = set()
    group = case.heads // case.kv_heads
    for segment in segments_of(routes, member):
        index, size = member - segment.members.start, len(segment.members)
        owned = range(index * case.heads // size, (index + 1) * case.heads // size)
        for sight in segment.segment.sights:
            asking: set[tuple[Kind, int]] = {("queries", sight.part)}
            asking |= {("keys", key) for key in sight.sources}
            for kind, part in asking:
                if routes.counts.parts[part].member == member:
                    continue
                for head in owned:
                    kv_head = head // group
                    count = routes.counts.of(kind, part, segment.level, kv_head)
                    name = head if kind == "queries" else kv_head
                    data |= {(kind, part, name, token) for token in range(count)}
    return data


@several
@given(case=cases())
def test_everything_needed_is_sent_once_and_nothing_else(case: CsaCase) -> None:
    routes = routes_of(case)
    for member in range(case.members):
        data = sent(routes, member)
        assert set(data.values()) <= {1}
        assert set(data) == needed(case, routes, member)


@several
@given(case=cases())
def test_rectangles_are_what_the_level_sees(case: CsaCase) -> None:
    """Every (query, key) of an owned head is multiplied exactly once, and causally."""
    routes = routes_of(case)
    for member in range(case.members):
        for segment in segments_of(routes, member):
            assert computed_pairs(segment, member) == expected_pairs(segment, member)


def computed_pairs(segment: SegmentRoutes, member: int) -> Counter[tuple[object, ...]]:
    pairs: Counter[tuple[object, ...]] = Counter()
    mine = segment.owner(member)
    for step in segment.steps:
        for rectangle in mine.rectangles(step):
            block = mine.query_blocks[rectangle.block]
            queries = places(segment, "queries", mine.query_rows(rectangle.block, step.query_micro))
            offset = {
                part: segment.tokens("queries", part, block.queries, step.query_micro).start
                for part in segment.parts_of("queries")
            }
            keys = places(segment, "keys", mine.key_rows[block.key_buffer])
            rows = range(rectangle.queries.start, rectangle.queries.stop)
            sees = rectangle.keys.stop - rectangle.keys.start
            for row in rows:
                hidden = rectangle.queries.stop - 1 - row if rectangle.causal else 0
                part, token = queries[row]
                for key in range(rectangle.keys.start, rectangle.keys.start + sees - hidden):
                    pairs[block.queries.start, part, token + offset[part], keys[key]] += 1
    return pairs


def places(
    segment: SegmentRoutes, kind: Kind, rows: dict[int, slice]
) -> dict[int, tuple[int, int]]:
    """Return (part, token from the part's first row) of each buffer row."""
    return {
        row: (part, row - where.start)
        for part, where in rows.items()
        for row in range(where.start, where.stop)
    }


def expected_pairs(segment: SegmentRoutes, member: int) -> Counter[tuple[object, ...]]:
    pairs: Counter[tuple[object, ...]] = Counter()
    for block in segment.owner(member).query_blocks:
        for sight in segment.segment.sights:
            for token in range(segment.count("queries", sight.part, block.queries)):
                for part in sight.sources:
                    own = sight.causal and part == sight.part
                    count = token + 1 if own else segment.count("keys", part, block.keys)
                    for key in range(count):
                        pairs[block.queries.start, sight.part, token, (part, key)] += 1
    return pairs


@pytest.mark.parametrize("gpus", [2, 4])
def test_rows_received_for_a_nearer_level_are_not_sent_again(gpus: int) -> None:
    """With four GPUs per server, the first one owns at level 3 heads that it owns at level 2."""
    locations = tuple(f"0-{server}-{gpu}" for server in range(2) for gpu in range(gpus))
    group = LayerGroup(first=1, stop=3, drop_ratios=((0.25,), (0.5,)))
    plan = CsaPlan(locations=locations, levels=3, layer_groups=(group,), sinks=0, tail=0)
    members = 2 * gpus
    bounds = tuple(range(0, 8 * members + 1, 8))
    case = CsaCase(plan=plan, lengths=(8 * members,), bounds=bounds, heads=8, kv_heads=8)
    segment = routes_of(case).segment(3, 0)
    reused = [
        send_slice.reused_from
        for step in segment.steps
        for send_slice in segment.owner(0).send_slices(step)
        if 0 < send_slice.part < gpus
    ]
    # No member of the server has seen the keys of its last GPU; member 0 has those of the others.
    expected = [None] if gpus == 2 else [2, 2, None]
    assert reused == expected
