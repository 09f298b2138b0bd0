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
from csps.protocols.rpc.tls import Tls

_log = logging.getLogger(__name__)
T = TypeVar("T")
STORE_S = 5.0
"""Deadline for one call of the store. It usually takes milliseconds."""


class Generations(Protocol):
    """A shared counter that only grows, and heartbeats under numbers.

    It may lie in another process, which may not answer: its users wait for `STORE_S` at most.
    """

    async def claim(self) -> int:
        """Return the next number, from 1. Nobody else gets it, now or later."""
        ...

    async def publish_heartbeat(self, number: int, heartbeat: int) -> None:
        """Publish what a number stands for: a claim to takeover priority, or a router that serves.

        One whose `heartbeat` stops changing may be a dead router's.
        """
        ...

    async def withdraw_heartbeat(self, number: int) -> None:
        """Remove a number."""
        ...

    async def heartbeats(self) -> dict[int, int]:
        """Return the published numbers, and the last heartbeat of each."""
        ...


class MemoryGenerations:
    """Generations in one process, for tests."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._heartbeats: dict[int, int] = {}

    async def claim(self) -> int:
        return next(self._numbers)

    async def publish_heartbeat(self, number: int, heartbeat: int) -> None:
        self._heartbeats[number] = heartbeat

    async def withdraw_heartbeat(self, number: int) -> None:
        self._heartbeats.pop(number, None)

    async def heartbeats(self) -> dict[int, int]:
        return dict(self._heartbeats)


class Fencing:
    """Attaches to gangs under a generation, and claims a new one when another router was newer."""

    def __init__(
        self,
        generations: Generations,
        *,
        secret: bytes,
        router_id: str,
        tls: Tls | None = None,
    ) -> None:
        self._generations = generations
        self._takeover_priority = TakeoverPriority(generations)
        self._secret, self._router_id, self._tls = secret, router_id, tls
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
            self.generation = await in_time(self._generations.claim())
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
        await gang.connect(secret=self._secret, router_id=name, tls=self._tls)
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


async def in_time(call: Awaitable[T]) -> T:
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


class HeartbeatReader:
    """Tells how long ago the heartbeats in a store last advanced. Times are `time.monotonic()`."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._seen: dict[int, _LastHeartbeat] = {}

    async def silent_s(self, now: float) -> dict[int, float]:
        """Return the seconds since each number's heartbeat was seen to change."""
        published = await in_time(self._generations.heartbeats())
        self._seen = {
            number: self._see(number, heartbeat, now) for number, heartbeat in published.items()
        }
        return {number: now - seen.since for number, seen in self._seen.items()}

    def _see(self, number: int, heartbeat: int, now: float) -> _LastHeartbeat:
        seen = self._seen.get(number)
        return (
            seen
            if seen is not None and seen.heartbeat == heartbeat
            else _LastHeartbeat(heartbeat, now)
        )


class TakeoverPriority:
    """One router's claim to gangs before newer routers. Times are `time.monotonic()` seconds."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._heartbeat = 0
        self._claimed = 0
        """Generation for which this router claimed priority; 0 for none."""
        self._reader = HeartbeatReader(generations)

    async def renew(self, generation: int) -> None:
        """Claim priority for this generation, or give it up with 0. Call it every
        `KEEP_ALIVE_S`."""
        claimed, self._claimed = self._claimed, generation
        if generation:
            self._heartbeat += 1
            await in_time(self._generations.publish_heartbeat(generation, self._heartbeat))
        if claimed and claimed != generation:
            await in_time(self._generations.withdraw_heartbeat(claimed))

    async def check(self, generation: int, now: float) -> None:
        """Check that a router of this generation may attach to gangs now.

        Raises:
            RanksHeld: an older router has priority, and its heartbeat changed within
                `LIVENESS_TIMEOUT_S`.
        """
        dead = []
        for number, silent_s in (await self._reader.silent_s(now)).items():
            if number >= generation:
                continue
            if silent_s <= LIVENESS_TIMEOUT_S:
                raise RanksHeld(
                    f"the router of generation {number} has requests and takeover priority over "
                    f"generation {generation}"
                )
            dead.append(number)
        # A router whose heartbeat does not advance is dead. What it has claimed would delay each
        # later router until that one has found the same. One that only stalled claims it again.
        for number in dead:
            await in_time(self._generations.withdraw_heartbeat(number))
