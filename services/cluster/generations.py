"""Increasing numbers, written where they outlive whoever asked for them.

Routers are fenced by their generation (`protocols.fence`), gangs are told apart by their
incarnation (`services.membership`). A number is stored before it is handed out, so that no restart
hands it out again.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
from pathlib import Path
from typing import Protocol


class Generations(Protocol):
    """A counter that only grows, shared by all who ask it."""

    async def claim(self) -> int:
        """The next number, from 1; nobody else gets it, now or later."""
        ...


class MemoryGenerations:
    """For one process, as tests need it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    async def claim(self) -> int:
        return next(self._numbers)


class FileGenerations:
    """For the processes of one machine, which share a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def claim(self) -> int:
        return await asyncio.to_thread(self._claim)

    def _claim(self) -> int:
        with open(self._path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # A byte for each number: no crash can leave half of a number behind.
            file.write(b".")
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
