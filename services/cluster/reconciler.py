"""The control loop between what the directory says and what the router is attached to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from csps.services.cluster.directory import ClusterView, Directory

_log = logging.getLogger(__name__)


class Reconciler:
    """Works towards what the directory says, over and over.

    One task follows the directory, another works. That one is started over whenever something
    changes, so an attempt to reach ranks that have vanished holds up nothing.

    Args:
        reconcile: one attempt at what a view says, until nothing is left to do.
        ended: told of each attempt that was not outdated how it ended: its error, if any.
        retry_s: pause after a failed attempt, unless there is news earlier.
    """

    def __init__(
        self,
        directory: Directory,
        reconcile: Callable[[ClusterView], Coroutine[Any, Any, None]],
        ended: Callable[[BaseException | None], None],
        *,
        retry_s: float,
    ) -> None:
        self._directory, self._reconcile, self._ended = directory, reconcile, ended
        self._retry_s = retry_s
        self._view = ClusterView()
        self._changed = asyncio.Event()

    def again(self) -> None:
        """What an attempt had achieved is no longer so."""
        self._changed.set()

    async def follow(self) -> None:
        """Learn what the directory says; for ever."""
        version = -1
        while True:
            try:
                version, view = await self._directory.wait_change(version)
            except Exception as exc:  # whatever a directory of another process may raise
                _log.warning("the directory does not answer: %s", exc)
                await asyncio.sleep(self._retry_s)
                continue
            if view != self._view:
                self._view = view
                self._changed.set()

    async def work(self) -> None:
        """Attempt after attempt; for ever."""
        while True:
            self._changed.clear()
            await wait_at_most(self._changed, await self._attempt())

    async def _attempt(self) -> float | None:
        """Work towards the view until done, failed or outdated; returns how long to pause."""
        work = asyncio.create_task(self._reconcile(self._view))
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({work, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            work.cancel()  # changes nothing if it is done
            await asyncio.wait({work, news})
        if work.cancelled():
            return None
        error = work.exception()
        self._ended(error)
        return None if error is None else self._retry_s


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most that long if a time is given."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
