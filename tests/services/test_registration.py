"""A rank's registration goes on, whatever the registry does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from csps.protocols.core.errors import FaultError
from csps.protocols.gang.members import RankAddress
from csps.services.cluster.membership import Member
from csps.services.cluster.registry import Join, Registration

DEADLINE_S = 60.0
MEMBER = Member(
    role="decode",
    gang_id="g",
    world_size=2,
    address=RankAddress(rank=1, host="127.0.0.1", port=1),
)


class Registry:
    """A registry that fails as often as it is told to, then takes registrations."""

    def __init__(self, *failures: Callable[[], Exception]) -> None:
        self._failures = list(failures)
        self._joined: asyncio.Queue[Member] = asyncio.Queue()

    async def join(self, member: Member) -> None:
        if self._failures:
            raise self._failures.pop(0)()
        self._joined.put_nowait(member)

    async def joins(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(count):
                assert await self._joined.get() == MEMBER


@asynccontextmanager
async def registering(join: Join) -> AsyncIterator[Registration]:
    registration = Registration(MEMBER, join, period_s=0)
    try:
        yield registration
    finally:
        registration.end()


async def check_for_long(registration: Registration) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            registration.check()
            await asyncio.sleep(0)


def unavailable() -> Exception:
    """Return what a handle raises while its deployment is being replaced; it is not a RayError."""
    return DeploymentUnavailableError.__new__(DeploymentUnavailableError)


def pushed_back() -> Exception:
    return BackPressureError(num_queued_requests=1, max_queued_requests=1)


async def test_a_registration_survives_whatever_serve_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "csps.services.cluster.registry")
    registry = Registry(unavailable, unavailable, pushed_back, RuntimeError)
    async with registering(registry.join) as registration:
        await registry.joins(3)
        registration.check()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 cannot register (DeploymentUnavailableError), retrying",
        "rank 1 cannot register (BackPressureError), retrying",
        "rank 1 cannot register (RuntimeError), retrying",
        "rank 1 is registered again",
    ]


async def test_a_registration_that_ended_fails_the_health_check() -> None:
    registry = Registry()
    async with registering(registry.join) as registration:
        await registry.joins(1)
        registration.end()
        with pytest.raises(FaultError, match=r"^rank 1 stopped repeating its registration$"):
            await check_for_long(registration)
