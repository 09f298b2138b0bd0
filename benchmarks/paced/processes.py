"""Paced ranks and a router as processes of their own, for the duration of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
END_S = 20.0
"""Time limit for a process to end after its standard input is closed."""


@dataclass
class Served:
    """A router with paced ranks."""

    port: int
    router_pid: int
    ranks_pid: int
    after: dict[str, Any] = field(default_factory=dict)
    """Statistics of the ranks at the end: lateness in ms, tokens, and leftovers."""


@contextmanager
def served(cluster: str, *router: str, ranks: Sequence[str] = ()) -> Iterator[Served]:
    """Start both processes, yield, and end both.

    Args:
        cluster: name or file.
        router: further arguments of `router.py`.
        ranks: further arguments of `cell.py`.
    """
    with unserved(cluster, *ranks) as cell:
        with _process("router.py", cluster, *router) as process:
            _stdin(process).write(json.dumps(cell.listing) + "\n")
            _stdin(process).flush()
            found = Served(int(_line(process)), process.pid, cell.pid)
            yield found
        cell.end()
        found.after = cell.after


@dataclass
class Ranks:
    """Paced ranks without a router."""

    process: subprocess.Popen[str]
    listing: dict[str, Any]
    """Addresses of the ranks of each gang."""
    after: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def end(self) -> None:
        """End the process and read its statistics."""
        _stdin(self.process).close()
        self.after = json.loads(_line(self.process))


@contextmanager
def unserved(cluster: str, *arguments: str) -> Iterator[Ranks]:
    """Start paced ranks alone."""
    with _process("cell.py", cluster, *arguments) as process:
        yield Ranks(process, json.loads(_line(process)))


@contextmanager
def _process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        _stdin(process).close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait()}")
    return line.strip()
