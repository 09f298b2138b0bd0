"""Pipelining computes while exchanges are under way: begun, and not waited for yet."""

from __future__ import annotations

import pytest
from csa_cases import CsaCase, on_ranks
from exchange_counter import counted
from rank_world import RankWorld

from csps.actors.attention.csa import level_attention, running_attention
from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving

SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def case(ratio: float, micro: int, *, pipelined: bool) -> CsaCase:
    plan = CsaPlan(
        locations=SERVERS,
        levels=3,
        layer_groups=(
            LayerGroup(
                first=0, stop=4, drop_ratios=halving(ratio, 3), micro_partitions=(micro,) * 3
            ),
        ),
        importance_window=6,
        sinks=1,
        tail=3,
        pipelined=pipelined,
    )
    return CsaCase(plan=plan, lengths=(200,), bounds=(0, 50, 100, 150, 200), heads=4, kv_heads=2)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("micro", [1, 4])
def test_computing_goes_on_while_exchanges_do(world: RankWorld, ratio: float, micro: int) -> None:
    with counted(running_attention, level_attention) as overlaps:
        on_ranks(world, case(ratio, micro, pipelined=True))
    assert overlaps.share > 0.5
    assert max(map(len, overlaps.at_calls)) > 1


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_without_pipelining_nothing_is_under_way_while_anything_is_computed(
    world: RankWorld, ratio: float
) -> None:
    with counted(running_attention, level_attention) as overlaps:
        on_ranks(world, case(ratio, 4, pipelined=False))
    assert overlaps.at_calls
    assert not any(overlaps.at_calls)
