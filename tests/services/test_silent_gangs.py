"""Gangs that say nothing any more, although their connections stand: a frozen process, or packets
that vanish. The router notices by pings, which every rank answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from black_holes import swallow
from fake_gangs import SECRET, FakeCell, FakeGang, fake_cell, loop_iterations, until

from csps.protocols.core.errors import DeadlineExceeded
from csps.protocols.gang.members import LATE_PINGS, SILENT_PINGS, GangMembers, RankAddress
from csps.services.cluster import attachment
from csps.services.cluster.attachment import Cluster, ClusterDeadlines
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import ClusterView, StaticDirectory

PERIOD_S = 0.05


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ping twenty times a second."""
    monkeypatch.setattr(attachment, "KEEP_ALIVE_S", PERIOD_S)


def freeze(cell: FakeCell) -> None:
    """Let a rank read nothing more; its kernel goes on acknowledging."""
    router = cell.decode.ranks[1].router
    assert router is not None
    router._transport.pause_reading()


def cut(cell: FakeCell) -> None:
    """Let the packets to a rank vanish."""
    router = cell.decode.ranks[1].router
    assert router is not None
    swallow(router._transport.get_extra_info("socket"))


def cut_back(cell: FakeCell) -> None:
    """Let the packets from a rank vanish."""
    client = cell.cluster._gangs["decode"]._clients[1]
    swallow(client._transport.get_extra_info("socket"))


FAULTS = pytest.mark.parametrize("fault", [freeze, cut, cut_back])


@FAULTS
async def test_a_gang_with_a_silent_rank_is_given_up(fault: Callable[[FakeCell], None]) -> None:
    async with fake_cell() as cell:
        gang = cell.cluster._gangs["decode"]
        fault(cell)
        began = time.monotonic()
        await until(gang.lost.done)
        assert time.monotonic() - began >= (SILENT_PINGS - 1) * PERIOD_S
        assert "rank 1 of decode gang d1 does not answer" in gang.lost.result()
        assert gang.given_up


@FAULTS
async def test_health_is_red_before_the_gang_is_given_up_and_until_it_answers(
    fault: Callable[[FakeCell], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_cell() as cell:
        gang = cell.cluster._gangs["decode"]
        fault(cell)
        await until(lambda: not cell.service.ready)
        assert not gang.lost.done()
        assert cell.service.trouble == "the decode gang does not answer"
        await until(gang.lost.done)
        assert not cell.service.ready
        await until(lambda: cell.service.ready)  # another connection reaches the rank
        assert cell.cluster._gangs["decode"] is not gang


async def test_a_late_answer_turns_health_green_again() -> None:
    async with fake_cell() as cell:
        gang, router = cell.cluster._gangs["decode"], cell.decode.ranks[1].router
        assert router is not None
        router._transport.pause_reading()
        await until(lambda: gang._clients[1].unanswered > LATE_PINGS)
        assert not cell.service.ready
        router._transport.resume_reading()
        await until(lambda: cell.service.ready)
        assert not gang.lost.done()


async def test_a_stalled_router_gives_up_no_gang() -> None:
    """Whatever has come meanwhile is read before another ping is counted."""
    async with fake_cell() as cell:
        for _ in range(5):
            time.sleep(2 * SILENT_PINGS * PERIOD_S)  # noqa: ASYNC251 (nothing else runs meanwhile)
            await asyncio.sleep(0)
        await loop_iterations()
        assert cell.service.ready
        assert not cell.cluster._gangs["decode"].lost.done()


# --- who ends the gang -----------------------------------------------------------------------


class Replacing(StaticDirectory):
    """A directory that remembers which gangs it was asked to replace."""

    def __init__(self, view: ClusterView | None = None, *, knows: bool = True) -> None:
        super().__init__(view)
        self.asked: list[str] = []
        self._knows = knows

    async def replace(self, gang_id: str) -> bool:
        self.asked.append(gang_id)
        return self._knows


def asked_of(cell: FakeCell) -> list[str]:
    """Return the gangs that the cell's directory is asked to replace from now on."""
    directory = Replacing()
    cell.cluster._directory = directory
    return directory.asked


@FAULTS
async def test_a_silent_gang_is_replaced(fault: Callable[[FakeCell], None]) -> None:
    """Serve may take it for healthy: only the router cannot reach it."""
    async with fake_cell() as cell:
        asked = asked_of(cell)
        fault(cell)
        await until(lambda: asked)
        assert asked == ["d1"]


async def test_a_killed_rank_is_left_to_serve() -> None:
    async with fake_cell() as cell:
        asked = asked_of(cell)
        await cell.decode.kill(1)
        await until(lambda: not cell.service.ready)
        await loop_iterations()
        assert not asked


async def test_a_draining_router_has_no_gang_replaced() -> None:
    async with fake_cell() as cell:
        asked, gang = asked_of(cell), cell.cluster._gangs["decode"]
        cell.cluster.drain()
        freeze(cell)
        await until(gang.lost.done)
        await loop_iterations()
        assert not asked


@pytest.mark.parametrize("knows", [True, False])
async def test_a_gang_out_of_reach_is_replaced_once_in_a_while(knows: bool) -> None:
    """Over a broken network no gang can be reached. A registry that knows nothing is asked again:
    it was just started."""
    prefill = FakeGang("prefill", "p1")
    silent = await asyncio.start_server(lambda *_: asyncio.Event().wait(), "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    mute = GangMembers(gang_id="d1", ranks=(RankAddress(rank=0, host=host, port=port),))
    directory = Replacing(ClusterView(prefill=await prefill.start(), decode=mute), knows=knows)
    cluster = Cluster(
        directory,
        secret=SECRET,
        router_id="test",
        generations=MemoryGenerations(),
        deadlines=ClusterDeadlines(retry_s=0.01, attach_s=0.1),
    )
    failures: list[BaseException | None] = []
    cluster._reconciler._ended = failures.append
    cluster.listen(Mock(busy=False))
    await cluster.start()
    try:
        await until(lambda: len(failures) == 3)
        assert all(isinstance(failure, DeadlineExceeded) for failure in failures)
        await loop_iterations()
        assert directory.asked == ["d1"] * (1 if knows else 3)
    finally:
        await cluster.close()
        await prefill.close()
        silent.close()
