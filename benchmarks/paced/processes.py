"""Paced ranks and a router as processes of their own, for as long as a benchmark needs them."""

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
"""For a process to end when its standard input is closed."""


@dataclass
class Served:
    """A router in front of paced ranks."""

    port: int
    router_pid: int
    ranks_pid: int
    after: dict[str, Any] = field(default_factory=dict)
    """What the ranks say at the end: the latest action in ms, tokens, what was left over."""


@contextmanager
def served(cluster: str, *router: str, ranks: Sequence[str] = ()) -> Iterator[Served]:
    """Start both; both have ended afterwards.

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
    """Paced ranks and no router."""

    process: subprocess.Popen[str]
    listing: dict[str, Any]
    """Where the ranks of each gang listen."""
    after: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def end(self) -> None:
        """Have them say how it went."""
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
