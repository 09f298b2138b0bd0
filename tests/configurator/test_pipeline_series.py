"""Time series of the pipeline, compared with the engine's own routes, trees and schedules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_groups import PLACES, TIMES, TWO_SERVERS, cases, group
from property_examples import examples

from csps.actors.attention.base.levels import LevelGeometry, kept_counts, spanning_parts
from csps.actors.attention.csa.routes import HeadCounts, Routes, SegmentRoutes
from csps.actors.comm.row_collectives import server_tree
from csps.configurator.model.phase_times import (
    AttentionTimes,
    ExchangeTimes,
    LinearTime,
    PhaseTimes,
)
from csps.configurator.pipeline import ntp, tp
from csps.configurator.pipeline.cases import LayerCases, SimulatedGroup
from csps.configurator.pipeline.ntp import simulate_ntp
from csps.configurator.pipeline.prefill import attention_seconds, prefill_seconds
from csps.configurator.pipeline.program import LinkSpeed
from csps.configurator.pipeline.tp import simulate_tp
from csps.protocols.attention.csa import CsaPlan, CsaSettings
from csps.protocols.gang.step_messages import PrefillChunk

NOTHING = LinearTime()
ONLY_PAIRS = PhaseTimes(
    qkv=NOTHING, attention=AttentionTimes(pair=1.0), linear=NOTHING, rest=NOTHING
)


@st.composite
def layers(
    draw: st.DrawFn, *, most: int = 4, micro: int = 5
) -> tuple[SimulatedGroup, LayerCases, list[int]]:
    heads, kv_heads = draw(st.sampled_from([(4, 4), (8, 2), (6, 3), (2, 1)]))
    of = group(draw(st.sampled_from(PLACES[1:])), heads=heads, kv_heads=kv_heads)
    spts = [draw(st.integers(5, 40)) for _ in of.locations]
    return of, draw(cases(of, most=most, micro=micro)), spts


def routes_of(of: SimulatedGroup, layer_cases: LayerCases, spts: list[int], c: int) -> Routes:
    """Return the engine's routes."""
    plan = CsaPlan(
        locations=of.locations,
        levels=layer_cases.levels,
        sinks=int(layer_cases.sinks_c[c]),
        tail=int(layer_cases.tail_c[c]),
        drop_queries=layer_cases.drop_queries,
    )
    chunks = [PrefillChunk(sequence_id=1, start=0, length=sum(spts), last=True)]
    bounds = (0, *accumulate(spts))
    parts = spanning_parts(chunks, bounds)
    kept = tuple(
        tuple(
            kept_counts(plan, chunks, part, ratios) for ratios in layer_cases.ratios_cgv[c].tolist()
        )
        for part in parts
    )
    return Routes(
        LevelGeometry(parts=parts, levels=plan.segments()),
        HeadCounts(kept=kept, parts=parts, drop_queries=layer_cases.drop_queries),
        heads=of.heads,
        kv_heads=of.kv_heads,
        micro_partitions=(
            layer_cases.micro_cv if layer_cases.pipelined else np.ones_like(layer_cases.micro_cv)
        )[c].tolist(),
    )


def sent_by_engine(of: SimulatedGroup, segment: SegmentRoutes) -> dict[tuple[str, int], np.ndarray]:
    """Return the elements (sender, receiver) of each step of a segment's first all-to-all."""
    sent: dict[tuple[str, int], np.ndarray] = defaultdict(
        lambda: np.zeros((of.members, of.members))
    )
    for owner in segment.members:
        theirs = segment.owner(owner)
        for step in segment.steps:
            for send_slice in theirs.send_slices(step):
                home = segment.routes.counts.parts[send_slice.part].member
                if send_slice.reused_from is not None or home == owner:
                    continue
                tokens = send_slice.tokens.stop - send_slice.tokens.start
                heads = send_slice.heads.stop - send_slice.heads.start
                width = of.shape.head_dim * (2 if step.kind == "keys" else 1)
                sent[step.kind, step.micro][home, owner] += tokens * heads * width
    return sent


@settings(max_examples=examples(60))
@given(layers())
def test_first_all_to_all_sends_what_the_engine_sends(
    layer: tuple[SimulatedGroup, LayerCases, list[int]],
) -> None:
    of, layer_cases, spts = layer
    series = ntp._NtpLayer(of, layer_cases, spts)._levels
    for c in range(len(layer_cases)):
        routes = routes_of(of, layer_cases, spts, c)
        assert len(series) == len(routes.exchanged_levels)
        for mine, level in zip(series, routes.exchanged_levels, strict=True):
            segments = {routes.segment(level, m).members: m for m in range(of.members)}
            expected = defaultdict(lambda: np.zeros((of.members, of.members)))
            for member in segments.values():
                for (kind, micro), sent in sent_by_engine(
                    of, routes.segment(level, member)
                ).items():
                    first = kind == "queries" and micro == 0
                    expected["keys" if first else kind, micro] += sent * of.itemsize
            for number, found in enumerate(mine.sent()):
                kind = "keys" if number < mine.micros else "queries"
                assert np.array_equal(found.bytes_csr[c], expected[kind, found.micro])
                assert not found.bytes_csr[c][~found.pairs_sr].any()


@settings(max_examples=examples(60))
@given(layers())
def test_owners_attend_to_what_the_engines_rectangles_hold(
    layer: tuple[SimulatedGroup, LayerCases, list[int]],
) -> None:
    of, layer_cases, spts = layer
    series = ntp._NtpLayer(replace(of, times=ONLY_PAIRS), layer_cases, spts)._levels
    for c in range(len(layer_cases)):
        routes = routes_of(of, layer_cases, spts, c)
        for mine, level in zip(series, routes.exchanged_levels, strict=True):
            for number, found in enumerate(mine.sent()):
                kind = "keys" if number < mine.micros else "queries"
                for member in range(of.members):
                    expected = pairs_by_engine(routes.segment(level, member), member, kind, found)
                    assert found.attention_cr[c, member] == expected


def pairs_by_engine(segment: SegmentRoutes, member: int, kind: str, found: ntp.Sent) -> int:
    theirs, pairs = segment.owner(member), 0
    for step in segment.steps:
        if (step.kind, step.micro) != (kind, found.micro):
            continue
        for rectangle in theirs.rectangles(step):
            queries = rectangle.queries.stop - rectangle.queries.start
            keys = rectangle.keys.stop - rectangle.keys.start
            block = theirs.query_blocks[rectangle.block].queries
            missing = queries * (queries - 1) // 2 if rectangle.causal else 0
            pairs += (block.stop - block.start) * (queries * keys - missing)
    return pairs


@settings(max_examples=examples(60))
@given(layers())
def test_outputs_go_back_as_the_engine_sends_them(
    layer: tuple[SimulatedGroup, LayerCases, list[int]],
) -> None:
    of, layer_cases, spts = layer
    series = ntp._NtpLayer(of, layer_cases, spts)._levels
    row = of.shape.head_dim * of.itemsize + 4
    for c in range(len(layer_cases)):
        routes = routes_of(of, layer_cases, spts, c)
        for mine, level in zip(series, routes.exchanged_levels, strict=True):
            for micro in range(mine.micros):
                back_csr, pairs_sr = mine.back(micro)
                assert not back_csr[c][~pairs_sr].any()
                for owner in range(of.members):
                    segment = routes.segment(level, owner)
                    expected = np.zeros(of.members)
                    for part in segment.parts_of("queries") if segment.steps else ():
                        home = routes.counts.parts[part].member
                        for block in segment.owner(owner).query_blocks:
                            if home != owner and micro < segment.micro_partitions:
                                tokens = segment.tokens("queries", part, block.queries, micro)
                                heads = block.queries.stop - block.queries.start
                                expected[home] += (tokens.stop - tokens.start) * heads * row
                    assert np.array_equal(back_csr[c, owner], expected)


@pytest.mark.parametrize("locations", PLACES)
def test_relay_parents_are_the_engines_trees(locations: tuple[str, ...]) -> None:
    servers = [place[:3] for place in locations]
    takers = list(range(len(locations)))
    for owner in takers:
        assert (
            tp.relay_parents(owner, servers, takers) == server_tree(owner, servers, takers).parents
        )


@pytest.mark.parametrize("same", [False, True])
def test_sp_tp_computes_every_pair_once(same: bool) -> None:
    of = group(TWO_SERVERS, heads=8, kv_heads=2, times=ONLY_PAIRS, cores=1.0)
    of = replace(of, times=replace(ONLY_PAIRS), wiring=fast(of))
    layer_cases = replace(exact_cases(levels=1, micro=[[3]]), same_c=np.array([same]))
    tokens = 80
    spans = simulate_tp(of, layer_cases, [20] * 4).makespan_c
    assert spans[0] == pytest.approx(8 * tokens * (tokens + 1) / 2)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("pipelined", [True, False])
def test_exact_levels_compute_every_pair_once(levels: int, pipelined: bool) -> None:
    """With one core for all and links that take next to no time, the makespan is all work."""
    of = group(TWO_SERVERS, times=ONLY_PAIRS, cores=1.0)
    of = replace(of, wiring=fast(of))
    micro = [[2] * levels, [1, 3, 2][:levels]]
    layer_cases = replace(exact_cases(levels=levels, micro=micro), pipelined=pipelined)
    spans = simulate_ntp(of, layer_cases, [20] * 4).makespan_c
    assert spans == pytest.approx([8 * 80 * 81 / 2] * 2)


def fast(of: SimulatedGroup) -> object:
    link = LinkSpeed(bytes_per_s=1e15)
    return group(of.locations, inside=link, between=link).wiring


def exact_cases(*, levels: int, micro: list[list[int]]) -> LayerCases:
    count = len(micro)
    none, ones = np.zeros(count, bool), np.ones(count, np.int64)
    return LayerCases(
        levels=levels,
        ratios_cgv=np.zeros((count, 4, levels)),
        micro_cv=np.array(micro),
        scores_c=none,
        same_c=none,
        window_c=ones,
        sinks_c=ones,
        tail_c=ones,
    )


def test_without_overlap_it_is_the_serial_sum() -> None:
    """Two members, one level: qkv, one exchange, attention, one exchange back, merge, linear."""
    sent = ExchangeTimes(call=3e-4, message=1e-4, byte=1e-9)
    of = group(("0-0-0", "0-1-0"), heads=2, kv_heads=2, times=replace(TIMES, exchange=sent))
    layer_cases = replace(exact_cases(levels=1, micro=[[1]]), ratios_cgv=np.zeros((1, 2, 1)))
    layer_cases = replace(layer_cases, pipelined=False)
    tokens, dim, size = 100, of.shape.head_dim, of.itemsize
    times, link = TIMES, of.wiring.seconds_per_byte_sr[0, 1]
    # One head each: its queries, keys and values of the other member's rows, and outputs back.
    first, back = tokens * 3 * dim * size, tokens * (dim * size + 4)

    def line(of_line: LinearTime, amount: float) -> float:
        return of_line.fixed + of_line.each * amount

    pairs = (2 * tokens) * (2 * tokens + 1) / 2
    serial = (
        line(times.qkv, tokens)
        + line(times.copy, first)
        + first * link
        + 2e-4
        + times.attention.call * 2
        + times.attention.row * 2 * tokens
        + times.attention.pair * pairs
        + line(times.copy, back)
        + back * link
        + 2e-4
        + line(times.merge, tokens)  # own
        + line(times.merge, tokens)
        + line(times.linear, tokens)
        # One message goes and one comes, there and back; each takes its share of the core.
        + 2 * (sent.call + 2 * sent.message)
        + 2 * sent.byte * (first + back)
    )
    assert simulate_ntp(of, layer_cases, [tokens] * 2).makespan_c[0] == pytest.approx(
        serial, rel=1e-12
    )


@settings(max_examples=examples(40))
@given(layers(most=2, micro=3), st.floats(1.0, 50.0))
def test_a_layer_is_never_slower_over_faster_links(
    layer: tuple[SimulatedGroup, LayerCases, list[int]], factor: float
) -> None:
    """Importance is sent and chosen by as well."""
    of, layer_cases, spts = layer
    faster = replace(
        of,
        wiring=replace(of.wiring, seconds_per_byte_sr=of.wiring.seconds_per_byte_sr / factor),
    )
    before, after = simulate_ntp(of, layer_cases, spts), simulate_ntp(faster, layer_cases, spts)
    assert (after.makespan_c <= before.makespan_c * (1 + 1e-12)).all()


def test_configurations_do_not_depend_on_their_company() -> None:
    of, ratios = group(cores=2.0), (((0.0,),), ((0.3,), (0.9,)), ((0.5, 0.0, 0.7, 0.5),))
    several = [
        CsaSettings(strategy="ntp", drop_ratios=p, micro_partitions=((m,),))
        for m, p in zip((1, 5, 3), ratios, strict=True)
    ]
    together = attention_seconds(of, several, 640)
    alone = [attention_seconds(of, [configuration], 640)[0] for configuration in several]
    assert together.tolist() == alone


def test_overlap_hides_a_slow_link_and_dropping_shortens_it() -> None:
    of = group()
    serial, levels, pipelined, dropped = attention_seconds(
        of,
        [
            CsaSettings(levels=1, strategy="ntp", pipelined=False),
            CsaSettings(strategy="ntp", pipelined=False),
            CsaSettings(strategy="ntp"),
            CsaSettings(strategy="ntp", drop_ratios=((0.8,),)),
        ],
        16_384,
    )
    assert serial > levels > pipelined > dropped


def test_tensor_parallel_ranks_and_groups_of_one_are_simulated() -> None:
    both = [CsaSettings(strategy="ntp"), CsaSettings(levels=1, strategy="tp")]
    assert (prefill_seconds(group(tp=2), both, 4_096) > 0).all()
    alone = prefill_seconds(group(PLACES[0]), both, 4_096)
    assert alone[0] == pytest.approx(alone[1], rel=0.5)
