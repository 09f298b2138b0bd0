"""Attempts that follow what the directory says, whatever became of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from csps.protocols.gang.members import GangMembers, RankAddress
from csps.services.cluster.attachment import Reconciler
from csps.services.cluster.membership import ClusterView, Directory, StaticDirectory

PATIENCE_S = 60.0


def view_of(gang_id: str) -> ClusterView:
    members = GangMembers(gang_id=gang_id, ranks=(RankAddress(rank=0, host="h", port=1),))
    return ClusterView(elastic=members)


FIRST, SECOND = view_of("e1"), view_of("e2")
Ended = asyncio.Queue[BaseException | None]


@asynccontextmanager
async def reconciling(
    directory: Directory, reconcile: Callable[[ClusterView], Coroutine[Any, Any, None]]
) -> AsyncIterator[tuple[Reconciler, Ended]]:
    """Yield a reconciler whose two tasks run, and the queue of its attempts' ends."""
    ended: Ended = asyncio.Queue()
    reconciler = Reconciler(directory, reconcile, ended.put_nowait, retry_s=0.0)
    tasks = [asyncio.create_task(reconciler.follow()), asyncio.create_task(reconciler.work())]
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reconciler, ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_news_ends_an_attempt_that_would_never_end() -> None:
    directory, stuck, reached = StaticDirectory(FIRST), asyncio.Event(), asyncio.Event()

    async def reconcile(view: ClusterView) -> None:
        if view == FIRST:
            stuck.set()
            await asyncio.Event().wait()
        if view == SECOND:
            reached.set()

    async with reconciling(directory, reconcile):
        await stuck.wait()
        directory.publish(SECOND)
        await reached.wait()


async def test_a_failed_attempt_is_reported_and_repeated() -> None:
    failures: list[Exception] = [ConnectionError("gone"), ConnectionError("still gone")]
    told = failures[::-1]

    async def reconcile(view: ClusterView) -> None:
        if view == FIRST and failures:
            raise failures.pop()

    async with reconciling(StaticDirectory(FIRST), reconcile) as (_, ended):
        errors = []
        while len(errors) < len(told):
            if (error := await ended.get()) is not None:
                errors.append(error)
        assert errors == told
        assert await ended.get() is None, "the third attempt was the last one"


async def test_an_attempt_is_repeated_when_its_result_is_lost() -> None:
    done: asyncio.Queue[ClusterView] = asyncio.Queue()

    async with reconciling(StaticDirectory(FIRST), done.put) as (reconciler, _):
        while await done.get() != FIRST:
            pass
        reconciler.retry_now()
        assert await done.get() == FIRST


async def test_a_failing_directory_is_asked_again() -> None:
    good, failures = StaticDirectory(FIRST), [ConnectionError("gone"), RuntimeError("restarting")]
    reached = asyncio.Event()

    class Flaky:
        async def wait_change(self, version: int) -> tuple[int, ClusterView]:
            if failures:
                raise failures.pop()
            return await good.wait_change(version)

    async def reconcile(view: ClusterView) -> None:
        if view == FIRST:
            reached.set()

    async with reconciling(Flaky(), reconcile):
        await reached.wait()
        assert not failures
