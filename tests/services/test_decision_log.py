"""Replays of a live router's decision log from its files alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_gangs import QUICK, FakeGang, fake_cell, loop_iterations

from csps.configurator.costs.cost_table import CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.attention.ring_choice import RingModel, RingRules, RingSpeeds
from csps.protocols.core.errors import ConfigError
from csps.services.requests.request_handle import RequestHandle
from csps.services.router.decision_log import DecisionLog, replayed
from csps.services.router.scheduler_factory import make_deadlines, open_log
from csps.services.scheduling.core.decision_log import DecisionLogHeader, command_bytes
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.deciding.decisions import digest_of
from csps.services.scheduling.events.events import AnyEvent
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
