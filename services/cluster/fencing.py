"""Increasing numbers, written where they outlive whoever asked for them.

Routers are fenced by their generation (`protocols.fence`), gangs are told apart by their
incarnation (`services.cluster.membership`). A number is stored before it is handed out, so that no
restart hands it out again.

Who goes before a newer router: one that has lost a gang in the middle of its requests.

Ranks keep a newer router waiting while an older one holds them. A redeployment may replace the
ranks as well: Ray Serve ends gangs at once, and nobody holds those that come after them. If the
successor took them, the streams of the router before it would end. So that one says, where it
outlives all ranks, that it goes first, until it has its gangs again or its requests have ended.

A router's right to command gangs: its generation, and taking gangs over under it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from csps.protocols.core.errors import ConfigError, RanksHeld, Superseded
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import LIVENESS_TIMEOUT_S


class Generations(Protocol):
    """A counter that only grows, shared by all who ask it, and which numbers are held."""

    async def claim(self) -> int:
        """The next number, from 1; nobody else gets it, now or later."""
        ...

    async def claim_priority(self, number: int, heartbeat: int) -> None:
        """Let all see that a number is held. Whose `heartbeat` does not change any more may be dead."""
        ...

    async def release_priority(self, number: int) -> None:
        """Hold it no more."""
        ...

    async def priorities(self) -> dict[int, int]:
        """The numbers that are held, and the last beat of each."""
        ...


class MemoryGenerations:
    """For one process, as tests need it."""

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


class _LastHeartbeat(NamedTuple):
    heartbeat: int
    since: float


class TakeoverPriority:
    """One router's side. Times are `time.monotonic()` of this process."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._heartbeat = 0
        self._claimed = 0
        """The generation that this router goes first under; 0 while it does not."""
        self._seen: dict[int, _LastHeartbeat] = {}

    async def renew(self, generation: int) -> None:
        """Go first, under this generation; with 0, no more. Due every `fence.KEEP_ALIVE_S`."""
        claimed, self._claimed = self._claimed, generation
        if generation:
            self._heartbeat += 1
            await self._generations.claim_priority(generation, self._heartbeat)
        if claimed and claimed != generation:
            await self._generations.release_priority(claimed)

    async def check(self, generation: int, now: float) -> None:
        """Whether a router of this generation may take gangs over now.

        Raises:
            RanksHeld: an older router goes first, and was alive within `fence.LIVENESS_TIMEOUT_S`.
        """
        claimed = await self._generations.priorities()
        self._seen = {
            number: self._see(number, heartbeat, now) for number, heartbeat in claimed.items()
        }
        for number, seen in self._seen.items():
            if number < generation and now - seen.since <= LIVENESS_TIMEOUT_S:
                raise RanksHeld(f"the router of generation {number} has requests and goes first")

    def _see(self, number: int, heartbeat: int, now: float) -> _LastHeartbeat:
        seen = self._seen.get(number)
        return (
            seen
            if seen is not None and seen.heartbeat == heartbeat
            else _LastHeartbeat(heartbeat, now)
        )


_log = logging.getLogger(__name__)


class Fencing:
    """Attaches to gangs under a generation that grows whenever another router was newer."""

    def __init__(self, generations: Generations, *, secret: bytes, router_id: str) -> None:
        self._generations = generations
        self._takeover_priority = TakeoverPriority(generations)
        self._secret, self._router_id = secret, router_id
        self._attachments = 0
        self.generation = 0
        """0 until one is granted, and again from the moment that another router is newer."""

    async def set_takeover_priority(self, wanted: bool) -> None:
        """Whether this router goes before newer ones; due every `fence.KEEP_ALIVE_S`."""
        await self._takeover_priority.renew(self.generation if wanted else 0)

    async def attach(
        self,
        gangs: Sequence[GangClient],
        attached: Callable[[GangClient], None],
        *,
        model: str | None = None,
    ) -> None:
        """Take over those of the gangs that answer, or none while another router holds any.

        Args:
            attached: called with each gang that was taken over; the others are hung up on.
            model: fingerprint that gangs must have, if any.

        Raises:
            RanksHeld: another router is alive, and holds one of them or goes first.
            Superseded: another router is newer; next time this one will be.
            FaultError, ConfigError: a gang cannot be reached, or used.
        """
        if not self.generation:
            self.generation = await self._generations.claim()
            _log.info("router generation %d", self.generation)
        await self._takeover_priority.check(self.generation, time.monotonic())
        taken: set[GangClient] = set()
        try:
            errors = await _each(lambda gang: self._ask(gang, model), gangs)
            # Of a router that is alive not one gang may be taken: it would lose the others' work.
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
        """Whether the gang could be taken over, and used: one that could not is never held, not
        even for a moment, in which a router that could use it would be refused."""
        self._attachments += 1
        # A new name each time, so that a rank which this router was attached to before drops
        # what it still does for it.
        name = f"{self._router_id}.{self._attachments}"
        await gang.connect(secret=self._secret, router_id=name)
        await gang.check_free(self.generation)
        await gang.describe()
        found = gang.descriptions[0].model_fingerprint
        if model is not None and found != model:
            raise ConfigError(
                f"{gang.role} gang {gang.gang_id} serves another model, {found}, than the requests "
                f"began with, {model}"
            )


async def _each(
    work: Callable[[GangClient], Awaitable[None]], gangs: Sequence[GangClient]
) -> dict[GangClient, BaseException]:
    """Do it with all gangs at once; what went wrong with which."""
    results = await asyncio.gather(*map(work, gangs), return_exceptions=True)
    return {gang: it for gang, it in zip(gangs, results, strict=True) if it is not None}
