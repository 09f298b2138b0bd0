"""Rings in the pipeline simulator: what is sent is what the formulas count, which are held to the
engine's bytes; what is computed is every pair once; and rounds hide messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_groups import TWO_SERVERS, group
from property_examples import examples
from ring_traffic import ring_kv_traffic, ring_q_traffic

from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import (
    WHOLE,
    _RingLayer,
    prefill_seconds,
    ring_seconds,
    simulate_ring,
)
from csps.configurator.pipeline.program import LinkSpeed
from csps.protocols.attention.plan import RINGS, Ring
from csps.protocols.core.topology import GroupShape, Topology

NOTHING = LinearTime()
ONLY_PAIRS = PhaseTimes(
    qkv=NOTHING, attention=AttentionTimes(pair=1.0), linear=NOTHING, rest=NOTHING
)
PLACES = [("0-0-0", "0-0-1"), ("0-0-0", "0-0-1", "0-0-2"), TWO_SERVERS]


def over(of: SimulatedGroup, **link: float) -> SimulatedGroup:
    same = LinkSpeed(**link)
    return replace(of, wiring=group(of.locations, inside=same, between=same).wiring)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("places", PLACES)
@given(each=st.integers(1, 300), history=st.integers(0, 300))
@settings(max_examples=examples(10))
def test_sends_what_rings_send(
    ring: Ring, places: tuple[str, ...], each: int, history: int
) -> None:
    of = over(group(places), bytes_per_s=1.0)
    members, spts = of.members, [2 * each] * len(places)
    layer = _RingLayer(of, spts, history * members)
    layer.run(ring)
    sent = sum(float(seconds.sum()) for seconds in layer._script._wire_seconds)
    formula = ring_kv_traffic if ring == "ring_kv" else ring_q_traffic
    shape = GroupShape.of(Topology.of(places).locations, 1)
    expected = formula(of.shape, shape, sum(spts), history * members).cost(1.0)
    assert sent == pytest.approx(expected * of.itemsize)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("history", [0, 40, 4_000])
def test_computes_every_pair_once(ring: Ring, history: int) -> None:
    of = over(group(times=ONLY_PAIRS, cores=1.0), bytes_per_s=1e15)
    tokens = 80
    outcome = simulate_ring(of, ring, [20] * 4, history)
    pairs = 8 * (tokens * (tokens + 1) / 2 + tokens * history)
    assert outcome.makespan_c[0] == pytest.approx(pairs)
    assert outcome.work_c[0] == pytest.approx(pairs)


@pytest.mark.parametrize("history", [40, 4_000])
def test_sp_ntp_behind_history_computes_every_pair_once(history: int) -> None:
    of = replace(over(group(cores=1.0), bytes_per_s=1e15), times=ONLY_PAIRS)
    (seconds,) = prefill_seconds(of, [WHOLE], 80, history)
    layers = of.shape.layers - 1
    assert seconds == pytest.approx(layers * 8 * (80 * 81 / 2 + 80 * history))


@pytest.mark.parametrize("ring", RINGS)
def test_messages_hide_behind_rounds_and_are_all_there_is_over_slow_links(ring: Ring) -> None:
    places = tuple(f"0-0-{place}" for place in range(4))
    of, spts = over(group(places), bytes_per_s=1e15), [2_000] * 4
    alone = simulate_ring(of, ring, spts, 0).makespan_c[0]
    layer = _RingLayer(of, spts, 0)
    share = 2_000 * of.shape.head_dim * 4 * (2 * of.kv_heads if ring == "ring_kv" else of.heads)
    round_s = float(layer._group.times.attention.pair * 8 * 2_000**2 / 2)
    fast = 2 * share / round_s
    hidden = simulate_ring(over(of, bytes_per_s=fast), ring, spts, 0)
    in_the_end = 0.0 if ring == "ring_kv" else 2_000 * of.heads * (of.shape.head_dim * 4 + 4) / fast
    slow = simulate_ring(over(of, bytes_per_s=share / round_s / 20), ring, spts, 0)
    assert alone <= hidden.makespan_c[0] < 1.1 * alone + in_the_end
    assert slow.makespan_c[0] >= 3 * 20 * round_s
    assert np.isfinite(slow.wires_cwe).any()


def test_few_tokens_behind_much_history_ask_and_all_tokens_go_round_as_keys() -> None:
    """CP's Alg. 1 says so. This engine's pass-KV also queries then, so both are alike."""
    of = group(("0-0-0", "0-0-1"), heads=8, kv_heads=2, inside=LinkSpeed(bytes_per_s=2e8))
    few = {ring: ring_seconds(of, ring, 64, 60_000) for ring in RINGS}
    all_new = {ring: ring_seconds(of, ring, 8_192) for ring in RINGS}
    assert few["ring_q"] == pytest.approx(few["ring_kv"], rel=0.02)
    assert all_new["ring_kv"] < all_new["ring_q"]


def test_history_costs_time() -> None:
    of = group()
    for history in (0, 1_000, 30_000):
        less, more = (
            prefill_seconds(of, [WHOLE], 800, before)[0] for before in (history, 2 * history + 9)
        )
        assert less < more
