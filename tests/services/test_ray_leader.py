"""The leader of a Ray, with processes of the same names in the place of Ray's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from csps.services.launch.ray_head import session_of

DEADLINE_S = 30.0
_LEADER = """
import sys
from csps.services.launch import ray_leader
ray_leader.RAY_START = ("/bin/sh", "-c")
sys.exit(ray_leader.main(sys.argv[1:]))
"""


def name_and_parent(pid: int) -> tuple[str, int]:
    head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return head.partition("(")[2], int(rest.split()[1])


class Leader:
    """A leader that runs, and what it has started."""

    def __init__(self, folder: Path) -> None:
        sleep = shutil.which("sleep")
        assert sleep is not None
        start = ""
        for name in ("gcs_server", "raylet"):
            shutil.copy(sleep, folder / name)
            start += f"{folder}/{name} 1000 >/dev/null & echo $!; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, start],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.gcs, self.raylet = int(self.line()), int(self.line())
        # A shell's child has its number before it has its name, and is the shell's, which would
        # keep its end to itself, until the shell has ended.
        deadline = time.monotonic() + DEADLINE_S
        wanted = [("gcs_server", self.process.pid), ("raylet", self.process.pid)]
        while [name_and_parent(self.gcs), name_and_parent(self.raylet)] != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def left(self) -> list[int]:
        return session_of(self.process.pid)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    leader = Leader(tmp_path)
    yield leader
    for pid in leader.left():
        os.kill(pid, signal.SIGKILL)
    leader.process.communicate()


def test_what_runs_outlives_the_central_store_and_ends_with_the_raylet(leader: Leader) -> None:
    """Regression: `ray start --block` ended every process as soon as one had died, so a killed
    GCS took all running requests along."""
    os.kill(leader.gcs, signal.SIGKILL)
    assert leader.line().startswith(f"gcs_server (pid {leader.gcs}) has ended")
    assert leader.raylet in leader.left()
    os.kill(leader.raylet, signal.SIGKILL)
    assert leader.process.wait(DEADLINE_S) == 1
    assert leader.left() == []


def test_it_ends_all_when_it_is_asked_to(leader: Leader) -> None:
    leader.process.terminate()
    assert leader.process.wait(DEADLINE_S) == 0
    assert leader.left() == []


def test_processes_that_do_not_end_are_killed(leader: Leader) -> None:
    os.kill(leader.gcs, signal.SIGSTOP)
    os.kill(leader.raylet, signal.SIGKILL)
    assert leader.process.wait(DEADLINE_S) == 1
    assert leader.left() == []
