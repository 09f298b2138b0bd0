"""The commands of iproute2 that a testbed needs, and the system call to enter a namespace."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND_S = 20.0
"""Time limit of one ip or tc command. The kernel removes namespaces in the background."""
_CLONE_NEWNET = 0x4000_0000
_NAMESPACES = Path("/run/netns")


class UnavailableError(RuntimeError):
    """The machine or user cannot have a testbed."""


def require() -> None:
    """Check that namespaces can be made here.

    Raises:
        UnavailableError: something is missing; the message names it.
    """
    if os.geteuid() != 0:
        raise UnavailableError("a testbed needs root, for network namespaces")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise UnavailableError(f"a testbed needs iproute2: there is no `{command}` here")


def run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: the command failed; the message has its error output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def exists(namespace: str) -> bool:
    """Return whether a network namespace of that name exists."""
    return (_NAMESPACES / namespace).exists()


def pids(namespace: str) -> list[int]:
    """Return the processes inside a namespace."""
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def link_statistics(namespace: str, device: str) -> dict[str, Any]:
    """Return the kernel's counters of a device, `{"rx": {"bytes": ...}, "tx": {...}}`."""
    facts = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show", device))
    statistics: dict[str, Any] = facts[0]["stats64"]
    return statistics


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Run this thread, and the threads and processes that it starts, inside a namespace.

    Only the network changes. `ip netns exec` would need a separate program for what is one function
    here.
    """
    assert threading.current_thread() is threading.main_thread(), "pids() would not show a thread"
    with open("/proc/thread-self/ns/net") as home, (_NAMESPACES / namespace).open() as there:
        _setns(there.fileno())
        try:
            yield
        finally:
            _setns(home.fileno())


def _setns(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
