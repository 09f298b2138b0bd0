"""A counter that processes of one machine share without Ray."""

from __future__ import annotations

import asyncio
import fcntl
import json
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

    async def hold(self, number: int, beat: int) -> None:
        await asyncio.to_thread(self._change, {str(number): beat})

    async def release(self, number: int) -> None:
        await asyncio.to_thread(self._change, {str(number): None})

    async def held(self) -> dict[int, int]:
        held = await asyncio.to_thread(self._change, {})
        return {int(number): beat for number, beat in held.items()}

    def _change(self, changes: dict[str, int | None]) -> dict[str, int]:
        with open(f"{self._path}-held", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            held = {**json.loads(file.read() or "{}"), **changes}
            held = {number: beat for number, beat in held.items() if beat is not None}
            file.truncate(0)
            file.write(json.dumps(held))
            return held
