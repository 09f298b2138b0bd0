"""Gangs that say nothing any more, although their connections stand: a frozen process, or packets
that vanish. The router notices by pings, which every rank answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from black_holes import swallow
from fake_gangs import FakeCell, fake_cell, loop_iterations, until

from csps.protocols.gang.members import LATE_PINGS, SILENT_PINGS
from csps.services.cluster import attachment

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
        assert gang.unreachable


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
