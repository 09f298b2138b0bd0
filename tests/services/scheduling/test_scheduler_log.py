"""Decision log: replaying it gives the same commands, byte for byte, under any hash seed."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_executor import RandomCell

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.core.decision_log import (
    SCHEMA_VERSION,
    DecisionLogHeader,
    LogWriter,
    command_bytes,
    read_log,
    replay,
)
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.deciding.decisions import digest_of
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.policies.registry import make_policy

OPTIONS: dict[str, dict[str, object]] = {
    "csps": {"spt_tokens": 500, "short_tokens": 100, "spread_tokens": 700, "max_batch": 6},
    "fixed_sp": {"sp": 2, "spread_tokens": 700},
    "loongserve": {"decode_iterations": 2, "max_batch": 6},
    "tetris": {
        "improvement_rates": [[1, 0.05], [2, 0.4]],
        "min_chunk": 1,
        "replan_share": 0.01,
        "launch_ahead_s": 0,
    },
    "context_parallel": {"short_tokens": 100, "max_batch": 6},
    "chunked_prefill": {"token_budget": 100, "spread_tokens": 700, "max_batch": 6},
}
TABLE = CostTable(latencies=Unmeasured())


def make_scheduler(header: DecisionLogHeader) -> Scheduler:
    return Scheduler(make_policy(header.policy, OPTIONS[header.policy]), Costs(TABLE))


class Recorded:
    """Scheduler whose rounds go to a log, as an executor would write it."""

    def __init__(self, name: str, path: Path) -> None:
        policy = make_policy(name, OPTIONS[name])
        header = DecisionLogHeader(
            policy=name, policy_digest=digest_of(policy), table_digest=TABLE.digest
        )
        self.scheduler = make_scheduler(header)
        self.file = path.open("wb")
        self.log = LogWriter(self.file, header)
        self.commands = b""

    def handle(self, events: list[ev.AnyEvent], now_ns: int) -> RoundResult:
        self.log.append(now_ns, events)
        outcome = self.scheduler.handle(events, now_ns)
        self.commands += command_bytes(outcome.commands)
        return outcome

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()


def record(name: str, path: Path, seed: int = 1, tenants: int = 0) -> bytes:
    recorded = Recorded(name, path)
    elastic = name in ("chunked_prefill", "loongserve")
    cell = RandomCell(recorded, seed, faults=0.1, elastic=elastic, tenants=tenants)  # type: ignore[arg-type]
    cell.play(requests=30, turns=150)
    recorded.log.flush()
    recorded.file.close()
    return recorded.commands


@pytest.mark.parametrize("tenants", [0, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_replayed_log_gives_the_same_bytes(name: str, tenants: int, tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    commands = record(name, path, tenants=tenants)
    assert len(commands) > 1000
    assert replay(path, make_scheduler) == commands


def test_the_same_log_gives_the_same_bytes_under_any_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    digests = {hashlib.sha256(record("csps", path)).hexdigest()}
    for seed in ("0", "4711"):
        paths = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, __file__, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_log_header_names_what_commands_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    record("csps", path)
    header, batches = read_log(path)
    assert header.policy == "csps"
    assert "spt_tokens=500" in header.policy_digest
    assert header.table_digest == TABLE.digest
    assert header.python == sys.version.split()[0]
    kinds = {type(event) for _, events in batches for event in events}
    assert {ev.Submitted, ev.StepDone, ev.GangUp, ev.GangDown, ev.Freed, ev.Progress} <= kinds


def test_every_event_survives_a_log(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    events: list[ev.AnyEvent] = [
        ev.Submitted(request_id=1, prompt_tokens=5, output_tokens=3),
        ev.Submitted(request_id=2, prompt_tokens=5, output_tokens=3, cls="x", deadline_ns=1 << 60),
        ev.Submitted(request_id=3, prompt_tokens=5, output_tokens=3, tenant=2),
        ev.RequestCancelled(request_id=1, generated_tokens=2),
        ev.FirstToken(sequence_id=1 << 62),
        ev.KvReceived(sequence_id=1, instance=65536, tokens=5),
        ev.Freed(sequence_id=1, instance=65536),
        ev.Finished(sequence_id=1, generated_tokens=3),
        ev.Failed(
            sequence_id=1,
            generated_tokens=1,
            error=ev.WireError("GangLost", "x", {"a": 1}),
            retryable=True,
        ),
        ev.Progress(generated_tokens=((1, 2), (3, 4))),
        ev.StepDone(step_id=1, instance=65536, took_ns=5),
        ev.GangUp(
            gang=1,
            generation=2,
            may_prefill=True,
            may_decode=False,
            tp=2,
            instances=(ev.InstanceUp(location="0-0-0", kv_slots=10),),
            max_positions=100,
        ),
        ev.GangDown(gang=1, reason="died"),
        ev.LinkUp(prefill=1, decode=2),
        ev.LinkDown(prefill=1, decode=2, reason="cut"),
        ev.Heartbeat(instances=(1, 2)),
        ev.CostTableUpdated(digest="abc"),
        ev.Wake(),
        ev.Standby(waits=True),
        ev.Drain(),
    ]
    with path.open("wb") as file:
        log = LogWriter(file, DecisionLogHeader(policy="csps", policy_digest="", table_digest=""))
        log.append(7, events)
        log.append(8, [])
        log.flush()
    _, batches = read_log(path)
    assert list(batches) == [(7, events), (8, [])]


def test_truncated_log_ends_with_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    record("csps", path)
    whole = list(read_log(path)[1])
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_log(path)[1]) == whole[:-1]


def test_log_writer_does_not_write_every_round() -> None:
    file = io.BytesIO()
    log = LogWriter(file, DecisionLogHeader(policy="csps", policy_digest="", table_digest=""))
    log.append(1, [ev.Wake()])
    assert not file.getvalue()
    for now_ns in range(20_000):
        log.append(now_ns, [ev.Heartbeat(instances=(1, 2, 3))])
    assert file.getvalue()


@pytest.mark.parametrize("data", [b"", b"no", b"no log", b"\0\0\0\1\x80", b"\xff" * 9])
def test_file_that_is_no_log_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not the log of a scheduler"):
        read_log(path)


@pytest.mark.parametrize("schema", [1, SCHEMA_VERSION + 1])
def test_log_of_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "scheduler.log"
    header = DecisionLogHeader(policy="csps", policy_digest="", table_digest="", schema=schema)
    with path.open("wb") as file:
        LogWriter(file, header).flush()
    assert SCHEMA_VERSION == 2
    with pytest.raises(ConfigError, match=f"has schema {schema}; this release reads schema 2"):
        read_log(path)


def main(path: str) -> None:
    """Print the digest of a replay, which `PYTHONHASHSEED` must not change."""
    print(hashlib.sha256(replay(Path(path), make_scheduler)).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
