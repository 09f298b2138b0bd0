"""Requests of a deployed elastic gang at the moment at which its groups change."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from deployed_server import DEADLINE_S, Deployed
from tiny_checkpoints import random_tokens
from watched_streams import Talk, client_of

INSTANCES, KV_SLOTS = 4, 16_200
SETTINGS: dict[str, Any] = {
    "elastic": {"instances": INSTANCES, "kv_slots": KV_SLOTS},
    "scheduling": {"policy": "loongserve"},
    # Little stays cached: KV that earlier scenes left would be evicted for a sequence that moves,
    # and slots that are taken for it would not show.
    "kv_reuse": {"max_share": 0.05},
}
"""Settings of the server."""
LONG = random_tokens(16_000, seed=7), 300
"""A prompt, and tokens of its answer that are known from an undisturbed run."""
TALKERS = [(random_tokens(400 + n, seed=n), 1_500) for n in range(INSTANCES)]
"""Each is decoded by an instance of its own, when it comes while those before it are decoded."""
MOVERS = [(random_tokens(length, seed=length), 100) for length in (23, 20, 21, 22)]
"""The same, too short for two instances to prefill. Two of their answers find no slots on one
instance, but one does on two others."""
CONDUCTING = 0
MOVING, MOVED = 9_080, 5_000
"""Tokens of their answers, and slots that a rank takes at least for what moves to it: not rank 0,
which has fewer left than others."""
LATE = random_tokens(3_000, seed=8), 300
"""Comes while all instances decode."""


@dataclass(frozen=True)
class Scene:
    """Requests at an event."""

    talks: list[Talk]
    reading: list[asyncio.Task[None]]
    stopped: list[int] = field(default_factory=list)
    """Processes that are stopped."""

    def stop(self, pid: int) -> None:
        self.stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        self.stopped.remove(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def scene(server: Deployed, event: str) -> AsyncIterator[Scene]:
    """Bring an event about, yield, and cancel the streams that are left."""
    here = Scene([], [])
    async with client_of(server) as client:

        async def ask(prompt: list[int], max_tokens: int, tokens: int) -> Talk:
            """Ask, and wait for this many tokens."""
            here.talks.append(talk := Talk({"prompt": prompt, "max_tokens": max_tokens}))
            here.reading.append(asyncio.create_task(talk.read(client)))
            await talk.says(tokens)
            return talk

        async def ask_and_launch(prompt: list[int], max_tokens: int) -> None:
            """Ask, and wait until the prompt is being computed."""
            launched = server.gauge("request_queue_time_seconds_count")
            talk = await ask(prompt, max_tokens, 0)
            launching = asyncio.create_task(
                asyncio.to_thread(
                    server.wait_gauge, "request_queue_time_seconds_count", launched + 1
                )
            )
            await asyncio.wait({launching, here.reading[-1]}, return_when=asyncio.FIRST_COMPLETED)
            assert not talk.over, f"it is answered too early: {talk.over!r}"
            await launching

        try:
            if event == "scale_down":
                await ask_and_launch(LONG[0], 3_000)
            elif event == "scale_up":
                await ask(LONG[0], 3_000, KV_SLOTS - len(LONG[0]) + 10)
            elif event == "migrate":
                for prompt, _ in MOVERS:
                    await ask(prompt, MOVING, 2)
                pids = await asyncio.to_thread(server.rank_pids)
                used_before = await asyncio.to_thread(server.kv_used, besides=CONDUCTING)
                # Without who conducts, all that a move does is to take slots; without who takes
                # what moves, it begins and does not end.
                here.stop(pids[CONDUCTING])
                await ask(LATE[0], 1_000, 0)
                taking = await asyncio.to_thread(wait_taking, server, used_before)
                here.stop(pids[taking])
                here.go_on(pids[CONDUCTING])
                await asyncio.to_thread(server.kv_used, besides=taking)
            else:
                # Nobody can move to where others were promised so much, and no one instance has
                # slots for the last one.
                for prompt, _ in TALKERS:
                    await ask(prompt, 13_000, 2)
                await ask_and_launch(LATE[0], 2_000)
            yield here
        finally:
            for task in here.reading:
                task.cancel()
            await asyncio.gather(*here.reading, return_exceptions=True)
            for pid in list(here.stopped):
                here.go_on(pid)


def wait_taking(server: Deployed, used_before: dict[int, int]) -> int:
    """Wait until a rank has taken slots for a sequence that moves to it; return the rank."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for rank, used in server.kv_used(besides=CONDUCTING).items():
            if used >= used_before[rank] + MOVED:
                return rank
    raise AssertionError("nothing moves")
