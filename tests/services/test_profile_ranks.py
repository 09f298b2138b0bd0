"""`csps profile` with a plan of a few short runs. Ranks are threads, but where one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from gang_driver import in_threads

from csps.actors.comm.rendezvous import host_store
from csps.actors.worker.rank import Rank
from csps.actors.worker.rank_config import RankConfig
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.model.scaling_information_base import (
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
    StepRow,
)
from csps.configurator.plan.profiles import BESIDE, CROWDING, STEP, measured_settings
from csps.protocols.attention.plan import parse_option
from csps.protocols.core.errors import FaultError
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.services.measured.fits import RING, fitted_rings
from csps.services.measured.identity import identity_of
from csps.services.measured.scheduler_inputs import LATENCY, latency_table, ring_rules
from csps.services.profiling import command, links, step_profile
from csps.services.profiling import local_gangs as profiling_cell
from csps.services.profiling import phases as overheads
from csps.services.profiling import runs as plan
from csps.services.profiling.local_gangs import LocalGangs, open_local_gangs
from csps.services.profiling.runs import DecodeRun, PrefillRun
from csps.services.profiling.step_profile import Effort, StepProfile
from csps.services.profiling.steps import measure_iterations, measure_step
from csps.services.settings.settings import Settings


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Settings:
    gang = {"instances": 2, "kv_slots": 2048}
    return Settings.model_validate(
        {
            "model": str(tiny_llama),
            "scaling_information_base": str(tmp_path / "sib.sqlite"),
            "prefill": gang,
            "decode": gang,
        }
    )


@pytest.fixture
def short_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "QUICK_PROMPTS", (32, 64))
    monkeypatch.setattr(plan, "QUICK_CHAINS", ((48, 3),))
    monkeypatch.setattr(plan, "QUICK_BATCHES", ((25, 3),))
    monkeypatch.setattr(plan, "QUICK_DECODE_BATCHES", (1, 3))
    monkeypatch.setattr(plan, "QUICK_DECODE_CONTEXTS", (33,))


class RankThreads:
    """Replacement of `RankProcesses`, whose interpreters take seconds to start."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    async def start(self, configs: Sequence[RankConfig], secret: bytes) -> GangMembers:
        hosted = host_store(configs[0].host, secret)
        for config in configs:
            store = hosted.address if config.rank else hosted
            self._ranks.append(Rank(config, secret=secret, store=store))
        addresses = await in_threads([rank.start for rank in self._ranks])
        ranks = (
            RankAddress(rank=n, host=host, port=port) for n, (host, port) in enumerate(addresses)
        )
        return GangMembers(gang_id=configs[0].gang_id, ranks=tuple(ranks))

    async def close(self) -> None:
        await in_threads([rank.close for rank in self._ranks])


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_cell, "RankProcesses", RankThreads)


async def used_slots(gangs: LocalGangs) -> set[int]:
    stats = [*await gangs.prefill.stats(), *await gangs.decode.stats()]
    return {rank.kv_used for rank in stats}


@pytest.mark.parametrize("elastic", [False, True])
async def test_a_step_and_an_iteration_are_measured_and_leave_nothing_behind(
    settings: Settings, rank_threads: None, elastic: bool
) -> None:
    if elastic:  # each role gets a gang of its own
        gang = {"instances": 2, "kv_slots": 2048}
        scheduling = {"policy": "context_parallel"}
        settings = Settings.model_validate(
            {"model": settings.model, "elastic": gang, "scheduling": scheduling}
        )
    async with open_local_gangs(settings) as gangs:
        seconds = await measure_step(gangs, PrefillRun(sp=2, tokens=41, chunks=3, batch=2))
        assert len(seconds) == 3
        assert min(seconds) > 0
        assert await used_slots(gangs) == {0}
        assert await measure_iterations(gangs, DecodeRun(sp=2, context=37, batch=3), 8) > 0
        assert await used_slots(gangs) == {0}


@pytest.mark.slow
async def test_a_rank_that_dies_ends_the_measurement_with_its_name(settings: Settings) -> None:
    """Ranks are separate processes, and none of them is left."""
    async with open_local_gangs(settings) as gangs:
        assert len(await measure_step(gangs, PrefillRun(sp=2, tokens=64))) == 1
        processes = [
            description.pid
            for description in (*gangs.prefill.descriptions, *gangs.decode.descriptions)
        ]
        assert len({*processes, os.getpid()}) == 5
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(FaultError, match="rank 1 of prefill gang"):
            await measure_step(gangs, PrefillRun(sp=2, tokens=64))
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_steps_by_every_option_are_measured_for_what_phases_leave_out(
    settings: Settings, rank_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overheads, "QUICK_OVERHEAD_TOKENS", (24, 5_000))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # fewer than ranks
    with ScalingInformationBase.create(base_path(settings), identity_of(settings)) as base:
        await overheads.measure_overheads(base, settings, lambda _: None, quick=True)
        rows = base.rows(PhaseRow)
    assert {(row.tokens, row.group_shape) for row in rows} == {(24, "2")}
    assert all(row.seconds > 0 for row in rows)
    names = [parse_option(row.strategy).strategy for row in rows if row.phase == STEP]
    assert names == ["ulysses", "csa", "csa", "sp_tp", "sp_tp", "csa", "sp_tp"]
    assert {row.phase for row in rows} == {STEP, BESIDE, CROWDING}
    assert {measured_settings(row.strategy).strategy for row in rows} == {"ntp", "tp"}


@pytest.mark.slow
def test_the_command_measures_fits_and_does_not_measure_again(
    settings: Settings,
    short_plan: None,
    rank_threads: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(links, "ROUNDS", 3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    argv = ["--config", str(written(settings, tmp_path)), "--quick"]
    command.main(["links", *argv])
    assert "GB/s" in capsys.readouterr().out
    command.main(["steps", *argv])
    printed = capsys.readouterr().out
    assert "[12/12]" in printed
    assert "prefill (ulysses), 2 instances" in printed
    with ScalingInformationBase.create(base_path(settings), identity_of(settings)) as base:
        rows = base.rows(StepRow)
        measured = base.rows(LinkRow)
    assert [row.bytes for row in measured] == list(links.QUICK_SIZES)
    assert {(row.kind, row.sender, row.receiver) for row in measured} == {
        ("inside", "0-0-0", "0-0-1")
    }
    assert {(row.history, row.batch) for row in rows if row.tokens == 48} == {
        (0, 1), (48, 1), (96, 1),
    }  # fmt: skip
    table = latency_table(settings)
    assert table.step(2).predict_ns(64) > 0
    assert table.iteration(1).predict_ns(1, 64) > 0
    assert table.link("inside").predict_ns(8) >= 0

    def no_ranks(_settings: Settings) -> None:
        raise AssertionError("ranks were started with nothing to measure")

    monkeypatch.setattr(step_profile, "open_local_gangs", no_ranks)
    command.main(["steps", *argv])
    assert "0 runs to do" in capsys.readouterr().out


def test_rings_are_measured_both_ways_and_a_rule_is_fitted(
    settings: Settings,
    rank_threads: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan, "QUICK_RING_FIRST", (64, 128))
    argv = ["ring", "--config", str(written(settings, tmp_path)), "--quick"]
    command.main(argv)
    printed = capsys.readouterr().out
    assert "[4/4] ring_q on 2, chunks of 128, 128, 64, 32, 16, 8, 4 tokens" in printed
    assert "h(T, P) =" in printed
    with ScalingInformationBase.create(base_path(settings), identity_of(settings)) as base:
        rows = base.rows(StepRow)
        fitted = fitted_rings(base.latest_fit(RING))
        assert base.latest_fit(LATENCY) is None, "by which exact attention would be predicted"
    assert [(row.strategy, row.tokens, row.history) for row in rows[7:14:6]] == [
        ("ring_q", 64, 0), ("ring_q", 2, 188),
    ]  # fmt: skip
    rules = ring_rules(settings, SHIPPED)
    assert rules.fitted == fitted
    assert [(rule.sp, rule.tp) for rule in fitted] == [(2, 1)]
    command.main(argv)
    assert "0 prompts to do" in capsys.readouterr().out


def written(settings: Settings, folder: Path) -> Path:
    """Write the config file of a deployment with these settings."""
    config = folder / "config.yaml"
    arguments = settings.model_dump(mode="json", exclude_defaults=True)
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": arguments}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    return config


async def test_an_interrupted_profile_keeps_what_it_has_and_goes_on_from_there(
    settings: Settings, short_plan: None, rank_threads: None
) -> None:
    """Ctrl-C cancels the task that `asyncio.run` waits for."""
    said: list[str] = []
    effort = Effort(quick=True, rounds=1, iterations=8, pause_s=0.0)
    with ScalingInformationBase.create(base_path(settings), identity_of(settings)) as base:

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("[3/"):
                task.cancel()

        task = asyncio.create_task(StepProfile(base, settings, effort, say).run())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(base.rows(StepRow)) == 3
        again: list[str] = []
        await StepProfile(base, settings, effort, again.append).run()
        assert again[0].startswith("9 runs")


async def test_no_run_starts_after_the_limit(
    settings: Settings, short_plan: None, rank_threads: None
) -> None:
    said: list[str] = []
    effort = Effort(quick=True, rounds=1, iterations=8, pause_s=0.0, limit_s=-1.0)
    with ScalingInformationBase.create(base_path(settings), identity_of(settings)) as base:
        await StepProfile(base, settings, effort, said.append).run()
        assert base.rows(StepRow) == []
    assert "continues from here" in said[-1]


def base_path(settings: Settings) -> Path:
    return Path(settings.scaling_information_base)
