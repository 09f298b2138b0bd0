"""A counter that processes of one machine share without Ray."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path


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
