"""Replays of a live router's decision log from its files alone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gangs import QUICK, FakeGang, fake_cell, loop_iterations

from csps.configurator.costs.cost_table import CostTable, stored
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.attention.ring_choice import RingModel, RingRules, RingSpeeds
from csps.protocols.core.errors import ConfigError
from csps.services.requests.request_handle import RequestHandle
from csps.services.router import decision_log
from csps.services.router.decision_log import FORMER_LOGS, DecisionLog, replayed
from csps.services.router.scheduler_factory import make_deadlines, open_log
from csps.services.scheduling.core.decision_log import (
    DecisionLogHeader,
    EventBatch,
    LogWriter,
    command_bytes,
    read_log,
)
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.deciding.decisions import digest_of
from csps.services.scheduling.events.events import AnyEvent, Drain, Submitted, Wake
from csps.services.scheduling.policies.registry import make_policy
from csps.services.settings.settings import Settings

_SPEEDS = RingSpeeds(flops=1e14, bytes_per_s=1e10)
_RINGS = RingRules(
    model=RingModel(heads=32, kv_heads=8, element_bytes=2), inside=_SPEEDS, between=_SPEEDS
)
TABLE = CostTable(latencies=SHIPPED, rings=_RINGS)
OPTIONS = {"spt_tokens": 1000, "short_tokens": 200}


class Noting(Scheduler):
    """A scheduler that remembers its commands, as `replayed` writes them."""

    commands = b""

    def handle(self, events: Iterable[AnyEvent], now_ns: int) -> RoundResult:
        outcome = super().handle(events, now_ns)
        self.commands += command_bytes(outcome.commands)
        return outcome


async def read(handle: RequestHandle) -> int:
    return len([token async for token in handle])


async def test_a_run_with_faults_is_replayed_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    policy = make_policy("csps", OPTIONS)
    header = DecisionLogHeader(
        policy="csps",
        policy_digest=digest_of(policy),
        table_digest=TABLE.digest,
        options=OPTIONS,
        deadlines=QUICK,
    )
    made: list[Noting] = []

    def scheduler(*args: Any, **options: Any) -> Scheduler:
        made.append(Noting(*args, **options))
        return made[0]

    with DecisionLog(path, header, TABLE) as log:
        async with fake_cell(
            table=TABLE, store_table=log.store_table, recorder=log, make_scheduler=scheduler
        ) as cell:
            cell.run_by_itself()
            requests = [cell.submit(50 + 397 * n % 2500, 1 + n % 7) for n in range(25)]
            await loop_iterations(20)
            requests[3].cancel()
            await cell.prefill.kill(0)
            await cell.replace(FakeGang("prefill", "p2"))
            cell.run_by_itself()
            await asyncio.gather(*map(read, requests))
            await cell.wait_until_free()
    assert made[0].commands.count(b"reserve") > 25  # some were tried again
    assert replayed(path) == made[0].commands
    tables = list((tmp_path / "decisions.tables").iterdir())
    assert len(tables) > 1  # what the configurator has filled in was put in force
    next(table for table in tables if table.name == TABLE.digest).unlink()
    with pytest.raises(ConfigError, match="lacks the cost table"):
        replayed(path)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fixed_sp", "sp": 1},
        {"policy": "tetris", "chunked": False, "layout": "striped"},
        {"policy": "tetris", "improvement_rates": [[1.0, 0.3]]},
    ],
)
def test_a_log_is_written_only_if_the_settings_name_it(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    assert open_log(Settings(model=str(tiny_llama)), TABLE) is None
    scheduling = {**options, "log": str(tmp_path / "log")}
    settings = Settings.model_validate({"model": str(tiny_llama), "scheduling": scheduling})
    log = open_log(settings, TABLE)
    assert log is not None
    log.close()
    assert replayed(tmp_path / "log") == b""
    assert make_deadlines(settings).transfer_ns == 60_000_000_000


def test_a_log_that_cannot_be_written_is_a_config_error(tiny_llama: Path) -> None:
    scheduling = {"log": "/proc/none/of/this"}
    settings = Settings.model_validate({"model": str(tiny_llama), "scheduling": scheduling})
    with pytest.raises(ConfigError, match=r"scheduling\.log: "):
        open_log(settings, TABLE)


HEADER = DecisionLogHeader(
    policy="csps", policy_digest=digest_of(make_policy("csps")), table_digest=TABLE.digest
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def refitted(number: int) -> CostTable:
    """Return another table than those of other numbers."""
    return replace(TABLE, overhead_ns=number)


def logged(path: Path) -> list[EventBatch]:
    return list(read_log(path)[1])


def test_the_logs_of_former_routers_stay(tmp_path: Path) -> None:
    """They show why these routers ended."""
    path = tmp_path / "log"
    for number in range(7):
        with DecisionLog(path, HEADER, TABLE) as log:
            log.store_table(refitted(number + 1))
            log.record(number, [Wake()])
    names = ["log", *(f"log.{number}" for number in range(1, FORMER_LOGS + 1))]
    assert {file.name for file in tmp_path.iterdir()} == {
        *names,
        *(f"{name}.tables" for name in names),
    }
    for age, name in enumerate(names):
        ((now_ns, events),) = logged(tmp_path / name)
        assert (now_ns, events) == (6 - age, [Wake()])
        assert {table.name for table in (tmp_path / f"{name}.tables").iterdir()} == {
            TABLE.digest,
            refitted(7 - age).digest,
        }
        replayed(tmp_path / name)


def test_a_router_that_drains_writes_on_to_its_own_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with DecisionLog(path, HEADER, TABLE) as older:
        older.record(1, [Wake()])
        with DecisionLog(path, HEADER, TABLE) as newer:
            newer.record(2, [Drain()])
            older.store_table(refitted(1))
            older.record(3, [Wake()])
    assert [batch.now_ns for batch in logged(path)] == [2]
    assert [batch.now_ns for batch in logged(tmp_path / "log.1")] == [1, 3]
    assert len(list((tmp_path / "log.1.tables").iterdir())) == 2
    assert len(list((tmp_path / "log.tables").iterdir())) == 1


def fill_disk(log: DecisionLog) -> None:
    """Let the kernel refuse whatever the log writes from now on."""
    assert log._writer is not None
    log._writer._file = log._file = open("/dev/full", "wb")  # noqa: SIM115 (the log closes it)


async def test_a_full_disk_ends_the_log_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LogWriter, "BUFFERED", 1)
    with DecisionLog(tmp_path / "log", HEADER, TABLE) as log:
        async with fake_cell(table=TABLE, store_table=log.store_table, recorder=log) as cell:
            cell.run_by_itself()
            assert await read(cell.submit()) == 4
            before = len(logged(tmp_path / "log"))
            assert before
            fill_disk(log)
            for _ in range(3):
                assert await read(cell.submit()) == 4
            await cell.wait_until_free()
            assert cell.service.ready
        assert len(logged(tmp_path / "log")) == before
    assert (
        warnings(caplog).count(
            f"the decision log {tmp_path / 'log'} ends: [Errno 28] No space left on device"
        )
        == 1
    )


def test_tables_of_one_log_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decision_log, "MAX_TABLE_BYTES", 4 * len(stored(TABLE)))
    path = tmp_path / "log"
    with DecisionLog(path, HEADER, TABLE) as log:
        for number in range(1, 100):
            log.record(number, [Wake()])
            log.store_table(refitted(number))
    assert len(list((tmp_path / "log.tables").iterdir())) == 4
    assert [batch.now_ns for batch in logged(path)] == [1, 2, 3, 4]
    assert "its cost tables exceed" in warnings(caplog)[0]
    replayed(path)


def test_a_router_starts_without_a_log_while_the_disk_is_full(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decision_log, "_rotate", full)
    scheduling = {"log": str(tmp_path / "log")}
    settings = Settings.model_validate({"model": str(tiny_llama), "scheduling": scheduling})
    assert open_log(settings, TABLE) is None
    assert "no decision log is written: No space left on device" in warnings(caplog)[0]


async def test_the_events_of_a_failed_round_are_written_at_once(tmp_path: Path) -> None:
    """The router is killed soon after."""

    class Buggy(Scheduler):
        def handle(self, events: Iterable[AnyEvent], now_ns: int) -> RoundResult:
            if any(isinstance(event, Submitted) for event in events):
                raise ZeroDivisionError("a bug")
            return super().handle(events, now_ns)

    path = tmp_path / "log"
    with DecisionLog(path, HEADER, TABLE) as log:
        async with fake_cell(table=TABLE, recorder=log, make_scheduler=Buggy) as cell:
            cell.submit()
            await loop_iterations()
            assert not cell.service.ready
            _, events = logged(path)[-1]
            assert isinstance(events[0], Submitted)
