"""Ranks that die, and clients that leave, while a deployed elastic gang changes its groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from deployed_server import DEADLINE_S, POLL_S, Deployed, deployed, slowdown
from tiny_checkpoints import make_checkpoint, random_tokens
from watched_streams import Talk, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

INSTANCES, KV_SLOTS = 4, 16_200
BACK_S = 20.0
"""Time from a rank's death until the router has attached the whole gang again, on an otherwise idle
machine (`slowdown`).
"""
MORE = 20
"""Tokens that every client receives after a death."""
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    model = make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=65_536
    )
    elastic = {"instances": INSTANCES, "kv_slots": KV_SLOTS}
    scheduling = {"policy": "loongserve"}
    run = tmp_path_factory.mktemp("run")
    with deployed(model, run, elastic=elastic, scheduling=scheduling) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Deployed) -> dict[int, Talk]:
    """Return the answers to prompts of these lengths without a fault."""
    alone = LONG, *TALKERS, *MOVERS, LATE
    talks = [Talk({"prompt": prompt, "max_tokens": known}) for prompt, known in alone]

    async def read() -> None:
        async with client_of(server) as client:
            for talk in talks:
                await talk.read(client)

    asyncio.run(read())
    return {len(stream.fields["prompt"]): stream for stream in talks}


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


def kill_and_wait(server: Deployed, pid: int) -> float:
    """Kill a rank with SIGKILL; return the time until the router had the whole gang again."""
    lost = server.gauge("gangs_lost_total")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    server.wait_gauge("gangs_lost_total", lost + 1)
    deadline = began + 4 * DEADLINE_S
    while not server.gauge("ready"):
        assert time.monotonic() < deadline, "the gang does not come back"
        time.sleep(POLL_S)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("event", "rank"), [("scale_down", 0), ("scale_up", 1), ("preempt", 2), ("migrate", None)]
)
def test_a_rank_is_killed(
    server: Deployed, undisturbed: dict[int, Talk], event: str, rank: int | None
) -> None:
    """The whole gang ends, and is back in time. No client gets a wrong token, and a client without
    tokens gets all of them.
    """
    pids = server.rank_pids()

    async def disturbed() -> tuple[list[Talk], float]:
        async with scene(server, event) as played:
            assert not any(task.done() for task in played.reading), "too late"
            (pid,) = played.stopped if rank is None else [pids[rank]]
            back_s = await asyncio.to_thread(kill_and_wait, server, pid)
            for talk in played.talks:
                await talk.says(talk.tokens + MORE)
            return played.talks, back_s

    talks, back_s = asyncio.run(disturbed())
    server.assert_only_cache_left()
    assert server.rank_pids().keys() == pids.keys()
    assert not set(server.rank_pids().values()) & set(pids.values())
    for talk in talks:
        talk.check(undisturbed[len(talk.fields["prompt"])])
    assert server.gauge("request_failures_total") == 0
    assert server.gauge("request_retries_total") > 0
    assert back_s <= BACK_S * (slower := slowdown()), f"{back_s:.1f} s, others {slower:.1f} x"


@pytest.mark.parametrize("event", ["scale_down", "scale_up", "preempt", "migrate"])
def test_all_clients_leave(server: Deployed, event: str) -> None:
    """No instance has anything left to do afterwards."""

    async def left() -> None:
        async with scene(server, event):
            pass

    asyncio.run(left())
    server.assert_only_cache_left()
    server.wait_zero("num_requests_running")
