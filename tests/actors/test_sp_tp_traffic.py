"""Bytes on the wire against the formulas by which the configurator chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from strategy_ranks import MakeStrategy, StrategyRanks, job_of, strategy_ranks
from tiny_checkpoints import make_checkpoint

from csps.actors.strategies.gathered_weights import GatheredWeights
from csps.actors.strategies.sp_tp import SpTp
from csps.configurator.strategy_choice import (
    AttentionShape,
    GroupShape,
    Traffic,
    ntp_traffic,
    sp_tp_traffic,
)
from csps.protocols.csa import CsaPlan

LAYERS, TOKENS, FP32 = 2, 48, 4
GANGS = [(4, 1), (2, 2), (1, 4)]


@pytest.fixture(scope="module", params=GANGS, ids=lambda gang: f"{gang[0]}x{gang[1]}")
def gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StrategyRanks]:
    instances, tp = request.param
    model: Path = make_checkpoint(
        tmp_path_factory.mktemp("traffic"),
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
    )
    with strategy_ranks(model, instances=instances, tp=tp) as ranks:
        yield ranks


def group_of(gang: StrategyRanks) -> GroupShape:
    """The first half of the instances on one server."""
    instances = gang.engines[0].layout.instances
    return GroupShape(
        servers=tuple(2 * index // instances for index in range(instances)),
        tp=gang.engines[0].layout.tp,
    )


def shape_of(gang: StrategyRanks) -> AttentionShape:
    spec = gang.network.spec
    return AttentionShape(
        hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim
    )


def measured(gang: StrategyRanks, make: MakeStrategy) -> Traffic:
    """Elements that a job sends in one layer."""
    instances, group = gang.engines[0].layout.instances, group_of(gang)
    for engine in gang.engines:
        engine.mesh.bytes_sent[:] = [0] * engine.mesh.world_size
    bounds = [TOKENS * index // instances for index in range(instances + 1)]
    gang.run(job_of(bounds, [TOKENS]), make)
    total = Traffic()
    for engine in gang.engines:
        for peer, sent in enumerate(engine.mesh.bytes_sent):
            elements = sent / FP32 / LAYERS
            here = group.servers[engine.instance]
            near = group.servers[engine.layout.instance_of(peer)] == here
            total += Traffic(inside=elements) if near else Traffic(between=elements)
    return total


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("micro_partitions", [1, 3])
def test_sp_tp(gang: StrategyRanks, hierarchical: bool, micro_partitions: int) -> None:
    group = group_of(gang)
    plan = CsaPlan.uniform(
        [f"0-{server}-{index}" for index, server in enumerate(group.servers)],
        levels=1,
        layers=LAYERS,
        micro_partitions=micro_partitions,
    )
    actual = measured(gang, lambda g, engine: SpTp(g, engine, plan, hierarchical=hierarchical))
    assert actual == sp_tp_traffic(shape_of(gang), group, TOKENS, hierarchical=hierarchical)


def test_sp_ntp(gang: StrategyRanks) -> None:
    assert measured(gang, GatheredWeights) == ntp_traffic(shape_of(gang), group_of(gang), TOKENS)
