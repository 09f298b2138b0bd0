"""A policy of one's own runs like the others: `examples/shortest_first.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from random_executor import RandomCell
from scheduler_harness import LINK, MS, SchedulerHarness

from csps.cli import main
from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.errors import ConfigError
from csps.services.launch.deploy_config import read_config
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.scheduling.policies.registry import check_pairing, make_policy
from csps.services.scheduling.state.ledger import decode_slots
from csps.services.settings.settings import Settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAME = "shortest_first:ShortestFirst"
OPTIONS = {"token_budget": 64, "max_batch": 4, "spread_tokens": 700}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_shortest_prompt_starts_first_unless_another_has_waited_too_long() -> None:
    scheduler = SchedulerHarness(make_policy(NAME, {"max_batch": 1, "patience_s": 1.0}))
    scheduler.turn(scheduler.prefill(), scheduler.decode(), LINK)
    running = reserved(scheduler.turn(scheduler.submit(50)))
    assert started(scheduler.turn(*(scheduler.submit(size) for size in (400, 900, 200)))) == []
    order = []
    while running:
        (reserve,) = running
        order.append(reserve.request_id)
        late = 2000 * MS if len(order) == 2 else MS
        sequence = reserve.message.sequence_id
        ends = (
            ev.FirstToken(sequence_id=sequence),
            ev.Finished(sequence_id=sequence, generated_tokens=10),
        )
        freed = [
            ev.Freed(sequence_id=sequence, instance=one)
            for one in decode_slots(reserve.message, reserve.message.output_tokens)
        ]
        running = reserved(scheduler.turn(*ends, *freed, after_ns=late))
    # 4 is the shortest; then 2 and 3 have waited too long, and 2 came first.
    assert order == [1, 4, 2, 3]


def reserved(commands: list[Any]) -> list[cmd.Reserve]:
    return [one for one in commands if isinstance(one, cmd.Reserve)]


def started(commands: list[Any]) -> list[int]:
    return [one.request_id for one in reserved(commands)]


@pytest.mark.parametrize("seed", range(20))
def test_it_loses_nothing_in_storms(seed: int) -> None:
    scheduler = Scheduler(
        make_policy(NAME, OPTIONS),
        Costs(CostTable(latencies=Unmeasured())),
        limits=QueueLimits(max_waiting=8, max_waiting_tokens=30_000),
    )
    cell = RandomCell(scheduler, seed, faults=(0.0, 0.1)[seed % 2], elastic=seed % 3 == 0)
    cell.play(requests=25, turns=120)
    counts = scheduler.counts
    assert (counts.running, counts.waiting) == (0, 0)
    assert (counts.prefill_kv, counts.decode_kv) == (0.0, 0.0)


def test_it_is_a_setting_with_its_options() -> None:
    section = {"policy": NAME, "patience_s": 3.0}
    for gangs in ({}, {"elastic": {"instances": 2}}):
        settings = Settings.model_validate({"scheduling": section, **gangs})
        assert settings.scheduling.options == {"patience_s": 3.0}
    with pytest.raises(ConfigError, match=r"ShortestFirst has no option 'pat"):
        Settings.model_validate({"scheduling": {"policy": NAME, "pat": 1}})


def test_it_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    workload = ("--workload", "sharegpt", "--rate", "2", "--requests", "20")
    words = ("simulate", "--cluster", "loongserve-8", *workload)
    assert main([*words, "--policy", NAME, "--option", "patience_s=5"]) == 0
    assert "Mean TTFT (ms)" in capsys.readouterr().out


def test_the_servers_processes_find_it_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(
        "applications: [{import_path: 'csps.services.app:build', args: {scheduling: {policy: "
        f"'{NAME}'}}}}}}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.chdir(EXAMPLES)
    (application,) = read_config(tmp_path / "config.yaml").data["applications"]
    expected = {"env_vars": {"PYTHONPATH": f"{EXAMPLES}:/elsewhere"}}
    assert application["runtime_env"] == expected
    monkeypatch.chdir(tmp_path)
    (application,) = read_config(tmp_path / "config.yaml").data["applications"]
    assert "runtime_env" not in application


BROKEN = """
class NoMethods: ...
class Half:
    name = "half"
    priority = decide = fits = whole_prompts = None
    regroups = False
    Options = 5
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Policy", "there is no module nowhere; it has to be importable"),
        ("broken_policy:Missing", "the module has no such class"),
        ("broken_policy:NoMethods", "has no name, priority, decide, fits"),
        ("broken_policy:Half", "Options is no dataclass"),
        ("raising_policy:Any", "importing it failed: ZeroDivisionError"),
    ],
)
def test_what_is_no_policy_is_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policy.py").write_text(BROKEN)
    (tmp_path / "raising_policy.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        make_policy(name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_it_is_short_and_takes_both_kinds_of_gangs() -> None:
    lines = (EXAMPLES / "shortest_first.py").read_text().splitlines()
    code = lines[lines.index("@dataclass(frozen=True, kw_only=True)") :]
    assert len([line for line in code if line.strip()]) <= 60
    for pairing in ("pair", "elastic"):
        check_pairing(NAME, pairing)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sparse_attention_runs_under_torchrun(ranks: int) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [
            sys.executable,
            *words,
            str(EXAMPLES / "csa_torchrun.py"),
            "--tokens",
            "2048",
            "--drop-ratio",
            "0.8",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exact, sparse = [line for line in done.stdout.splitlines() if line.startswith("drop ratio")]
    sent = [float(line.split(", ")[1].split()[0]) for line in (exact, sparse)]
    assert 0 < sent[1] < 0.9 * sent[0]
