"""SP-TP that drops far keys, against brute force over pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
import torch
from dense_csa_reference import DenseCsa
from dense_reference import dense_attention
from small_blocks import blocks_of
from strategy_ranks import (
    Forward,
    StrategyRanks,
    dense_forward,
    step_of,
    strategy_ranks,
    windowed_ranks,
)
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, LayerGroup, halving, squaring
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice

LAYERS = 5
LOCATIONS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
BOUNDS = (0, 20, 33, 60, 75)
LONG, SHORT = 68, 7
"""Lengths of a prompt that spans all members, and of one inside the last member."""


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrategyRanks]:
    # Each member has both query heads of one KV head, so it scores like the brute force.
    model = make_checkpoint(
        tmp_path_factory.mktemp("sparse"),
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
    )
    with strategy_ranks(model, instances=4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def windowed_gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrategyRanks]:
    """Return instances whose second and fourth layer see nine positions."""
    folder = tmp_path_factory.mktemp("windowed")
    with windowed_ranks(folder, kv_heads=4) as ranks:
        yield ranks


def plan_of(levels: int, drop_ratio: float, window: int, *, pipelined: bool = True) -> CsaPlan:
    plan = uniform_plan(
        LOCATIONS, levels=levels, layers=LAYERS, drop_ratio=drop_ratio, micro_partitions=3
    )
    return replace(plan, importance_window=window, sinks=2, tail=5, pipelined=pipelined)


def brute_force(
    gang: StrategyRanks,
    plan: CsaPlan,
    start: int = 0,
    dropped: dict[int, Tensor] | None = None,
) -> Forward:
    """Run the long prompt's forward pass; the layer before scores the kept sets.

    Tokens before `start` are history, computed exactly.

    Args:
        dropped: takes the share of importance that each KV head drops, by layer.
    """
    owners = [next(m for m in range(4) if t < BOUNDS[m + 1]) for t in range(LONG)]
    importance: list[Tensor | None] = [None]

    def attend(layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        if (window := gang.network.spec.window_of(layer)) is not None:
            at = torch.arange(len(q_thd))
            return dense_attention(
                q_thd, k_thd, v_thd, q_positions=at, k_positions=at, window=window
            )[0]
        group, drops = plan.layer_group(layer), layer not in (0, LAYERS - 1)
        ratios = [
            [group.drop_ratio(level, head) if drops else 0.0 for level in range(1, plan.levels + 1)]
            for head in range(4)
        ]
        coverages = [
            [group.coverage(level, head) for level in range(1, plan.levels + 1)]
            for head in range(4)
        ]
        oracle = DenseCsa(
            owners=owners,
            segments=plan.segments(),
            ratios=ratios,
            coverages=coverages if drops and group.coverages else None,
            sinks=plan.sinks,
            tail=plan.tail,
            drop_queries=False,
            start=start,
        )
        scale = q_thd.shape[2] ** -0.5
        before = k_thd[:start], v_thd[:start]
        exact_thd, _ = dense_attention(
            q_thd[:start], *before, q_positions=torch.arange(start), k_positions=torch.arange(start)
        )
        q_thd, k_thd, v_thd = q_thd[start:], k_thd[start:], v_thd[start:]
        if plan.importance_layer == "same":
            importance[0] = oracle.judged_by_window(q_thd, k_thd, plan.importance_window, scale)
        if dropped is not None and drops and importance[0] is not None:
            dropped[layer] = oracle.dropped(importance[0])
        weights = oracle.counts(importance[0])
        _, lse_ht = oracle.attend(q_thd, k_thd, v_thd, weights, scale)
        out_thd = oracle.attend_with_history(q_thd, k_thd, v_thd, weights, scale, before)
        if plan.importance_window == ALL_QUERIES:
            importance[0] = importance_by_all(q_thd, k_thd, lse_ht)
        else:
            importance[0] = oracle.judged_by_window(q_thd, k_thd, plan.importance_window, scale)
        return torch.cat((exact_thd, out_thd))

    with torch.inference_mode():
        return dense_forward(gang.network, gang.prompt(0, start + LONG), attend)


def importance_by_all(q_thd: Tensor, k_thd: Tensor, lse_ht: Tensor) -> Tensor:
    """Return (KV heads, tokens), the mean over all queries after each key, which may drop it."""
    k_thd = k_thd.double().repeat_interleave(2, dim=1)
    score_hqk = torch.einsum("qhd,khd->hqk", q_thd.double(), k_thd) * q_thd.shape[2] ** -0.5
    sums_ht = (score_hqk - lse_ht[..., None]).exp().tril().sum(dim=1)
    sums_gt: Tensor = sums_ht.view(-1, 2, LONG).sum(dim=1)
    return sums_gt / torch.arange(LONG, 0, -1)


def check(gang: StrategyRanks, plan: CsaPlan) -> None:
    step, groups = step_of(BOUNDS, [LONG, SHORT]), []
    wanted: dict[int, Tensor] = {}

    def strategy(group: SpGroup, engine: Engine) -> SpTp:
        groups.append((group, engine))
        return SpTp(group, engine, plan)

    results = gang.run(step, strategy)
    exact_short = gang.forwards(step)[1]
    gang.check(step, results, [brute_force(gang, plan, dropped=wanted), exact_short])
    check_dropped(groups, wanted)


def check_dropped(groups: Sequence[tuple[SpGroup, Engine]], wanted: Mapping[int, Tensor]) -> None:
    """Hold what all ranks report together to the share that brute force drops, by layer."""
    sums: dict[int, Tensor] = {}
    for group, engine in groups:
        for report in group.dropped_mass.reports(engine.kv_heads.start):
            assert report.sequence_id == 0, "only the long prompt spans instances"
            both = torch.frombuffer(bytearray(report.dropped + report.total), dtype=torch.float32)
            masses = both.view(2, len(report.layers), -1).double()
            for row, layer in enumerate(report.layers):
                sums[layer] = sums.get(layer, 0) + masses[:, row]
    assert sums.keys() == wanted.keys()
    for layer, (dropped_g, total_g) in sums.items():
        torch.testing.assert_close(dropped_g / total_g, wanted[layer], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("window", [ALL_QUERIES, 16])
@pytest.mark.parametrize(
    ("levels", "drop_ratio"),
    [(2, 0.5), (3, 0.3), pytest.param(3, 0.9, marks=pytest.mark.slow)],
)
def test_far_keys_are_dropped_as_planned(
    gang: StrategyRanks, levels: int, drop_ratio: float, window: int, pipelined: bool
) -> None:
    check(gang, plan_of(levels, drop_ratio, window, pipelined=pipelined))


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("window", [ALL_QUERIES, 16])
def test_a_chunk_sees_all_of_its_history(gang: StrategyRanks, window: int, pipelined: bool) -> None:
    plan, start = plan_of(3, 0.5, window, pipelined=pipelined), 11
    slices = [
        KvSlice(2, 0, 7),
        KvSlice(1, 7, start),
    ]
    step = step_of(BOUNDS, [LONG, SHORT], starts=[start, 0], history=[slices, []])
    forwards = [brute_force(gang, plan, start), gang.forwards(step)[1]]
    gang.hold_history(step, forwards)
    try:
        results = gang.run(step, lambda group, engine: SpTp(group, engine, plan))
        gang.check(step, results, forwards)
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_sequence(0)


@pytest.mark.parametrize("importance_layer", ["previous", "same"])
@pytest.mark.parametrize("pipelined", [True, False])
def test_layers_with_a_window_drop_nothing_and_score_nothing(
    windowed_gang: StrategyRanks, importance_layer: Literal["previous", "same"], pipelined: bool
) -> None:
    plan = plan_of(3, 0.5, 16, pipelined=pipelined)
    check(windowed_gang, replace(plan, importance_layer=importance_layer))


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("levels", [2, 3])
def test_a_layer_may_score_itself(gang: StrategyRanks, levels: int, pipelined: bool) -> None:
    plan = plan_of(levels, 0.6, 16, pipelined=pipelined)
    check(gang, replace(plan, importance_layer="same"))


@pytest.mark.parametrize("pipelined", [True, False])
def test_blocks_of_queries_give_the_same_result(gang: StrategyRanks, pipelined: bool) -> None:
    with blocks_of(4):
        check(gang, plan_of(3, 0.5, 16, pipelined=pipelined))


@pytest.mark.parametrize("importance_layer", ["previous", "same"])
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_far_keys_cover_the_share_that_is_asked_for(
    gang: StrategyRanks, share: float, importance_layer: Literal["previous", "same"]
) -> None:
    group = LayerGroup(
        first=0, stop=LAYERS, coverages=squaring(share, 3), micro_partitions=(3, 1, 1)
    )
    plan = replace(plan_of(3, 0.0, 16), layer_groups=(group,))
    check(gang, replace(plan, importance_layer=importance_layer))


def test_ratios_may_differ_by_head(gang: StrategyRanks) -> None:
    plan = plan_of(3, 0.0, 16)
    ratios = tuple((near, near, 0.5, 0.75) for (near,) in halving(0.25, 3))
    group = LayerGroup(first=0, stop=LAYERS, drop_ratios=ratios, micro_partitions=(2, 1, 1))
    check(gang, replace(plan, layer_groups=(group,)))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_nothing_dropped_is_exact(gang: StrategyRanks, levels: int) -> None:
    step = step_of(BOUNDS, [LONG, SHORT])
    plan = plan_of(levels, 0.0, 16)
    results = gang.run(step, lambda group, engine: SpTp(group, engine, plan))
    gang.check(step, results, gang.forwards(step))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"nested": True}, "nested"),
        ({"decode_kept_only": True}, "decode_kept_only is not supported with SP-TP"),
    ],
)
def test_options_of_sp_ntp_alone_are_refused_before_the_step_starts(
    change: dict[str, Any], what: str
) -> None:
    step = step_of(BOUNDS, [LONG, SHORT])
    plan = replace(plan_of(3, 0.5, 16), **change)
    with pytest.raises(ConfigError, match=what):
        msgspec.structs.replace(step, strategy="sp_tp", csa=plan).check()
