"""Increasing numbers, written where they outlive whoever asked for them.

Routers are fenced by their generation (`protocols.fence`), gangs are told apart by their
incarnation (`services.membership`). A number is stored before it is handed out, so that no restart
hands it out again.
"""

from __future__ import annotations

import itertools
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
