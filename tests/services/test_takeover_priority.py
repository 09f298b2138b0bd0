"""Takeover priority of an older router that needs gangs, as long as its heartbeat changes."""

from __future__ import annotations

import pytest

from csps.protocols.core.errors import RanksHeld
from csps.protocols.gang.members import LIVENESS_TIMEOUT_S
from csps.services.cluster.fencing import MemoryGenerations, TakeoverPriority


async def test_an_older_router_has_priority_until_it_gives_it_up() -> None:
    shared = MemoryGenerations()
    older, newer = TakeoverPriority(shared), TakeoverPriority(shared)
    await newer.check(2, now=0.0)
    await older.renew(1)
    for now in (1.0, 50.0, 100.0):
        with pytest.raises(RanksHeld, match="generation 1"):
            await newer.check(2, now=now)
        await older.renew(1)
    await older.check(1, now=0.0)
    await older.renew(0)
    await newer.check(2, now=100.0)


async def test_a_newer_router_has_no_priority_over_an_older_one() -> None:
    shared = MemoryGenerations()
    older, newer = TakeoverPriority(shared), TakeoverPriority(shared)
    await newer.renew(2)
    await older.check(1, now=0.0)


async def test_a_dead_routers_priority_ends_with_its_heartbeat() -> None:
    shared = MemoryGenerations()
    await TakeoverPriority(shared).renew(1)
    newer = TakeoverPriority(shared)
    for now in (10.0, 10.0 + LIVENESS_TIMEOUT_S):
        with pytest.raises(RanksHeld):
            await newer.check(2, now=now)
    await newer.check(2, now=10.1 + LIVENESS_TIMEOUT_S)
    assert not await shared.heartbeats(), "no later router waits for it again"
    await TakeoverPriority(shared).check(3, now=0.0)


async def test_a_router_that_only_stalled_claims_its_priority_again() -> None:
    shared = MemoryGenerations()
    older, newer = TakeoverPriority(shared), TakeoverPriority(shared)
    await older.renew(1)
    with pytest.raises(RanksHeld):
        await newer.check(2, now=0.0)
    await newer.check(2, now=0.1 + LIVENESS_TIMEOUT_S)
    await older.renew(1)
    with pytest.raises(RanksHeld):
        await newer.check(2, now=0.2 + LIVENESS_TIMEOUT_S)


async def test_the_priority_of_a_newer_router_is_left_alone() -> None:
    shared = MemoryGenerations()
    await TakeoverPriority(shared).renew(5)
    older = TakeoverPriority(shared)
    for now in (0.0, 0.1 + LIVENESS_TIMEOUT_S):
        await older.check(2, now=now)
    assert list(await shared.heartbeats()) == [5]


async def test_a_new_generation_releases_the_old_ones_priority() -> None:
    shared = MemoryGenerations()
    router = TakeoverPriority(shared)
    await router.renew(1)
    await router.renew(3)
    assert list(await shared.heartbeats()) == [3]
    await router.renew(0)
    await router.renew(0)
    assert not await shared.heartbeats()
