"""Pipelining is computing while exchanges are under way: begun, and not waited for yet. Counted by
the order of calls on each rank, so that no clock decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from csa_jobs import CsaCase, on_ranks
from rank_world import RankWorld

from csps.actors.csa import own_rows, owned_level
from csps.actors.transfers import Transfer, Transfers
from csps.protocols.csa import CsaPlan, LayerGroup, halving

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


class Overlaps:
    """How many exchanges are under way when each call of attention begins, rank by rank."""

    def __init__(self) -> None:
        self.at_calls: list[int] = []
        self._under_way: dict[int, dict[int, Transfer]] = {}

    def begun(self, transfer: Transfer) -> None:
        self._of_rank()[id(transfer)] = transfer

    def waited_for(self, transfer: Transfer) -> None:
        self._of_rank().pop(id(transfer), None)

    def computes(self) -> None:
        self.at_calls.append(len(self._of_rank()))

    def _of_rank(self) -> dict[int, Transfer]:
        return self._under_way.setdefault(threading.get_ident(), {})


@contextmanager
def counted() -> Iterator[Overlaps]:
    overlaps = Overlaps()

    def begins(start: Callable[..., Transfer]) -> Callable[..., Transfer]:
        def begin(self: Transfers, *arguments: Any) -> Transfer:
            transfer = start(self, *arguments)
            if self.overlap or self._together is not None:
                overlaps.begun(transfer)
            return transfer

        return begin

    def waits(wait: Callable[..., None]) -> Callable[..., None]:
        def waited(self: Transfers, transfer: Transfer) -> None:
            wait(self, transfer)
            overlaps.waited_for(transfer)

        return waited

    def computing(attention: Callable[..., Any]) -> Callable[..., Any]:
        def computes(*arguments: Any, **named: Any) -> Any:
            overlaps.computes()
            return attention(*arguments, **named)

        return computes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfers, "start", begins(Transfers.start))
        for name in ("wait", "complete", "_finish_one"):
            patch.setattr(Transfers, name, waits(getattr(Transfers, name)))
        for module in (own_rows, owned_level):
            patch.setattr(module, "attention", computing(module.attention))
        yield overlaps


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("micro", [1, 4])
def test_computing_goes_on_while_exchanges_do(world: RankWorld, ratio: float, micro: int) -> None:
    with counted() as overlaps:
        on_ranks(world, case(ratio, micro, pipelined=True))
    under_way = sum(count > 0 for count in overlaps.at_calls)
    assert under_way > len(overlaps.at_calls) / 2
    assert max(overlaps.at_calls) > 1


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_without_pipelining_nothing_is_under_way_while_anything_is_computed(
    world: RankWorld, ratio: float
) -> None:
    with counted() as overlaps:
        on_ranks(world, case(ratio, 4, pipelined=False))
    assert overlaps.at_calls
    assert not any(overlaps.at_calls)
