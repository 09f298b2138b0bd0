"""Finding the processes of a head again, with a small tree of processes in the place of Ray's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from free_ports import free_port

from csps.cli import Subcommand, main
from csps.protocols.core.errors import ConfigError, FaultError
from csps.services.launch import ray_head
from csps.services.profiling.command import warn_of_a_server

_LEADER = """
import subprocess, sys
child = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", child])
sys.stdin.read()
"""
"""Starts one more process in its session and waits, as Ray's leader does. That one says
itself who it is: when it is only just started, the kernel does not know its environment yet."""


class Tree:
    """A leader and its child, which live until they are killed."""

    def __init__(self, token_file: Path) -> None:
        self.leader = subprocess.Popen(
            [sys.executable, "-c", _LEADER, ray_head.LEADER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(token_file)},
            start_new_session=True,
        )
        assert self.leader.stdout is not None
        self.child = int(self.leader.stdout.readline())

    def kill_leader(self) -> None:
        self.leader.kill()
        self.leader.wait()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.leader.pid, signal.SIGKILL)
        self.leader.communicate()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "ray-token").write_text("token")
    return run_dir


@pytest.fixture
def tree(run_dir: Path) -> Iterator[Tree]:
    tree = Tree(run_dir / "ray-token")
    write_state(run_dir, tree.leader.pid)
    yield tree
    tree.end()


def write_state(run_dir: Path, pid: int) -> None:
    state = {
        "pid": pid,
        "address": "127.0.0.1:1",
        "dashboard": "http://127.0.0.1:1",
        "token_file": str(run_dir / "ray-token"),
        "log_file": str(run_dir / "ray.log"),
        "socket_dir": str(run_dir / "front"),
    }
    (run_dir / "ray.json").write_text(json.dumps(state))


def gone(pid: int) -> bool:
    """Return True if the process is gone, or dead and not yet reaped by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_head_is_known_by_its_leader(run_dir: Path, tree: Tree) -> None:
    head = ray_head.find_head(run_dir)
    assert head is not None
    assert head.alive


def test_a_variable_that_changed_since_ray_was_started_is_an_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: keys newly put into the environment of `csps serve` changed nothing."""
    monkeypatch.setenv("CSPS_API_KEYS", "one")
    tree = Tree(run_dir / "ray-token")
    try:
        write_state(run_dir, tree.leader.pid)
        head = ray_head.find_head(run_dir)
        assert head is not None
        head.check_variable("CSPS_API_KEYS")
        head.check_variable("CSPS_NEVER_SET")
        monkeypatch.setenv("CSPS_NEVER_SET", "")
        with pytest.raises(ConfigError, match="CSPS_NEVER_SET is not as it was"):
            head.check_variable("CSPS_NEVER_SET")
        monkeypatch.setenv("CSPS_API_KEYS", "one,hush")
        with pytest.raises(ConfigError, match="CSPS_API_KEYS is not as it was") as raised:
            head.check_variable("CSPS_API_KEYS")
        assert "hush" not in str(raised.value)
    finally:
        tree.end()


def test_an_interrupt_mentions_the_server_only_if_it_runs(
    run_dir: Path, tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: list[str]) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Subcommand, "load", lambda self: interrupted)
    assert main(["eval"]) == 130
    assert "csps: interrupted; a server runs, `csps stop` ends it" in capsys.readouterr().err
    tree.end()
    assert main(["eval"]) == 130
    assert capsys.readouterr().err.strip() == "csps: interrupted"


def test_measuring_beside_a_server_warns(
    run_dir: Path, tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_a_server(run_dir)
    assert f"runs (process {tree.leader.pid})" in capsys.readouterr().err
    warn_of_a_server(tmp_path / "elsewhere")
    assert capsys.readouterr().err == ""


def test_without_its_leader_it_is_known_by_what_is_left(run_dir: Path, tree: Tree) -> None:
    tree.kill_leader()
    head = ray_head.find_head(run_dir)
    assert head is not None
    assert not head.alive
    head.stop()
    assert gone(tree.child)
    assert ray_head.find_head(run_dir) is None


def test_stopping_ends_what_a_killed_leader_left(
    run_dir: Path, tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `stop` forgot the head and said that nothing was started; the port stayed in
    use."""
    tree.kill_leader()
    assert main(["stop"]) == 0
    assert "stopped" in capsys.readouterr().out
    assert gone(tree.child)
    assert not (run_dir / "ray.json").exists()


def test_a_session_of_somebody_else_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    """After a restart of the machine the recorded process id may be anybody's."""
    other = Tree(tmp_path / "another-token")
    try:
        write_state(run_dir, other.leader.pid)
        assert ray_head.find_head(run_dir) is None
        assert main(["stop"]) == 0
        assert not gone(other.child)
    finally:
        other.end()


def test_ports_are_distinct_and_nobody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip ports in use; report too few."""
    with socket.socket() as taken:
        taken.bind((ray_head.LOOPBACK, free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ray_head, "PORTS", range(port, port + 9))
        found = ray_head._free_ports(3)
        assert len(set(found)) == 3
        assert set(found) < set(range(port + 1, port + 9))
        with pytest.raises(
            FaultError, match=f"fewer than 9 of the ports {port} to {port + 8} are free"
        ):
            ray_head._free_ports(9)
