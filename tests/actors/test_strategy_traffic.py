"""Bytes that each strategy sends, against the formulas by which the configurator chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from ring_traffic import ring_kv_traffic, ring_q_traffic
from strategy_ranks import MakeStrategy, StrategyRanks, step_of, strategy_ranks
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.choice import strategy_of
from csps.actors.attention.csa.strategy import Csa
from csps.actors.attention.sp_tp.gathered_weights import GatheredWeights
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.actors.attention.ulysses import Ulysses
from csps.actors.comm.process_group import InstanceGroup
from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.traffic import (
    Traffic,
    csa_traffic,
    gathered_weights_traffic,
    levels_traffic,
    sp_tp_traffic,
    ulysses_traffic,
)
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, CsaSettings, LayerGroup, halving
from csps.protocols.core.placement import contiguous, place, zigzag
from csps.protocols.core.topology import GroupShape, Topology
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

LAYERS, TOKENS, FP32 = 2, 48, 4
GANGS = {
    "4x1": (4, 1, 8, 4),
    "2x2": (2, 2, 8, 4),
    "4x2": (4, 2, 8, 4),
    "1x4": (1, 4, 8, 4),
    "4x1, KV head of two members": (4, 1, 8, 2),
    "2x2, KV head of two ranks": (2, 2, 8, 1),
    "4x1, two members without heads": (4, 1, 2, 1),
}
"""(instances, ranks of each, query heads, KV heads) of each gang."""

summed: list[int] = []
"""Number of elements of every sum over an instance, on every rank."""


@pytest.fixture(scope="module", params=list(GANGS.values()), ids=list(GANGS))
def gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StrategyRanks]:
    instances, tp, heads, kv_heads = request.param
    model: Path = make_checkpoint(
        tmp_path_factory.mktemp("traffic"),
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InstanceGroup, "all_reduce", _counted(InstanceGroup.all_reduce))
        with strategy_ranks(model, instances=instances, tp=tp) as ranks:
            yield ranks


def group_of(gang: StrategyRanks) -> GroupShape:
    """Return a group with the first half of the instances on one server."""
    instances = gang.engines[0].layout.instances
    return GroupShape((-(-instances // 2), instances // 2), gang.engines[0].layout.tp)


def _counted(
    all_reduce: Callable[[InstanceGroup, Tensor], Tensor],
) -> Callable[[InstanceGroup, Tensor], Tensor]:
    def counting(group: InstanceGroup, tensor: Tensor) -> Tensor:
        summed.append(tensor.numel())
        return all_reduce(group, tensor)

    return counting


def shape_of(gang: StrategyRanks) -> AttentionShape:
    spec = gang.network.spec
    return AttentionShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )


def measured(gang: StrategyRanks, make: MakeStrategy, step: PrefillStep | None = None) -> Traffic:
    """Count the elements that a step sends in one layer.

    Includes sums over instances by a ring, without the MLP's sum, which all strategies have.
    """
    instances, group = gang.engines[0].layout.instances, group_of(gang)
    for engine in gang.engines:
        engine.mesh.bytes_sent[:] = [0] * engine.mesh.world_size
    summed.clear()
    bounds = [TOKENS * index // instances for index in range(instances + 1)]
    gang.run(step or step_of(bounds, [TOKENS]), make)
    sums = sum(summed) / LAYERS - TOKENS * gang.network.spec.hidden * group.tp * (group.tp > 1)
    total = Traffic(inside=sums * 2 * (group.tp - 1) / group.tp)
    for engine in gang.engines:
        for peer, sent in enumerate(engine.mesh.bytes_sent):
            elements = sent / FP32 / LAYERS
            here = group.instance_servers[engine.instance]
            near = group.instance_servers[engine.layout.instance_of(peer)] == here
            total += Traffic(inside=elements) if near else Traffic(between=elements)
    return total


def locations_of(group: GroupShape) -> list[str]:
    return [f"0-{server}-{index}" for index, server in enumerate(group.instance_servers)]


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("micro_partitions", [1, 3])
def test_sp_tp(gang: StrategyRanks, hierarchical: bool, micro_partitions: int) -> None:
    group = group_of(gang)
    plan = uniform_plan(
        locations_of(group),
        levels=1,
        layers=LAYERS,
        micro_partitions=micro_partitions,
    )
    actual = measured(gang, lambda g, engine: SpTp(g, engine, plan, hierarchical=hierarchical))
    assert actual == sp_tp_traffic(shape_of(gang), group, TOKENS, hierarchical=hierarchical)


def ulysses(group: SpGroup, engine: Engine) -> nullcontext[Ulysses]:
    kv_heads = len(engine.kv_heads)
    scale = engine.spec.scale
    return nullcontext(
        Ulysses(group, engine.pool, heads=engine.heads, kv_heads=kv_heads, scale=scale)
    )


def test_ulysses(gang: StrategyRanks) -> None:
    assert measured(gang, ulysses) == ulysses_traffic(shape_of(gang), group_of(gang), TOKENS)


def test_gathered_weights(gang: StrategyRanks) -> None:
    expected = gathered_weights_traffic(shape_of(gang), group_of(gang), TOKENS)
    assert measured(gang, GatheredWeights) == expected


@pytest.mark.parametrize("strategy", ["ring_kv", "ring_q"])
@pytest.mark.parametrize("history", [0, TOKENS, 6 * TOKENS])
def test_rings(gang: StrategyRanks, strategy: str, history: int) -> None:
    """Cover histories that rotate, and one so long that pass-KV asks for it."""
    group = group_of(gang)
    order = tuple(range(group.sp))
    chunk = PrefillChunk(
        sequence_id=1,
        start=history,
        length=TOKENS,
        rows=place(order, zigzag(TOKENS, group.sp), start=history),
        history=place(
            order, contiguous([history * index // group.sp for index in range(group.sp + 1)])
        ),
    )
    step = PrefillStep(
        step_id=1,
        group=order,
        bounds=tuple(TOKENS * index // group.sp for index in range(group.sp + 1)),
        chunks=(chunk,),
        strategy=strategy,
    )
    formula = {"ring_kv": ring_kv_traffic, "ring_q": ring_q_traffic}[strategy]
    gang.hold_history(step, gang.forwards(step))
    try:
        actual = measured(gang, strategy_of, step)
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_sequence(1)
    assert actual == formula(shape_of(gang), group, TOKENS, history)


def test_levels(gang: StrategyRanks) -> None:
    group = group_of(gang)
    plan = CsaSettings(micro_partitions=((2,),)).for_group(
        locations_of(group), layers=LAYERS, longest_spt=TOKENS // group.sp
    )

    def levels(members: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
        step = msgspec.structs.replace(members.step, strategy="levels", csa=plan)
        return strategy_of(replace(members, step=step), engine)

    assert measured(gang, levels) == levels_traffic(shape_of(gang), group, TOKENS)


def csa_plan(shape: AttentionShape, group: GroupShape, window: int) -> CsaPlan:
    """Return a plan with all levels and a different ratio for each KV head."""
    levels = len(Topology.of(locations_of(group)).granularities)
    ratios = halving([(1 + head) / (1 + shape.kv_heads) for head in range(shape.kv_heads)], levels)
    return CsaPlan(
        locations=tuple(locations_of(group)),
        levels=levels,
        layer_groups=(LayerGroup(first=0, stop=shape.layers, drop_ratios=ratios),),
        importance_window=window,
        sinks=1,
        tail=3,
    )


@pytest.mark.parametrize("window", [ALL_QUERIES, 16])
def test_csa(gang: StrategyRanks, window: int) -> None:
    """Score in the first layer and drop in the second; the last of three layers is not run."""
    group, shape = group_of(gang), replace(shape_of(gang), layers=LAYERS + 1)
    plan = csa_plan(shape, group, window)

    def csa(members: SpGroup, engine: Engine) -> Csa:
        schedule = DropSchedule(
            plan=plan,
            layers=shape.layers,
            kv_heads=engine.kv_heads,
            total_kv_heads=shape.kv_heads,
        )
        return Csa(members, schedule, engine.pool, heads=engine.heads, scale=engine.spec.scale)

    spts = [TOKENS // group.sp] * group.sp
    assert measured(gang, csa) == csa_traffic(shape, plan, tp=group.tp, spts=spts)
