"""Operations that ranks begin never wait for each other in a circle, whatever each step takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from launch_log import Deadlock, Launch, LaunchLog, replay
from small_blocks import blocks_of
from strategy_ranks import MakeStrategy, step_of, strategy_ranks
from tiny_checkpoints import make_checkpoint
from uniform_plan import uniform_plan

from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.csa.strategy import Csa
from csps.actors.attention.ring.ring_kv import RingKv
from csps.actors.attention.ring.ring_q import RingQ
from csps.actors.attention.sp_tp.gathered_weights import GatheredWeights
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.actors.attention.ulysses import Ulysses
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, LayerGroup
from csps.protocols.core.placement import KvSlice

TIMINGS = 10
LAYERS = 3
PLACES = {2: ("0-0-0", "0-1-0"), 4: ("0-0-0", "0-0-1", "0-1-0", "0-1-1")}
SHARES = [
    KvSlice(1, 0, 7),
    KvSlice(0, 7, 19),
]


def send(peer: int) -> Launch:
    return Launch("gang", sends=((peer, 8),))


def recv(peer: int) -> Launch:
    return Launch("gang", recvs=((peer, 8),))


def both(peer: int) -> Launch:
    return Launch("gang", sends=((peer, 8),), recvs=((peer, 8),))


def summed(*members: int) -> Launch:
    return Launch(f"tp{members[0]}", sum_of=members, bytes=8)


@pytest.mark.parametrize(
    ("log", "hangs"),
    [
        ({0: [both(1)], 1: [both(0)]}, False),
        ({0: [send(1), recv(1)], 1: [recv(0), send(0)]}, False),
        ({0: [send(1), recv(1)], 1: [send(0), recv(0)]}, True),
        ({0: [recv(1)], 1: []}, True),
        # Two communicators, each in order, but not the two of them together.
        ({0: [both(2), summed(0, 1)], 1: [both(3), summed(0, 1)],
          2: [both(0), summed(2, 3)], 3: [both(1), summed(2, 3)]}, False),
        ({0: [summed(0, 1), both(2)], 1: [both(3), summed(0, 1)],
          2: [both(0), summed(2, 3)], 3: [summed(2, 3), both(1)]}, True),
        # A relay that is begun when its rows have come, and not where all others expect it.
        ({0: [send(1), send(1)], 1: [recv(0), send(2), recv(0)], 2: [recv(1)]}, False),
        ({0: [send(1), recv(2)], 1: [recv(0), recv(2), send(2)], 2: [recv(1), send(1), send(0)]},
         True),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_found(log: dict[int, list[Launch]], hangs: bool) -> None:
    for seed in range(TIMINGS):
        with pytest.raises(Deadlock) if hangs else nullcontext():
            replay(log, Random(seed))


def test_both_sides_of_a_message_agree() -> None:
    with pytest.raises(AssertionError, match="8 bytes, who expects 4"):
        replay({0: [send(1)], 1: [Launch("gang", recvs=((0, 4),))]}, Random(0))


def plan(instances: int, **fields: Any) -> CsaPlan:
    ratios = ((0.5,), (0.75,))[: 2 if instances == 4 else 1]
    group = LayerGroup(
        first=0,
        stop=LAYERS,
        drop_ratios=ratios,
        micro_partitions=(2,) * (len(ratios) + 1),
    )
    return CsaPlan(
        locations=PLACES[instances],
        levels=len(ratios) + 1,
        layer_groups=(group,),
        **{"importance_window": 4, "sinks": 1, "tail": 1, "pipelined": True, **fields},
    )


def ulysses(instances: int) -> MakeStrategy:
    return lambda group, engine: nullcontext(  # type: ignore[return-value]
        Ulysses(
            group,
            engine.pool,
            heads=engine.heads,
            kv_heads=len(engine.kv_heads),
            scale=engine.spec.scale,
        )
    )


def ring_kv(instances: int) -> MakeStrategy:
    return lambda group, engine: RingKv(
        group,
        engine.pool,
        heads=engine.heads,
        kv_heads=len(engine.kv_heads),
        scale=engine.spec.scale,
    )


def ring_q(instances: int) -> MakeStrategy:
    return lambda group, engine: RingQ(group, engine.pool, scale=engine.spec.scale)


def gathered_weights(instances: int) -> MakeStrategy:
    return GatheredWeights


def sp_tp(**fields: Any) -> Callable[[int], MakeStrategy]:
    def made(instances: int) -> MakeStrategy:
        plan = uniform_plan(
            PLACES[instances], levels=1, layers=LAYERS, **{"micro_partitions": 2, **fields}
        )
        return lambda group, engine: SpTp(group, engine, plan)

    return made


def csa(**fields: Any) -> Callable[[int], MakeStrategy]:
    def made(instances: int) -> MakeStrategy:
        def make(group: Any, engine: Any) -> Any:
            schedule = DropSchedule(
                plan=plan(instances, **fields),
                layers=engine.spec.layers,
                kv_heads=engine.kv_heads,
                total_kv_heads=engine.spec.kv_heads,
            )
            return Csa(group, schedule, engine.pool, heads=engine.heads, scale=engine.spec.scale)

        return make

    return made


STRATEGIES: dict[str, Callable[[int], MakeStrategy]] = {
    "ulysses": ulysses,
    "gathered weights": gathered_weights,
    "ring_kv": ring_kv,
    "ring_q": ring_q,
    "sp-tp": sp_tp(pipelined=True),
    "sp-tp, not pipelined": sp_tp(pipelined=False, micro_partitions=1),
    "csa": csa(),
    "csa, not pipelined": csa(pipelined=False),
    "csa, all queries": csa(importance_window=ALL_QUERIES),
    "csa, same layer": csa(importance_layer="same"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    return make_checkpoint(tmp_path_factory.mktemp("model"), **fields)


@pytest.mark.slow
@pytest.mark.parametrize(("instances", "tp"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategys_exchanges_end_whatever_they_take(
    model: Path, instances: int, tp: int, strategy: str
) -> None:
    bounds = [0, 9, 14, 30, 48] if instances == 4 else [0, 14, 48]
    step = step_of(bounds, [5, 40, 3], starts=[0, 19, 0], history=[[], SHARES, []])
    log = LaunchLog()
    with strategy_ranks(model, instances=instances, tp=tp, log=log) as gang:
        forwards = gang.forwards(step)
        gang.hold_history(step, forwards)
        gang.run(step, STRATEGIES[strategy](instances))
    assert len(log.launches) == instances * tp
    for seed in range(TIMINGS):
        replay(log.launches, Random(seed))


@pytest.mark.parametrize("tp", [1, 2])
async def test_steps_that_interrupt_each_other_and_iterations_end_whatever_they_take(
    model: Path, tp: int
) -> None:
    """Low- and high-priority steps run on overlapping groups while their answers are decoded."""
    prefilled, decoded = LaunchLog(), LaunchLog()
    groups = [([0, 1], False), ([1], True), ([0, 1], True), ([0], False), ([1, 0], False)]
    async with thread_cell(
        model,
        prefill=2,
        decode=2,
        prefill_tp=tp,
        decode_tp=tp,
        quantum_ms=0.1,
        logs=(prefilled, decoded),
    ) as cell:
        requests = [
            Request(
                sequence_id=sequence_id,
                prompt=prompt_of(length, sequence_id),
                slices=even_slices(length, [0, 1]),
            )
            for sequence_id, length in enumerate((90, 20, 30, 50, 70))
        ]
        for request in requests:
            await cell.reserve(request)
        with blocks_of(8):
            for request, (group, high_priority) in zip(requests, groups, strict=True):
                step = prefill_step([request.chunk()], group, high_priority=high_priority)
                cell.submit(step, request.prompt)
            await cell.answer(*requests)
            await cell.prefilled(*cell.steps)
            await cell.freed(*range(len(requests)))
        cell.check_idle()
    for log in (prefilled, decoded):
        assert len(log.launches) == 2 * tp
        for seed in range(TIMINGS):
            replay(log.launches, Random(seed))
