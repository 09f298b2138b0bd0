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

    async def publish_heartbeat(self, number: int, heartbeat: int) -> None:
        await asyncio.to_thread(self._change, {str(number): heartbeat})

    async def withdraw_heartbeat(self, number: int) -> None:
        await asyncio.to_thread(self._change, {str(number): None})

    async def heartbeats(self) -> dict[int, int]:
        heartbeats = await asyncio.to_thread(self._change, {})
        return {int(number): heartbeat for number, heartbeat in heartbeats.items()}

    def _change(self, changes: dict[str, int | None]) -> dict[str, int]:
        with open(f"{self._path}-held", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            heartbeats = {**json.loads(file.read() or "{}"), **changes}
            heartbeats = {
                number: heartbeat
                for number, heartbeat in heartbeats.items()
                if heartbeat is not None
            }
            file.truncate(0)
            file.write(json.dumps(heartbeats))
            return heartbeats
