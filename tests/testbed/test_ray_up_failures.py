"""A deployment that fails leaves the bed as it was, and says why in one line."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import claim, cli, iproute, ray_cluster
from testbed.claim import files_of
from testbed.link import Link
from testbed.network import Testbed, two_servers

from csps.protocols.core.errors import FaultError

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(300)]


@pytest.fixture
def own_bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    """Yield a bed whose files have paths short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="csps-") as folder:
        monkeypatch.setattr(claim, "CLAIMS", Path(folder) / "claims")
        with two_servers(Link()) as bed:
            yield bed


@pytest.fixture
def bystander(own_bed: Testbed) -> Iterator[int]:
    """Yield a process on server 1 that somebody else runs there."""
    command = own_bed.servers[1].command("sh", "-c", "echo here; exec sleep 3600")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield process.pid
        process.kill()


def _ray_up(bed: Testbed, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's error message."""
    assert cli.main(["ray-up", "--bed", bed.name]) == 1
    return capsys.readouterr().err


def _processes(bed: Testbed) -> list[int]:
    return [pid for server in bed.servers for pid in iproute.pids(server.namespace)]


@pytest.mark.slow
def test_a_failing_deployment_ends_ray_and_nothing_else(
    own_bed: Testbed,
    bystander: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[int] = []

    def fail(*_: object) -> None:
        started.extend(_processes(own_bed))
        raise FaultError("serve deploy failed: no")

    monkeypatch.setattr(ray_cluster, "deploy", fail)
    assert _ray_up(own_bed, capsys) == "serve deploy failed: no\n"
    assert len(started) > 2
    assert _processes(own_bed) == [bystander]
    assert not files_of(own_bed.name).exists()


def test_a_ray_that_does_not_start_in_time_is_ended(
    own_bed: Testbed,
    bystander: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray_cluster, "START_S", 0)
    said = _ray_up(own_bed, capsys)
    assert said == "ray start on server 0 did not finish within 0 s\n"
    assert _processes(own_bed) == [bystander]
    assert not files_of(own_bed.name).exists()


def test_a_ray_that_does_not_start_has_the_last_word(
    own_bed: Testbed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_cluster, "NODE_CPUS", "many")
    said = _ray_up(own_bed, capsys)
    assert said.startswith("ray start on server 0 failed: Error: Invalid value for '--num-cpus'")
    assert said.count("\n") == 1
    assert not files_of(own_bed.name).exists()


def test_a_ray_that_runs_is_left_alone(
    own_bed: Testbed, capsys: pytest.CaptureFixture[str]
) -> None:
    files_of(own_bed.name).mkdir()
    assert "allowed is once" in _ray_up(own_bed, capsys)
    assert files_of(own_bed.name).exists()
