"""A submitted request as the HTTP layer reads it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from csps.protocols.errors import GangLost
from csps.protocols.sampling import Sampling
from csps.protocols.tokens import TokenDrawn
from csps.services.router.generation import Generation
from csps.services.router.running import Running

DEADLINE_S = 60


@pytest.fixture
def running() -> Running:
    generation = Generation(
        request_id="r", prompt=np.array([1], np.int32), sampling=Sampling(max_tokens=9)
    )
    return Running(generation, number=1, on_cancel=lambda it: it.finish("cancelled"))


def deliver(running: Running, *indices: int) -> None:
    for index in indices:
        running.deliver(TokenDrawn(rid=1, index=index, token=7))


async def pending(running: Running) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [token.index for token in await running.pending()]


async def test_all_that_has_come_is_taken_at_once(running: Running) -> None:
    deliver(running, 0, 1, 2)
    assert await pending(running) == [0, 1, 2]
    deliver(running, 3)
    assert await pending(running) == [3]


async def test_a_reader_waits_for_one_token_and_no_longer(running: Running) -> None:
    reading = asyncio.ensure_future(pending(running))
    await asyncio.sleep(0)
    assert not reading.done()
    deliver(running, 0)
    assert await reading == [0]


async def test_what_has_come_is_read_before_the_end(running: Running) -> None:
    deliver(running, 0, 1)
    running.finish("stop")
    assert await pending(running) == [0, 1]
    assert await pending(running) == []


async def test_what_has_come_is_read_before_the_failure(running: Running) -> None:
    deliver(running, 0)
    running.fail(GangLost("gone"))
    assert await pending(running) == [0]
    with pytest.raises(GangLost):
        await pending(running)


async def test_an_end_wakes_a_waiting_reader(running: Running) -> None:
    reading = asyncio.ensure_future(pending(running))
    await asyncio.sleep(0)
    running.cancel()
    assert await reading == []


async def test_one_reader_may_take_tokens_singly(running: Running) -> None:
    deliver(running, 0, 1, 2)
    assert (await anext(running)).index == 0
    assert await pending(running) == [1, 2]
