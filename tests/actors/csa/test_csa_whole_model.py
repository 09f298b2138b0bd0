"""SP-NTP with sparse attention through a whole model, against brute force over pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_csa_reference import DenseCsa
from dense_reference import dense_attention
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

from csps.actors.attention.choice import strategy_of
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, LayerGroup, halving

LAYERS = 5
KV_HEADS = 4
LOCATIONS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
BOUNDS = (0, 20, 33, 60, 75)
LONG, SHORT = 68, 7
"""Lengths of a prompt that spans all members, and of one inside the last member."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("sparse"),
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=8,
    )


@pytest.fixture(scope="module")
def gang(model: Path) -> Iterator[StrategyRanks]:
    with strategy_ranks(model, instances=4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def parallel_gang(model: Path) -> Iterator[StrategyRanks]:
    """Return instances of two tensor-parallel ranks, which have two KV heads each."""
    with strategy_ranks(model, instances=4, tp=2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def windowed_gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrategyRanks]:
    """Return instances whose second and fourth layer see nine positions."""
    folder = tmp_path_factory.mktemp("windowed")
    with windowed_ranks(folder, kv_heads=KV_HEADS) as ranks:
        yield ranks


def plan_of(levels: int, drop_ratio: float, window: int = 16, *, pipelined: bool = True) -> CsaPlan:
    plan = uniform_plan(
        LOCATIONS, levels=levels, layers=LAYERS, drop_ratio=drop_ratio, micro_partitions=3
    )
    return replace(plan, importance_window=window, sinks=2, tail=5, pipelined=pipelined)


def ratios_per_head() -> CsaPlan:
    """Return a plan in which no two heads of one tensor-parallel rank keep equally many."""
    ratios = tuple((0.0, near, 0.5, 0.75) for (near,) in halving(0.25, 3))
    group = LayerGroup(first=0, stop=LAYERS, drop_ratios=ratios, micro_partitions=(2, 1, 2))
    return replace(plan_of(3, 0.0), layer_groups=(group,))


def oracle(plan: CsaPlan, layer: int) -> DenseCsa:
    """Return the definition for one layer of the long prompt."""
    group, drops = plan.layer_group(layer), layer not in (0, LAYERS - 1)
    levels = range(1, plan.levels + 1)
    return DenseCsa(
        owners=[next(m for m in range(4) if t < BOUNDS[m + 1]) for t in range(LONG)],
        segments=plan.segments(),
        ratios=[
            [group.drop_ratio(level, head) if drops else 0.0 for level in levels]
            for head in range(KV_HEADS)
        ],
        sinks=plan.sinks,
        tail=plan.tail,
    )


def brute_force(gang: StrategyRanks, plan: CsaPlan) -> Forward:
    """Run the long prompt's forward pass; the layer before scores the kept sets."""
    importance: list[Tensor | None] = [None]

    def attend(layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        if (window := gang.network.spec.window_of(layer)) is not None:
            at = torch.arange(len(q_thd))
            return dense_attention(
                q_thd, k_thd, v_thd, q_positions=at, k_positions=at, window=window
            )[0]
        dense, scale = oracle(plan, layer), q_thd.shape[2] ** -0.5
        weights = dense.counts(importance[0])
        out_thd, lse_ht = dense.attend(q_thd, k_thd, v_thd, weights, scale)
        if plan.importance_window == ALL_QUERIES:
            importance[0] = dense.judged_by_all(q_thd, k_thd, lse_ht, weights, scale)
        else:
            importance[0] = dense.judged_by_window(q_thd, k_thd, plan.importance_window, scale)
        return out_thd

    with torch.inference_mode():
        return dense_forward(gang.network, gang.prompt(0, LONG), attend)


def check(gang: StrategyRanks, plan: CsaPlan) -> Forward:
    """Check residual stream and KV of every rank; return the brute force's forward pass."""
    step = step_of(BOUNDS, [LONG, SHORT], strategy="csa", csa=plan)
    sparse, exact_short = brute_force(gang, plan), gang.forwards(step)[1]
    gang.check(step, gang.run(step, strategy_of), [sparse, exact_short])
    return sparse


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("window", [ALL_QUERIES, 16])
@pytest.mark.parametrize(("levels", "drop_ratio"), [(2, 0.5), (3, 0.4)])
def test_every_layer_is_as_defined(
    gang: StrategyRanks, levels: int, drop_ratio: float, window: int, pipelined: bool
) -> None:
    check(gang, plan_of(levels, drop_ratio, window, pipelined=pipelined))


@pytest.mark.parametrize("window", [ALL_QUERIES, 16])
@pytest.mark.parametrize(("levels", "drop_ratio"), [(2, 0.5), (3, 0.4)])
def test_layers_with_a_window_drop_nothing_and_score_nothing(
    windowed_gang: StrategyRanks, levels: int, drop_ratio: float, window: int
) -> None:
    sparse = check(windowed_gang, plan_of(levels, drop_ratio, window))
    exact = windowed_gang.forwards(step_of(BOUNDS, [LONG, SHORT]))[0]
    assert (sparse.x_td - exact.x_td).abs().max() > 1e-3, "the third layer drops tokens"


def test_nothing_dropped_is_exact(gang: StrategyRanks) -> None:
    exact = gang.forwards(step_of(BOUNDS, [LONG, SHORT]))[0]
    torch.testing.assert_close(check(gang, plan_of(3, 0.0)).x_td, exact.x_td)


@pytest.mark.parametrize("pipelined", [True, False])
def test_tensor_parallel_ranks_keep_what_their_own_heads_do(
    parallel_gang: StrategyRanks, pipelined: bool
) -> None:
    plan = replace(ratios_per_head(), pipelined=pipelined)
    sparse = check(parallel_gang, plan)
    swapped = [tuple(reversed(ratios)) for ratios in plan.layer_groups[0].drop_ratios]
    group = replace(plan.layer_groups[0], drop_ratios=tuple(swapped))
    other = brute_force(parallel_gang, replace(plan, layer_groups=(group,)))
    assert (sparse.x_td - other.x_td).abs().max() > 1e-3, "the test could not tell heads apart"
