"""Increasing numbers, written where they outlive whoever asked for them.

Routers are fenced by their generation (`protocols.fence`), gangs are told apart by their
incarnation (`services.cluster.membership`). A number is stored before it is handed out, so that no
restart hands it out again.
"""

from __future__ import annotations

import itertools
from typing import Protocol


class Generations(Protocol):
    """A counter that only grows, shared by all who ask it, and which numbers are held."""

    async def claim(self) -> int:
        """The next number, from 1; nobody else gets it, now or later."""
        ...

    async def hold(self, number: int, beat: int) -> None:
        """Let all see that a number is held. Whose `beat` does not change any more may be dead."""
        ...

    async def release(self, number: int) -> None:
        """Hold it no more."""
        ...

    async def held(self) -> dict[int, int]:
        """The numbers that are held, and the last beat of each."""
        ...


class MemoryGenerations:
    """For one process, as tests need it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._held: dict[int, int] = {}

    async def claim(self) -> int:
        return next(self._numbers)

    async def hold(self, number: int, beat: int) -> None:
        self._held[number] = beat

    async def release(self, number: int) -> None:
        self._held.pop(number, None)

    async def held(self) -> dict[int, int]:
        return dict(self._held)
