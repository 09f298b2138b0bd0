"""The watchdog of event loops finds what holds a loop up, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from loop_watch import watched_loop

LONG_S = 0.2


def parse_long() -> None:
    """Hold the interpreter in calls that do not let go of it, for longer than the limit."""
    deep = "[" * 900 + "]" * 900
    body = "[" + ",".join([deep] * 6_000) + "]"
    began = time.thread_time()
    while time.thread_time() - began < LONG_S:
        json.loads(body)


async def test_a_thread_that_holds_the_interpreter_is_found() -> None:
    with pytest.raises(AssertionError, match="a thread held the interpreter"), watched_loop():
        await asyncio.to_thread(parse_long)


async def test_a_callback_that_runs_too_long_is_found() -> None:
    async def watched() -> None:
        with watched_loop():
            asyncio.get_running_loop().call_soon(parse_long)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="ms: <Handle"):
        await watched()


async def test_many_short_callbacks_pass() -> None:
    """A thread that wants the interpreter may not get it in between for as long as these run."""
    with watched_loop():
        ended = time.perf_counter() + LONG_S
        while time.perf_counter() < ended:
            sum(range(10_000))
            await asyncio.sleep(0)
