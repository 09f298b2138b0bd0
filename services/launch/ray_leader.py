"""The leading process of a Ray on one machine: `python -m csps.services.launch.ray_leader OPTIONS`.

It runs `ray start OPTIONS` and stays, as the leader of a session that holds all processes of this
Ray and no other. It ends with the raylet, without which nothing runs, and ends what is left.

`ray start --block` would do the same when any process of Ray dies. Without its central store (GCS)
or its dashboard, however, what runs goes on: the router and the ranks need neither for a request.
Raylet and workers wait a minute for the store before they end themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

RAY_START = (sys.executable, "-m", "ray.scripts.scripts", "start")
RAYLET = "raylet"
GRACE_S = 2.0
"""Time for Ray's processes to end by themselves."""
POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


class Ended(Exception):
    """The leader was asked to end."""


def main(start_options: Sequence[str]) -> int:
    """Start Ray and wait until it ends, or until SIGTERM; return the exit status."""
    _adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    try:
        if status := subprocess.run([*RAY_START, *start_options], check=False).returncode:
            return status
        return _watch()
    except Ended:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()


def _watch() -> int:
    """Wait for the raylet's end, and say which other processes end before."""
    while True:
        try:
            # Not reaped at once: its name is lost with it, and before its end it may have another.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return 1
        assert ended is not None
        name = _children().get(ended.si_pid, "")
        os.waitpid(ended.si_pid, 0)
        print(f"{name} (pid {ended.si_pid}) has ended: {ended.si_status}", flush=True)
        if name == RAYLET:
            return 1


def _end_children() -> None:
    """End the children: ask them, the raylet first, and kill what does not end."""
    asked = _children()
    for pid in sorted(asked, key=lambda pid: asked[pid] != RAYLET):
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while left := _children():
        if time.monotonic() > deadline:
            for pid in left:
                _send(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children() -> dict[int, str]:
    """Return the names of this process' children: since `ray start` has ended, those are Ray's."""
    names = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "pid (name) state ppid ...", and a name may hold anything.
            head, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                names[int(stat.parent.name)] = head.partition("(")[2]
    return names


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that their end is noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
