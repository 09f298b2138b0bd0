"""Errors while a rank's report is handled. What the report says reaches the scheduler and the
client, whatever metrics or cost tables make of it; a bug that comes before ends all requests
instead of leaving them to wait."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from fake_gangs import FakeCell, fake_cell, until

from csps.configurator.costs.cost_table import CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.core.errors import Cancelled, QueueFull
from csps.protocols.gang.client import GangClient
from csps.services.requests.request_handle import RequestHandle
from csps.services.router import cost_table_service
from csps.services.router.service import BROKEN
from csps.services.telemetry.observer import NullObserver


class Failing(NullObserver):
    """Metrics with a bug in every method."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)

        def fail(*args: Any) -> None:
            raise ZeroDivisionError(name)

        fail.__qualname__ = name
        return fail


async def read(handle: RequestHandle) -> int:
    return len([token async for token in handle])


async def test_failing_metrics_lose_no_report(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cell(observer=Failing()) as cell:
        cell.run_by_itself()
        for _ in range(3):
            assert await read(cell.submit(tokens=300, max_tokens=5)) == 5
        await cell.wait_until_free()
        assert cell.service.ready
    failed = {record.getMessage() for record in caplog.records if record.exc_info}
    assert {"step_done failed", "first_token failed", "finished failed"} <= failed


async def test_a_cost_table_that_cannot_be_stored_loses_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler would wait for the step for ever, behind a green `/health`."""
    monkeypatch.setattr(cost_table_service, "REFIT_S", 0.0)
    monkeypatch.setattr(cost_table_service, "REFIT_STEPS", 1)
    stored: list[CostTable] = []

    def store(table: CostTable) -> None:
        stored.append(table)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with fake_cell(table=CostTable(latencies=SHIPPED), store_table=store) as cell:
        cell.run_by_itself()
        for _ in range(3):
            assert await read(cell.submit(tokens=300)) == 4
        assert stored
        await cell.wait_until_free()


def break_report(cell: FakeCell, method: str, error: Exception) -> None:
    """Let the handling of a kind of report fail from now on."""

    def fail(*args: Any) -> None:
        raise error

    cell.service._notifications._readers[method] = fail


@pytest.mark.parametrize("method", ["prefill_done", "received", "freed"])
async def test_a_bug_in_the_handling_of_a_report_ends_all_requests(method: str) -> None:
    """Nobody knows what the report would have said, nor whose request waits for it."""
    async with fake_cell() as cell:
        waiting, reported = cell.submit(), cell.submit()
        break_report(cell, method, KeyError("a bug"))
        step = await cell.prefilling(reported)
        sequence_id = cell.sequence_id_of(reported)
        provoke: dict[str, Callable[[], None]] = {
            "prefill_done": lambda: cell.prefill.finish_step(step),
            "received": lambda: cell.decode.receive_kv(sequence_id),
            "freed": lambda: cell.decode.free(sequence_id),
        }
        provoke[method]()
        for handle in (waiting, reported):
            with pytest.raises(Cancelled, match=BROKEN):
                await read(handle)
        assert not cell.service.ready
        assert cell.service.trouble == BROKEN
        with pytest.raises(QueueFull, match=BROKEN):
            cell.submit()
        with pytest.raises(KeyError, match="a bug"):
            cell.service.check_health()


@pytest.mark.parametrize("method", ["prefill_done", "tokens", "link_broken", "unheard_of"])
async def test_a_report_that_is_not_understood_loses_its_gang(method: str) -> None:
    """The gang may be attached again; what it computed is computed again."""
    async with fake_cell() as cell:
        handle = cell.submit()
        await cell.prefilling(handle)
        assert cell.prefill.leader.router is not None
        cell.prefill.leader.router.notify(method, {"nonsense": 1})
        await until(lambda: handle.timings.attempts == 2)
        cell.finish(await cell.decoding(handle), 4)
        assert await read(handle) == 4
        assert len(cell.prefill.leader.attached) == 2
        await cell.wait_until_free()


async def test_live_requests_end_when_a_scheduling_round_fails() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        await cell.prefilling(handle)
        cell.service._driver.fault = ZeroDivisionError("a bug")
        with pytest.raises(ZeroDivisionError, match="a bug"):
            cell.service.check_health()
        with pytest.raises(Cancelled, match=BROKEN):
            await read(handle)


async def test_a_background_task_of_the_cluster_that_ends_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen ranks would not be noticed any more."""

    def fail(gang: GangClient, *, renew: bool = True) -> None:
        raise KeyError("a bug")

    async with fake_cell() as cell:
        cell.service.check_health()
        monkeypatch.setattr(GangClient, "keep_alive", fail)
        await until(lambda: not cell.service.ready)
        with pytest.raises(KeyError, match="a bug"):
            cell.service.check_health()
