"""A rank's registration, repeated as long as the rank lives.

The registry forgets everything when it is replaced. A rank that stopped repeating itself would
never be found again, with all its health checks passing: so no failure ends the repetition, and
should it end nevertheless, the rank counts as broken.

The registry: a small deployment through which ranks and router find each other.

It outlives every rank. When it dies itself, Serve starts another one, and the ranks, which repeat
their registration every few seconds, fill it again; the gangs do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ray.serve.handle import DeploymentHandle

from csps.protocols.core.errors import DeadlineExceeded, FaultError
from csps.services.cluster.membership import ClusterView, Member, Membership

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


POLL_S = 5.0
"""Longest that a poll is held open; short, because Serve lets open calls end before a stop."""
STORE_DEADLINE_S = 60.0
"""For rank 0 of a gang to publish its rendezvous store."""


class Registry:
    """Async shell around `Membership`; what it holds is addresses, nothing secret."""

    def __init__(self) -> None:
        self._membership = Membership()
        self._stores: dict[str, tuple[str, int]] = {}
        self._changed = asyncio.Condition()
        # A registry that starts again must not repeat a version that somebody has seen.
        self._version = secrets.randbits(60)

    async def join(self, member: Member) -> None:
        """Register a rank; repeating it is harmless."""
        if self._membership.join(member, time.monotonic()):
            self._stores.pop(member.gang_id, None)  # everyone has met
            await self._announce()

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """The gangs that serve now, as soon as that is not what the caller knows as `version`."""
        await self._wait(lambda: self._version != version)
        return self._version, self._membership.view

    async def publish_store(self, gang_id: str, host: str, port: int) -> None:
        """Rank 0 tells the others of its gang where to meet."""
        self._stores[gang_id] = (host, port)
        await self._announce()

    async def store_address(self, gang_id: str) -> tuple[str, int] | None:
        """Where the gang meets; None if rank 0 has not said so within `POLL_S`."""
        await self._wait(lambda: gang_id in self._stores)
        return self._stores.get(gang_id)

    async def _announce(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S), self._changed:
                await self._changed.wait_for(condition)


class RegistryDirectory:
    """The registry as the router sees it: a `Directory` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Registry]) -> None:
        self._handle = handle

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """The newest view, when it is another one than `version` or a poll has run out."""
        answer: tuple[int, ClusterView] = await self._handle.wait_change.remote(version)
        return answer


async def wait_for_store(registry: DeploymentHandle[Registry], gang_id: str) -> tuple[str, int]:
    """The address that rank 0 of the gang publishes.

    Raises:
        DeadlineExceeded: it has not within `STORE_DEADLINE_S`.
    """
    try:
        async with asyncio.timeout(STORE_DEADLINE_S):
            address: tuple[str, int] | None = None
            while address is None:
                address = await registry.store_address.remote(gang_id)
            return address
    except TimeoutError:
        raise DeadlineExceeded("rendezvous of the gang", STORE_DEADLINE_S) from None
