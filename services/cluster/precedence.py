"""Who goes before a newer router: one that has lost a gang in the middle of its requests.

Ranks keep a newer router waiting while an older one holds them. A redeployment may replace the
ranks as well: Ray Serve ends gangs at once, and nobody holds those that come after them. If the
successor took them, the streams of the router before it would end. So that one says, where it
outlives all ranks, that it goes first, until it has its gangs again or its requests have ended.
"""

from __future__ import annotations

from typing import NamedTuple

from csps.protocols.errors import RanksHeld
from csps.protocols.fence import LEASE_S
from csps.services.cluster.generations import Generations


class _Seen(NamedTuple):
    beat: int
    since: float


class Precedence:
    """One router's side. Times are `time.monotonic()` of this process."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._beat = 0
        self._held = 0
        """The generation that this router goes first under; 0 while it does not."""
        self._seen: dict[int, _Seen] = {}

    async def renew(self, generation: int) -> None:
        """Go first, under this generation; with 0, no more. Due every `fence.KEEP_ALIVE_S`."""
        held, self._held = self._held, generation
        if generation:
            self._beat += 1
            await self._generations.hold(generation, self._beat)
        if held and held != generation:
            await self._generations.release(held)

    async def check(self, generation: int, now: float) -> None:
        """Whether a router of this generation may take gangs over now.

        Raises:
            RanksHeld: an older router goes first, and was alive within `fence.LEASE_S`.
        """
        held = await self._generations.held()
        self._seen = {number: self._see(number, beat, now) for number, beat in held.items()}
        for number, seen in self._seen.items():
            if number < generation and now - seen.since <= LEASE_S:
                raise RanksHeld(f"the router of generation {number} has requests and goes first")

    def _see(self, number: int, beat: int, now: float) -> _Seen:
        seen = self._seen.get(number)
        return seen if seen is not None and seen.beat == beat else _Seen(beat, now)
