"""Layers with a sliding window in the pipeline simulator: every visible pair once, only keys in
reach are sent, and the layers that may drop are the engine's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_groups import TWO_SERVERS, group
from uniform_plan import uniform_plan

from csps.actors.attention.base.levels import DropSchedule
from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.model.traffic import (
    Traffic,
    csa_traffic,
    ulysses_traffic,
    window_traffic,
)
from csps.configurator.pipeline.cases import SimulatedGroup, pairs_in_window
from csps.configurator.pipeline.prefill import (
    WHOLE,
    prefill_seconds,
    ring_seconds,
    simulate_window,
)
from csps.configurator.pipeline.program import LinkSpeed, Mask, Seconds
from csps.configurator.pipeline.script import Script
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import RINGS
from csps.protocols.core.topology import GroupShape, Topology

NOTHING = LinearTime()
ONLY_PAIRS = PhaseTimes(
    qkv=NOTHING, attention=AttentionTimes(pair=1.0), linear=NOTHING, rest=NOTHING
)
FAST = LinkSpeed(bytes_per_s=1e15)
LAYERS, HEADS = 5, 8


def windowed(layers: Collection[int], window: int) -> SimulatedGroup:
    """Return a group on one core whose time is the number of pairs of rows and keys."""
    of = group(times=ONLY_PAIRS, layers=LAYERS, cores=1.0, inside=FAST, between=FAST)
    return replace(of, shape=replace(of.shape, window=window, windowed=frozenset(layers)))


def visible(rows: range, keys: range, window: int) -> int:
    """Count pairs one by one."""
    return sum(row - window < key <= row for row in rows for key in keys)


@given(
    first=st.integers(-20, 60),
    rows=st.integers(0, 30),
    keys=st.integers(0, 40),
    w=st.integers(1, 50),
)
def test_pairs_are_those_that_are_counted_one_by_one(
    first: int, rows: int, keys: int, w: int
) -> None:
    found = pairs_in_window(np.array([first]), np.array([rows]), keys, w)
    assert found.tolist() == [visible(range(first, first + rows), range(keys), w)]


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 2), (1, 4)])
@pytest.mark.parametrize("strategy", ["ntp", "tp", *RINGS])
def test_every_visible_pair_is_computed_once(strategy: str, layers: tuple[int, ...]) -> None:
    of, tokens, window = windowed(layers, 13), 80, 13
    if strategy in RINGS:
        seconds = ring_seconds(of, strategy, tokens)  # type: ignore[arg-type]
    else:
        micro = CsaSettings(strategy=strategy, micro_partitions=((3,),))  # type: ignore[arg-type]
        settings = micro if strategy == "tp" else WHOLE
        (seconds,) = prefill_seconds(of, [settings], tokens)
    near = len(set(layers) & set(range(LAYERS - 1)))
    rows = range(tokens)
    pairs = near * visible(rows, rows, window) + (LAYERS - 1 - near) * visible(rows, rows, tokens)
    assert seconds == pytest.approx(HEADS * pairs)


def test_what_sparse_attention_saves_it_saves_in_layers_without_a_window() -> None:
    sparse = CsaSettings(strategy="ntp", drop_ratios=((0.9,),), pipelined=False)
    exact = CsaSettings(strategy="ntp", pipelined=False)

    def saved(layers: Collection[int]) -> float:
        of = windowed(layers, 4)
        whole, part = prefill_seconds(of, [exact, sparse], 80)
        return float(whole - part)

    # The first layer without a window, and the last one, are exact.
    assert saved((0,)) == pytest.approx(saved(()) * 2 / 3)
    assert saved((0, 2)) == pytest.approx(saved(()) / 3)
    assert saved((0, 2, 3)) == 0


def test_only_keys_in_reach_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks send: `test_only_keys_in_reach_are_sent` of the engine."""
    of, post = windowed((0,), 7), Script.post
    sent: list[Seconds] = []

    def remember(script: Script, bytes_csr: Seconds, pairs_sr: Mask) -> int:
        sent.append(bytes_csr[0])
        return post(script, bytes_csr, pairs_sr)

    monkeypatch.setattr(Script, "post", remember)
    simulate_window(of, [20, 20, 3, 17])
    token = 2 * of.kv_heads * of.shape.head_dim * of.itemsize
    tokens = np.zeros((4, 4))
    tokens[0, 1] = tokens[1, 2] = 6
    tokens[1, 3] = tokens[2, 3] = 3
    assert np.array_equal(sent[0], tokens * token)


def test_traffic_of_an_average_layer_counts_windows() -> None:
    """Of four layers that exchange, two send the keys in reach only."""
    of, spts = windowed((0, 2, 4), 7), [20, 20, 20, 20]
    whole = replace(of.shape, window=None, windowed=frozenset())
    row = 2 * of.shape.kv_heads * of.shape.head_dim
    near = Traffic(inside=2 * 6 * row, between=6 * row)
    pairs = GroupShape.of(Topology.of(TWO_SERVERS).locations, 1)
    expected = (ulysses_traffic(whole, pairs, 80) + near) * 0.5
    assert ulysses_traffic(of.shape, pairs, 80) == expected
    plan = uniform_plan(TWO_SERVERS, levels=1, layers=LAYERS)
    assert (
        csa_traffic(of.shape, plan, tp=1, spts=spts)
        == (csa_traffic(whole, plan, tp=1, spts=spts) + near) * 0.5
    )
    # Each rank of an instance sends its own KV heads, and sums half of the output projection.
    of_two = window_traffic(of.shape, GroupShape.of(Topology.of(TWO_SERVERS).locations, 2), spts)
    assert of_two == near + Traffic(inside=2 * 80 * of.shape.hidden)


@given(layers=st.integers(1, 9), data=st.data())
def test_layers_that_may_drop_are_the_engines(layers: int, data: st.DataObject) -> None:
    windowed = data.draw(st.frozensets(st.integers(0, layers - 1)))
    of = group(layers=layers)
    shape = replace(of.shape, window=3, windowed=windowed)
    schedule = DropSchedule(
        plan=uniform_plan(TWO_SERVERS, levels=2, layers=layers, drop_ratio=0.5),
        layers=layers,
        kv_heads=range(4),
        total_kv_heads=4,
        windowed=windowed,
    )
    drops = [schedule.drops(layer) for layer in range(layers)]
    assert [shape.may_drop(layer) for layer in range(layers)] == drops
