"""The order in which one rollout takes over from another, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from csps.protocols.core.errors import FaultError
from csps.protocols.gang.members import GangRole
from csps.services.cluster import handover as module
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.handover import (
    Handover,
    HandoverDeadlines,
    ServingRollouts,
    wait_for_former_router,
)
from csps.services.cluster.membership import Census, ClusterView

DEADLINE_S = 60.0
ROLES: tuple[GangRole, ...] = ("prefill", "decode")
SOON = HandoverDeadlines(placement_s=0.0, poll_s=0.0)
NEVER = HandoverDeadlines(placement_s=600.0, poll_s=0.0)


@dataclass
class Cell:
    """What a router sees of its own rollout's gangs, and of others: `Cluster` and `Directory`."""

    link: object = None
    begun: frozenset[GangRole] = frozenset()
    outdated: tuple[str, ...] = ()
    settled: bool = True
    ended: list[str] = field(default_factory=list)
    stood_by: list[bool] = field(default_factory=list)
    reachable: bool = True
    asked: int = 0

    def stand_by(self, waits: bool) -> None:
        self.stood_by.append(waits)

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        raise NotImplementedError

    async def replace(self, gang_id: str) -> bool:
        self.ended.append(gang_id)
        self.outdated = tuple(gang for gang in self.outdated if gang != gang_id)
        return True

    async def census(self) -> Census:
        self.asked += 1
        if not self.reachable:
            raise FaultError("the registry is being replaced")
        return Census(begun=self.begun, outdated=self.outdated, settled=self.settled)


@asynccontextmanager
async def router(
    cell: Cell, store: MemoryGenerations, deadlines: HandoverDeadlines
) -> AsyncIterator[asyncio.Task[None]]:
    """Start the router of rollout 2; yield the wait for its turn."""
    made = Handover(cell, cell, ServingRollouts(store, 2), ROLES, deadlines=deadlines)  # type: ignore[arg-type]
    turn = asyncio.create_task(made.wait_turn())
    try:
        yield turn
    finally:
        turn.cancel()
        await asyncio.wait({turn})
        await made.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0)


async def serving(rollout: int) -> MemoryGenerations:
    """Return a store in which this rollout's router has published itself."""
    store = MemoryGenerations()
    await ServingRollouts(store, rollout).renew()
    return store


async def test_the_first_rollout_waits_for_nothing() -> None:
    async with router(Cell(), MemoryGenerations(), NEVER) as turn:
        await asyncio.wait_for(turn, DEADLINE_S)


async def test_a_router_waits_for_its_gangs_while_the_former_one_serves() -> None:
    store, cell = await serving(1), Cell(begun=frozenset(ROLES))
    async with router(cell, store, SOON) as turn:
        await until(lambda: cell.asked > 10)
        assert not turn.done()
        assert list(await store.heartbeats()) == [1], "ranks of a third would wait for it"
        cell.link = object()
        await asyncio.wait_for(turn, DEADLINE_S)
        await until(lambda: 2 in store._heartbeats)
    assert list(await store.heartbeats()) == [1]


async def test_a_router_does_not_wait_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    store = await serving(1)
    async with router(Cell(), store, NEVER) as turn:
        await asyncio.wait_for(turn, DEADLINE_S)
        await until(lambda: 1 not in store._heartbeats)


async def test_a_newer_rollout_is_not_waited_for() -> None:
    async with router(Cell(), await serving(3), NEVER) as turn:
        await asyncio.wait_for(turn, DEADLINE_S)


async def test_gangs_without_a_place_get_that_of_the_former_ones_once_these_are_free() -> None:
    store, cell = await serving(1), Cell(begun=frozenset({"prefill"}), outdated=("a", "b"))
    async with router(cell, store, SOON) as turn:
        await asyncio.wait_for(turn, DEADLINE_S)
        await until(lambda: cell.stood_by)
        asked = len(cell.stood_by)
        await until(lambda: len(cell.stood_by) > asked + 10)
        assert cell.stood_by[-1]
        assert not cell.ended, "the former router still uses them"
        await store.withdraw_heartbeat(1)
        await until(lambda: len(cell.ended) == 2)
        assert not cell.stood_by[-1]
    assert cell.ended == ["a", "b"]


async def test_the_former_rollout_does_not_end_for_gangs_that_would_not_fit_alone() -> None:
    possible, asked = False, 0

    def feasible() -> bool:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise FaultError("Serve's controller is being replaced")
        return possible

    rollouts, cell = ServingRollouts(await serving(1), 2), Cell()
    made = Handover(cell, cell, rollouts, ROLES, feasible=feasible, deadlines=SOON)  # type: ignore[arg-type]
    turn = asyncio.create_task(made.wait_turn())
    await until(lambda: asked > 10)
    assert not turn.done()
    possible = True
    await asyncio.wait_for(turn, DEADLINE_S)
    await made.close()


async def test_former_gangs_that_are_in_nobodys_way_are_left_to_serve() -> None:
    cell = Cell(begun=frozenset(ROLES), outdated=("a",))
    async with router(cell, MemoryGenerations(), SOON) as turn:
        await asyncio.wait_for(turn, DEADLINE_S)
        await until(lambda: cell.asked > 10)
    assert not cell.ended


async def test_a_directory_that_does_not_answer_says_nothing_about_places() -> None:
    store, cell = await serving(1), Cell(reachable=False)
    async with router(cell, store, SOON) as turn:
        await until(lambda: cell.asked > 10)
        assert not turn.done()
        cell.reachable = True
        await asyncio.wait_for(turn, DEADLINE_S)


class Unreachable(MemoryGenerations):
    """A store that fails until it is told otherwise."""

    fails = True
    asked = 0

    async def heartbeats(self) -> dict[int, int]:
        self.asked += 1
        if self.fails:
            raise FaultError("the GCS is gone")
        return await super().heartbeats()


async def test_ranks_live_on_until_it_is_known_that_nobody_uses_the_former_ones() -> None:
    store, checked = Unreachable(), list[int]()
    rollouts = ServingRollouts(store, 2)
    waiting = asyncio.create_task(
        wait_for_former_router(rollouts, lambda: checked.append(1), poll_s=0)
    )
    await until(lambda: store.asked > 10)
    former = ServingRollouts(store, 1)
    await former.renew()
    store.fails = False
    asked = store.asked
    await until(lambda: store.asked > asked + 10)
    assert not waiting.done()
    assert checked
    await former.withdraw()
    await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_rank_that_breaks_while_it_waits_fails() -> None:
    def broken() -> None:
        raise FaultError("the engine ended")

    with pytest.raises(FaultError, match="the engine ended"):
        await wait_for_former_router(ServingRollouts(await serving(1), 2), broken, poll_s=0)
