"""A router's right to command gangs: its generation, and its takeover priority.

A generation is a number that only grows. It is stored before it is handed out, where it outlives
routers and ranks, so no restart hands it out again. Ranks obey the newest router that attached
(`protocols.gang.members`). Gangs number their incarnations the same way.

Ranks refuse a newer router while an older one holds them. But a redeployment may replace the ranks
as well, and nobody holds the new ones. A router that lost a gang in the middle of its requests
therefore claims takeover priority in the same store, until it has gangs again or its requests end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, RanksHeld, Superseded
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import LIVENESS_TIMEOUT_S

_log = logging.getLogger(__name__)
T = TypeVar("T")
STORE_S = 5.0
"""Deadline for one call of the store. It usually takes milliseconds."""


class Generations(Protocol):
    """A shared counter that only grows, and the takeover priorities of its numbers.

    It may lie in another process, which may not answer: its users wait for `STORE_S` at most.
    """

    async def claim(self) -> int:
        """Return the next number, from 1. Nobody else gets it, now or later."""
        ...

    async def claim_priority(self, number: int, heartbeat: int) -> None:
        """Publish that a number has takeover priority.

        A claim whose `heartbeat` stops changing may be a dead router's.
        """
        ...

    async def release_priority(self, number: int) -> None:
        """Give up the takeover priority of a number."""
        ...

    async def priorities(self) -> dict[int, int]:
        """Return the numbers with takeover priority, and the last heartbeat of each."""
        ...


class MemoryGenerations:
    """Generations in one process, for tests."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._priorities: dict[int, int] = {}

    async def claim(self) -> int:
        return next(self._numbers)

    async def claim_priority(self, number: int, heartbeat: int) -> None:
        self._priorities[number] = heartbeat

    async def release_priority(self, number: int) -> None:
        self._priorities.pop(number, None)

    async def priorities(self) -> dict[int, int]:
        return dict(self._priorities)


class Fencing:
    """Attaches to gangs under a generation, and claims a new one when another router was newer."""

    def __init__(self, generations: Generations, *, secret: bytes, router_id: str) -> None:
        self._generations = generations
        self._takeover_priority = TakeoverPriority(generations)
        self._secret, self._router_id = secret, router_id
        self._attachments = 0
        self.generation = 0
        """Granted generation; 0 before the first one, and once another router is newer."""

    async def set_takeover_priority(self, wanted: bool) -> None:
        """Claim or give up priority over newer routers. Call it every `KEEP_ALIVE_S`."""
        await self._takeover_priority.renew(self.generation if wanted else 0)

    async def attach(
        self,
        gangs: Sequence[GangClient],
        attached: Callable[[GangClient], None],
        *,
        model: str | None = None,
    ) -> None:
        """Attach to the gangs that answer, or to none while another router holds any.

        Args:
            gangs: gangs to attach to.
            attached: called with each attached gang; the others are disconnected.
            model: fingerprint that gangs must have, if any.

        Raises:
            RanksHeld: another router is alive and holds a gang or has takeover priority.
            Superseded: another router is newer; the next attempt claims a newer generation.
            FaultError: a gang cannot be reached.
            ConfigError: a gang cannot be used.
        """
        if not self.generation:
            self.generation = await _in_time(self._generations.claim())
            _log.info("this router has generation %d", self.generation)
        await self._takeover_priority.check(self.generation, time.monotonic())
        taken: set[GangClient] = set()
        try:
            errors = await _each(lambda gang: self._ask(gang, model), gangs)
            # All or none: a live router that lost one gang would lose the others' work as well.
            self._check_newest(errors.values())
            free = [gang for gang in gangs if gang not in errors]
            errors |= await _each(lambda gang: gang.attach(self.generation), free)
            for gang in free:
                if gang not in errors:
                    taken.add(gang)
                    attached(gang)
            self._check_newest(errors.values())
        finally:
            for gang in gangs:
                if gang not in taken:
                    gang.disconnect("not attached")
        for error in errors.values():
            raise error

    def _check_newest(self, errors: Iterable[BaseException]) -> None:
        for error in errors:
            if isinstance(error, Superseded):
                self.generation = 0
            if isinstance(error, RanksHeld | Superseded):
                raise error

    async def _ask(self, gang: GangClient, model: str | None) -> None:
        """Check that a gang could be attached and used, without holding it.

        A gang that is unusable is never held, not even briefly: a router that could use it would be
        refused meanwhile.
        """
        self._attachments += 1
        # A new name each time: a rank then drops what it still does for an earlier attachment.
        name = f"{self._router_id}.{self._attachments}"
        await gang.connect(secret=self._secret, router_id=name)
        await gang.check_free(self.generation)
        await gang.describe()
        found = gang.descriptions[0].model_fingerprint
        if model is not None and found != model:
            raise ConfigError(
                f"{gang.role} gang {gang.gang_id} serves model {found}; live requests need {model}"
            )


async def _each(
    work: Callable[[GangClient], Awaitable[None]], gangs: Sequence[GangClient]
) -> dict[GangClient, BaseException]:
    """Do the work with all gangs at once; return the errors by gang."""
    results = await asyncio.gather(*map(work, gangs), return_exceptions=True)
    return {gang: error for gang, error in zip(gangs, results, strict=True) if error is not None}


async def _in_time(call: Awaitable[T]) -> T:
    """Wait for a call of the store.

    Raises:
        DeadlineExceeded: it did not answer.
    """
    try:
        async with asyncio.timeout(STORE_S):
            return await call
    except TimeoutError:
        raise DeadlineExceeded("the store of router generations", STORE_S) from None


class _LastHeartbeat(NamedTuple):
    heartbeat: int
    since: float


class TakeoverPriority:
    """One router's claim to gangs before newer routers. Times are `time.monotonic()` seconds."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._heartbeat = 0
        self._claimed = 0
        """Generation for which this router claimed priority; 0 for none."""
        self._seen: dict[int, _LastHeartbeat] = {}

    async def renew(self, generation: int) -> None:
        """Claim priority for this generation, or give it up with 0. Call it every
        `KEEP_ALIVE_S`."""
        claimed, self._claimed = self._claimed, generation
        if generation:
            self._heartbeat += 1
            await _in_time(self._generations.claim_priority(generation, self._heartbeat))
        if claimed and claimed != generation:
            await _in_time(self._generations.release_priority(claimed))

    async def check(self, generation: int, now: float) -> None:
        """Check that a router of this generation may attach to gangs now.

        Raises:
            RanksHeld: an older router has priority, and its heartbeat changed within
                `LIVENESS_TIMEOUT_S`.
        """
        claimed = await _in_time(self._generations.priorities())
        self._seen = {
            number: self._see(number, heartbeat, now) for number, heartbeat in claimed.items()
        }
        dead = []
        for number, seen in self._seen.items():
            if number >= generation:
                continue
            if now - seen.since <= LIVENESS_TIMEOUT_S:
                raise RanksHeld(
                    f"the router of generation {number} has requests and takeover priority over "
                    f"generation {generation}"
                )
            dead.append(number)
        # A router whose heartbeat stands still is dead. What it has claimed would delay each later
        # router until that one has found the same. One that only stalled claims it again.
        for number in dead:
            await _in_time(self._generations.release_priority(number))

    def _see(self, number: int, heartbeat: int, now: float) -> _LastHeartbeat:
        seen = self._seen.get(number)
        return (
            seen
            if seen is not None and seen.heartbeat == heartbeat
            else _LastHeartbeat(heartbeat, now)
        )
