"""The registry, a small deployment through which ranks and router find each other.

It outlives every rank. If it dies, Serve starts another one and the ranks fill it again, because
they repeat their registration every few seconds (`Registration`). The gangs do not notice.

It answers ranks and routers of all rollouts, the former one's with the next one's code. So its
calls and their fields may only grow, and what grows has a default.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, get_args

import ray
from ray.serve.handle import DeploymentHandle

from csps.protocols.core.errors import DeadlineExceeded, FaultError
from csps.protocols.gang.members import GangRole
from csps.services.cluster.membership import Census, ClusterView, Member, Membership

_log = logging.getLogger(__name__)
POLL_S = 5.0
"""Longest time that a poll stays open; short, because Serve waits for open calls before a stop."""
ANSWER_S = 5.0
"""Longest time for an answer to arrive. A handle waits without end for a registry that is gone."""
MAX_STORES = 16
"""Number of gangs that may form at a time, far more than there are."""
STORE_DEADLINE_S = 60.0
"""Deadline for rank 0 of a gang to publish its rendezvous store."""
SETTLE_S = 15.0
"""Age at which a registry knows all living gangs: five repetitions of their registrations."""


class _Store(NamedTuple):
    """Rendezvous store of a gang in the middle of its start."""

    address: tuple[str, int] | None
    """None until rank 0 serves it."""
    rollout: int
    role: GangRole


class Registry:
    """Async shell around `Membership`; it holds addresses and no secrets."""

    def __init__(self) -> None:
        self._membership = Membership()
        self._stores: dict[str, _Store] = {}
        self._began = time.monotonic()
        self._changed = asyncio.Condition()
        # Random: a restarted registry must not repeat a version that a router has seen.
        self._version = secrets.randbits(60)

    async def join(self, member: Member) -> None:
        """Register a rank. Idempotent."""
        if self._membership.join(member, time.monotonic()):
            self._stores.pop(member.gang_id, None)  # every rank has read it
            await self._announce()

    async def wait_change(
        self, version: int, rollout: int | None = None
    ) -> tuple[int, ClusterView]:
        """Return the version and a rollout's view, by default the newest one's, once the version
        differs from `version`, or after `POLL_S`."""
        await self._wait(lambda: self._version != version)
        return self._version, self._membership.view(rollout)

    async def census(self, rollout: int) -> Census:
        """Return what is known of gangs besides those that serve in this rollout."""
        now = time.monotonic()
        view, stores = self._membership.view(rollout), self._stores.values()
        begun = {store.role for store in stores if store.rollout == rollout}
        begun |= {role for role in get_args(GangRole) if view.gang(role) is not None}
        return Census(
            begun=frozenset(begun),
            outdated=self._membership.outdated(rollout, now),
            settled=now - self._began >= SETTLE_S,
        )

    async def begin(self, gang_id: str, rollout: int, role: GangRole) -> None:
        """Learn that a gang has a place. It may still fail to start."""
        if gang_id not in self._stores:
            self._add(gang_id, _Store(None, rollout, role))

    async def publish_store(
        self, gang_id: str, host: str, port: int, rollout: int, role: GangRole
    ) -> None:
        """Store the address where the ranks of a gang meet; rank 0 repeats it until all have
        come."""
        store = _Store((host, port), rollout, role)
        if self._stores.get(gang_id) == store:
            return
        self._add(gang_id, store)
        await self._announce()

    async def store_address(self, gang_id: str) -> tuple[str, int] | None:
        """Return where the gang meets; None if rank 0 has not published it within `POLL_S`."""
        await self._wait(lambda: self._address(gang_id) is not None)
        return self._address(gang_id)

    async def replace(self, gang_id: str) -> bool:
        """End all ranks of a gang, also stopped processes; return whether the gang is known.

        Serve notices at its next health check, and starts another one.
        """
        replicas = self._membership.replicas(gang_id)
        if replicas:
            _log.warning("ending gang %s for the router", gang_id)
        await asyncio.gather(*(asyncio.to_thread(ray.kill, replica) for replica in replicas))
        return bool(replicas)

    def _add(self, gang_id: str, store: _Store) -> None:
        self._stores[gang_id] = store
        if len(self._stores) > MAX_STORES:  # gangs that never formed
            del self._stores[next(iter(self._stores))]

    def _address(self, gang_id: str) -> tuple[str, int] | None:
        store = self._stores.get(gang_id)
        return None if store is None else store.address

    async def _announce(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S), self._changed:
                await self._changed.wait_for(condition)


class RegistryDirectory:
    """The registry as a process of one rollout sees it: a `Directory` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Registry], rollout: int) -> None:
        self._handle, self._rollout = handle, rollout

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """Return the version and the view once it is newer, or when a poll runs out."""
        answer: tuple[int, ClusterView]
        try:
            async with asyncio.timeout(POLL_S + ANSWER_S):
                answer = await self._handle.wait_change.remote(version, self._rollout)
        except TimeoutError:
            raise DeadlineExceeded("a poll of the registry", POLL_S + ANSWER_S) from None
        return answer

    async def begin(self, gang_id: str, role: GangRole) -> None:
        """Publish that a gang has a place. If that fails, its store tells so later."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._handle.begin.remote(gang_id, self._rollout, role)
        except Exception as exc:  # Serve decides what it raises
            _log.info("the registry does not know yet that a gang starts: %r", exc)

    async def publish_store(self, gang_id: str, host: str, port: int, role: GangRole) -> None:
        """Publish where the ranks of a gang meet."""
        await self._handle.publish_store.remote(gang_id, host, port, self._rollout, role)

    async def wait_for_store(self, gang_id: str) -> tuple[str, int]:
        """Return the address that rank 0 of the gang publishes.

        Raises:
            DeadlineExceeded: rank 0 has not published it within `STORE_DEADLINE_S`, and waits for
                the end of no former rollout's gang.
        """
        while True:
            try:
                async with asyncio.timeout(STORE_DEADLINE_S):
                    address: tuple[str, int] | None = None
                    while address is None:
                        address = await self._handle.store_address.remote(gang_id)
                    return address
            except TimeoutError:
                if not (await self.census()).outdated:
                    raise DeadlineExceeded("rendezvous of the gang", STORE_DEADLINE_S) from None

    async def replace(self, gang_id: str) -> bool:
        """Have all ranks of a gang ended, so that Serve starts another one."""
        known: bool = await self._handle.replace.remote(gang_id)
        return known

    async def census(self) -> Census:
        """Return what is known of gangs besides those that serve."""
        census: Census
        try:
            async with asyncio.timeout(ANSWER_S):
                census = await self._handle.census.remote(self._rollout)
        except TimeoutError:
            raise DeadlineExceeded("a census of gangs", ANSWER_S) from None
        return census


PERIOD_S = 3.0
"""Pause between repetitions, for a registry that was restarted."""
REGISTER_DEADLINE_S = 10.0
"""Deadline for one call; a handle delays calls while there is no replica."""
Register = Callable[[], Awaitable[None]]
"""One call of the registry. Serve decides what it raises; there is no common base class."""


class Registration:
    """What a rank tells the registry, repeated from construction until `end`.

    A restarted registry knows nothing. A rank that stopped repeating itself would never be found
    again although its health checks pass. So no failure ends the repetition, and if it does end,
    the rank counts as broken (`check`).
    """

    def __init__(self, rank: int, register: Register, *, period_s: float = PERIOD_S) -> None:
        self._rank, self._register, self._period_s = rank, register, period_s
        self._trouble = ""
        self._task = asyncio.create_task(self._repeat())

    def check(self) -> None:
        """Raise FaultError if the registration is no longer repeated."""
        if self._task.done():
            raise FaultError(f"rank {self._rank} stopped repeating its registration")

    def end(self) -> None:
        """Stop registering."""
        self._task.cancel()

    async def _repeat(self) -> None:
        while True:
            self._note(await self._failure())
            await asyncio.sleep(self._period_s)

    async def _failure(self) -> str:
        """Register once; return the name of the error, or an empty string."""
        try:
            async with asyncio.timeout(REGISTER_DEADLINE_S):
                await self._register()
        except Exception as exc:
            return type(exc).__name__
        return ""

    def _note(self, trouble: str) -> None:
        """Log a change of the error, not its repetitions."""
        if trouble and trouble != self._trouble:
            _log.warning("rank %d cannot register (%s), retrying", self._rank, trouble)
        elif self._trouble and not trouble:
            _log.info("rank %d is registered again", self._rank)
        self._trouble = trouble
