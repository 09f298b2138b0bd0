"""Ranks that die, and clients that leave, while a deployed elastic gang changes its groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from deployed_server import DEADLINE_S, POLL_S, Deployed, deployed, slowdown
from elastic_scenes import LATE, LONG, MOVERS, SETTINGS, TALKERS, scene
from tiny_checkpoints import make_checkpoint
from watched_streams import Talk, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BACK_S = 20.0
"""Time from a rank's death until the router has attached the whole gang again, on an otherwise idle
machine (`slowdown`).
"""
MORE = 20
"""Tokens that every client receives after a death."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    model = make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=65_536
    )
    with deployed(model, tmp_path_factory.mktemp("run"), **SETTINGS) as server:
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
