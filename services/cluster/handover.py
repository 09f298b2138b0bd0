"""Hand a cell over from one rollout to the next, without an error that a client sees.

A *rollout* is what one deployment of the application starts: a router and its gangs. They share
settings, secret and wire, so that no router ever attaches to another rollout's gang. Both rollouts
exist beside each other for a while. Ray Serve keeps replicas of the former one until those of the
next have been constructed (`max_surge_percent`), and then drains a router, but kills ranks. So
constructors wait, and an update has this order:

1. The next ranks load their weights beside the former ones and register.
2. The next router attaches to them. Its constructor ends: Serve sends it new requests, and drains
   the former router, which keeps its own ranks.
3. The former router has left. The constructors of the next ranks end: Serve kills the former ones.

Where both rollouts' ranks do not fit side by side, the next router takes new requests without
having gangs. They wait, the former router drains, and then its ranks are ended to make room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from csps.protocols.core.errors import CspsError
from csps.protocols.gang.members import KEEP_ALIVE_S, GangRole
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.fencing import Generations, HeartbeatReader, in_time
from csps.services.cluster.membership import Directory

_log = logging.getLogger(__name__)
SILENCE_S = 20.0
"""Silence after which a former rollout's router counts as dead. Long, because nothing waits but the
update: a router that is wrongly taken for dead would lose its ranks with all requests. One that
ends in order withdraws its heartbeat."""


@dataclass(frozen=True, kw_only=True)
class HandoverDeadlines:
    """Deadlines in seconds."""

    placement_s: float = 60.0
    """Time for a gang to begin its start beside the former rollout's. After it the cluster counts
    as too small for both; until then nothing pauses, because the former rollout serves."""
    poll_s: float = KEEP_ALIVE_S
    """Pause between two looks at the other rollouts, and between two heartbeats."""


class ServingRollouts:
    """The former rollouts whose routers still serve, by their heartbeats in a store.

    The store outlives routers, ranks and the registry. A former rollout has a smaller number.

    Args:
        generations: heartbeats of the routers that serve, each under its rollout.
        rollout: the rollout of this process.
    """

    def __init__(self, generations: Generations, rollout: int) -> None:
        self._generations, self._rollout = generations, rollout
        self._reader = HeartbeatReader(generations)
        self._heartbeat = 0

    async def renew(self) -> None:
        """Publish that this rollout's router serves."""
        self._heartbeat += 1
        await in_time(self._generations.publish_heartbeat(self._rollout, self._heartbeat))

    async def withdraw(self) -> None:
        """Publish that this rollout's router has left its ranks."""
        if self._heartbeat:
            await in_time(self._generations.withdraw_heartbeat(self._rollout))

    async def former(self) -> bool:
        """Return whether the router of a former rollout serves."""
        silent_s = await self._reader.silent_s(time.monotonic())
        former = {rollout: s for rollout, s in silent_s.items() if rollout < self._rollout}
        for rollout, seconds in former.items():
            if seconds > SILENCE_S:  # nobody else would ever remove a dead router's
                await in_time(self._generations.withdraw_heartbeat(rollout))
        return any(seconds <= SILENCE_S for seconds in former.values())


async def wait_for_former_router(
    rollouts: ServingRollouts, check: Callable[[], None], *, poll_s: float = KEEP_ALIVE_S
) -> None:
    """Wait in the constructor of a rank until the former rollout's ranks may be killed.

    The wait ends with the life of the former router. Serve drains that one for a limited time once
    the next router has started. If it never starts, the former rollout goes on serving.

    Args:
        check: raises if this rank is broken meanwhile; Serve checks only what it has constructed.
    """
    waits = False
    while await _former_serves(rollouts):
        check()
        if not waits:
            _log.info("waiting until the former rollout's router has left its ranks")
        waits = True
        await asyncio.sleep(poll_s)


async def _former_serves(rollouts: ServingRollouts) -> bool:
    """Return whether a former rollout's router serves; True if that is unknown."""
    try:
        return await rollouts.former()
    except Exception as exc:  # whatever a store of another process may raise
        _log.warning("cannot see whether a former router serves: %s", exc)
        return True


class Handover:
    """The router's part: it waits for its turn, then has outdated gangs ended if they are in the
    way of its own."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Directory,
        rollouts: ServingRollouts,
        roles: tuple[GangRole, ...],
        *,
        feasible: Callable[[], bool] = lambda: True,
        deadlines: HandoverDeadlines | None = None,
    ) -> None:
        """Args:
        feasible: returns whether the gangs lack nothing but the room that the former ones take. It
            may block.
        """
        self._feasible = feasible
        self._cluster, self._directory, self._rollouts = cluster, directory, rollouts
        self._roles, self._deadlines = frozenset(roles), deadlines or HandoverDeadlines()
        self._task: asyncio.Task[None] | None = None

    async def wait_turn(self) -> None:
        """Wait until Serve may send requests to this router and drain the former one.

        That is when this router is ready, when no former router serves, or when its gangs do not
        fit beside the former ones. Gangs that would not fit alone either, or that fail before they
        begin, are waited for: the former rollout must not end for them.
        """
        ends = time.monotonic() + self._deadlines.placement_s
        while self._cluster.link is None and await _former_serves(self._rollouts):
            # Looked for from the beginning: a failure shows only until the next update.
            missing = await self._unplaced()
            if missing and time.monotonic() > ends:
                _log.warning(
                    "no %s gang has begun to start within %g s: taking over without, because both "
                    "rollouts do not seem to fit side by side",
                    " and no ".join(sorted(missing)), self._deadlines.placement_s,
                )  # fmt: skip
                break
            await asyncio.sleep(self._deadlines.poll_s)
        self._task = asyncio.create_task(self._serve(), name="serve as this rollout's router")

    async def close(self) -> None:
        """Publish that the router has left its ranks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        try:
            await self._rollouts.withdraw()
        except Exception as exc:  # whatever a store of another process may raise
            _log.warning("the next rollout waits %g s more: %s", SILENCE_S, exc)

    async def _unplaced(self) -> frozenset[GangRole]:
        """Return the roles of which no gang has begun to start, for want of the former ones' room;
        none if that is unknown."""
        try:
            missing = self._roles - (await self._directory.census()).begun
            feasible = bool(missing) and await asyncio.to_thread(self._feasible)
            if feasible:
                return missing
        except Exception as exc:  # whatever a directory, or Serve, may raise
            _log.info("cannot see which gangs lack room, retrying: %s", exc)
        return frozenset()

    async def _serve(self) -> None:
        """Publish that this router serves, and make room for its gangs, for ever."""
        while True:
            try:
                await self._rollouts.renew()
                await self._make_room()
            except Exception as exc:  # whatever another process may raise
                expected = isinstance(exc, CspsError)
                _log.warning("handing over: %s", exc, exc_info=None if expected else exc)
            await asyncio.sleep(self._deadlines.poll_s)

    async def _make_room(self) -> None:
        """End outdated gangs that nobody uses while gangs of this rollout have no place."""
        waits = self._cluster.link is None and await self._rollouts.former()
        self._cluster.stand_by(waits)
        if self._cluster.link is not None or waits:
            return
        census = await self._directory.census()
        if not self._roles - census.begun:
            return
        for gang_id in census.outdated:
            _log.info("ending gang %s of a former rollout, to make room", gang_id)
            await self._directory.replace(gang_id)
