"""A counter that processes of one machine share without Ray."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from pathlib import Path


class FileGenerations:
    """A generation store for processes of one machine, which share a file."""

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

    async def claim_priority(self, number: int, heartbeat: int) -> None:
        await asyncio.to_thread(self._change, {str(number): heartbeat})

    async def release_priority(self, number: int) -> None:
        await asyncio.to_thread(self._change, {str(number): None})

    async def priorities(self) -> dict[int, int]:
        priorities = await asyncio.to_thread(self._change, {})
        return {int(number): heartbeat for number, heartbeat in priorities.items()}

    def _change(self, changes: dict[str, int | None]) -> dict[str, int]:
        with open(f"{self._path}-held", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            priorities = {**json.loads(file.read() or "{}"), **changes}
            priorities = {
                number: heartbeat
                for number, heartbeat in priorities.items()
                if heartbeat is not None
            }
            file.truncate(0)
            file.write(json.dumps(priorities))
            return priorities
