"""A rank's registration, repeated as long as the rank lives.

The registry forgets everything when it is replaced. A rank that stopped repeating itself would
never be found again, with all its health checks passing: so no failure ends the repetition, and
should it end nevertheless, the rank counts as broken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from csps.protocols.errors import FaultError
from csps.services.cluster.membership import Member

_log = logging.getLogger(__name__)

PERIOD_S = 3.0
"""Between repetitions, for a registry that had to start again."""
JOIN_DEADLINE_S = 10.0
"""For one call; a handle holds calls back while there is no replica to take them."""

Join = Callable[[Member], Awaitable[None]]
"""One call of the registry. What it may raise is up to Serve, and has no common base."""


class Registration:
    """Starts at once, on the running event loop; whoever makes one ends it."""

    def __init__(self, member: Member, join: Join, *, period_s: float = PERIOD_S) -> None:
        self._member, self._join, self._period_s = member, join, period_s
        self._trouble = ""
        self._task = asyncio.create_task(self._repeat())

    def check(self) -> None:
        """Raise FaultError if the registration is not repeated any more."""
        if self._task.done():
            raise FaultError(f"rank {self._member.address.rank} has stopped registering")

    def end(self) -> None:
        """The rank is about to close."""
        self._task.cancel()

    async def _repeat(self) -> None:
        while True:
            self._note(await self._failure())
            await asyncio.sleep(self._period_s)

    async def _failure(self) -> str:
        """Of one call; empty if it succeeds."""
        try:
            async with asyncio.timeout(JOIN_DEADLINE_S):
                await self._join(self._member)
        except Exception as exc:
            return type(exc).__name__
        return ""

    def _note(self, trouble: str) -> None:
        """Log what has changed, and not every repetition of it."""
        rank = self._member.address.rank
        if trouble and trouble != self._trouble:
            _log.warning("rank %d cannot register (%s); trying again", rank, trouble)
        elif self._trouble and not trouble:
            _log.info("rank %d is registered again", rank)
        self._trouble = trouble
