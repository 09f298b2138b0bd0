"""Cancelled sequences are not computed, and the others' results do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from strategy_ranks import LAYERS, Gangs, StrategyRanks, assert_near, step_of
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention import ulysses
from csps.actors.attention.base import history
from csps.actors.attention.choice import strategy_of
from csps.actors.attention.csa import level_attention as owned_level
from csps.actors.attention.csa import running_attention as own_rows
from csps.actors.attention.ring import ring
from csps.actors.attention.sp_tp import head_attention as sp_tp_attention
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillStep

MODULES: tuple[ModuleType, ...] = (
    history,
    own_rows,
    owned_level,
    ring,
    sp_tp_attention,
    ulysses,
)
SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
LENGTHS = (5, 44, 3, 23)
BOUNDS = (0, 15, 33, 60, 75)


def plan(drop_ratio: float, **fields: Any) -> CsaPlan:
    """Return a plan in which the middle one of three layers drops tokens."""
    whole = uniform_plan(
        SERVERS, levels=3, layers=LAYERS, drop_ratio=drop_ratio, micro_partitions=2
    )
    return replace(whole, importance_window=8, sinks=1, tail=2, **fields)


CASES: dict[str, tuple[str, CsaPlan | None]] = {
    "ulysses": ("ulysses", None),
    "gathered weights": ("gathered_weights", None),
    "ring pass-kv": ("ring_kv", None),
    "ring pass-q": ("ring_q", None),
    "sp-tp": ("sp_tp", None),
    "sp-tp, sparse": ("sp_tp", plan(0.5)),
    "sp-tp, sparse by all": ("sp_tp", replace(plan(0.5), importance_window=ALL_QUERIES)),
    "sp-tp, sparse by itself": ("sp_tp", plan(0.5, importance_layer="same")),
    "levels": ("levels", plan(0.0)),
    "csa": ("csa", plan(0.5)),
    "csa by all": ("csa", replace(plan(0.5), importance_window=ALL_QUERIES)),
    "csa by itself": ("csa", plan(0.5, importance_layer="same")),
    "csa, one by one": ("csa", plan(0.5, pipelined=False)),
}


class Work:
    """Products of queries and keys in all calls of attention, of all ranks."""

    def __init__(self) -> None:
        self.done = 0
        self._counting = threading.Lock()

    def counted(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def counting(q_thd: Tensor, k_thd: Tensor, *args: Any, **fields: Any) -> Any:
            with self._counting:
                self.done += q_thd.shape[0] * q_thd.shape[1] * k_thd.shape[0]
            return attention(q_thd, k_thd, *args, **fields)

        return counting


def ran(gang: StrategyRanks, step: PrefillStep, cancelled: tuple[int, ...]) -> tuple[Tensor, int]:
    """Return all rows after the last layer, and the work that they took."""
    work = Work()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "attention", work.counted(module.attention))
        results = gang.run(step, strategy_of, cancelled=cancelled)
    return torch.cat([result.x_td for result in results]), work.done


@pytest.mark.parametrize("case", CASES)
def test_cancelled_sequences_are_not_computed(gangs: Gangs, case: str) -> None:
    strategy, csa = CASES[case]
    gang = gangs("gqa", 4, 1)
    slices = [
        KvSlice(2, 0, 9),
        KvSlice(1, 9, 11),
    ]
    step = step_of(
        BOUNDS,
        LENGTHS,
        starts=[0, 11, 0, 0],
        history=[(), slices, (), ()],
        strategy=strategy,
        csa=csa,
    )
    gang.hold_history(step, gang.forwards(step))
    try:
        whole, most = ran(gang, step, ())
        first, left = ran(gang, step, (1, 2))
        other, rest = ran(gang, step, (0, 3))
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_sequence(1)
    assert left + rest == most
    assert 0 < left < rest, "the second piece is the longest"
    assert first.isfinite().all()
    assert other.isfinite().all()
    for rows, x_td in ((slice(0, 5), first), (slice(52, 75), first), (slice(5, 52), other)):
        assert_near(x_td[rows], whole[rows])
