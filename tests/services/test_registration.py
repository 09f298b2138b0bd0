"""A rank's registration goes on, whatever the registry does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from csps.protocols.core.errors import FaultError
from csps.services.cluster import registry as module
from csps.services.cluster.registry import Register, Registration, RegistryDirectory

DEADLINE_S = 60.0


class Registry:
    """A registry that fails as often as it is told to, then takes registrations."""

    def __init__(self, *failures: Callable[[], Exception]) -> None:
        self._failures = list(failures)
        self._joined: asyncio.Queue[None] = asyncio.Queue()

    async def join(self) -> None:
        if self._failures:
            raise self._failures.pop(0)()
        self._joined.put_nowait(None)

    async def joins(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(count):
                await self._joined.get()


@asynccontextmanager
async def registering(register: Register) -> AsyncIterator[Registration]:
    registration = Registration(1, register, period_s=0)
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


class Handle:
    """A Serve handle whose registry may be replaced."""

    def __init__(self) -> None:
        self.registry = module.Registry()

    def __getattr__(self, name: str) -> Handle._Method:
        return Handle._Method(self, name)

    class _Method:
        def __init__(self, handle: Handle, name: str) -> None:
            self._handle, self._name = handle, name

        def remote(self, *args: object) -> Awaitable[Any]:
            call: Callable[..., Awaitable[Any]] = getattr(self._handle.registry, self._name)
            return call(*args)


async def test_the_ranks_of_a_gang_meet_although_the_registry_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 waits for the others in its store meanwhile."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    handle = Handle()
    async with registering(
        partial(handle.publish_store.remote, "g", "10.0.0.1", 1234, 0, "decode")
    ):
        async with asyncio.timeout(DEADLINE_S):
            while not handle.registry._stores:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0)
            handle.registry = module.Registry()
            assert await RegistryDirectory(handle, 0).wait_for_store("g") == ("10.0.0.1", 1234)  # type: ignore[arg-type]


async def test_stores_of_gangs_that_never_formed_are_forgotten() -> None:
    registry = module.Registry()
    for number in range(100):
        await registry.publish_store(f"gang {number}", "10.0.0.1", 1234, 0, "decode")
    assert len(registry._stores) == module.MAX_STORES
    assert await registry.store_address("gang 99") == ("10.0.0.1", 1234)
