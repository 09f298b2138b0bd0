"""Processes that are killed or frozen, and packets that vanish, as the clients of a deployed server
see them: how long it takes until requests are answered again, and whether any answer is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from black_holes import borrowed, sockets_of, swallow
from deployed_server import DEADLINE_S, Deployed, deployed, name_of, slowdown
from outage import Outage
from tiny_checkpoints import make_checkpoint, random_tokens
from watched_streams import Talk, client_of

from csps.services.launch.ray_head import session_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT, TOKENS = random_tokens(300, seed=3), 4
STREAMED, STREAM_TOKENS = [random_tokens(60 + 997 * n, seed=n) for n in range(12)], 300
KILLED_S, FROZEN_S = 8.0, 15.0
"""Time until requests are answered again, on a machine that has nothing else to do (`slowdown`)."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    path = tmp_path_factory.mktemp("model")
    model_dir = make_checkpoint(path, "llama", max_position_embeddings=65_536)
    with deployed(model_dir, tmp_path_factory.mktemp("run")) as server:
        yield server


FRONT = "haproxy"
ENDS_REQUESTS = ("Router", FRONT)
"""What takes its requests with it."""


def pid_of(server: Deployed, deployment: str, index: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with suppress(IndexError, StopIteration):
            if deployment == FRONT:
                return next(pid for pid in session_of(server.head.pid) if name_of(pid) == FRONT)
            return int(server.replicas(deployment)[index]["pid"])
        assert time.monotonic() < deadline, f"{deployment} has no running replica {index}"
        time.sleep(0.05)


def kill(server: Deployed, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(server: Deployed, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def cut(server: Deployed, pid: int) -> None:
    """Let all packets that the router sends to a rank vanish, new connections included."""
    for _, sock in rank_sockets(server, pid):
        swallow(sock)


def cut_back(server: Deployed, pid: int) -> None:
    """Let all packets that a rank sends to the router vanish."""
    (router,) = server.pids("Router")
    swallowed = 0
    for address, _ in rank_sockets(server, pid):
        for descriptor in sockets_of(router):
            # The router closes others meanwhile, and some have no peer.
            with suppress(OSError), borrowed(router, descriptor) as sock:
                if sock.getpeername() == address:
                    swallow(sock)
                    swallowed += 1
    assert swallowed, "the router has no connection to that rank"


def rank_sockets(server: Deployed, pid: int) -> Iterator[tuple[object, socket.socket]]:
    """Yield the RPC sockets of a rank, and the address where it listens."""
    addresses = server.registry.rank_addresses()
    for descriptor in sockets_of(pid):
        with borrowed(pid, descriptor) as sock:
            if sock.family == socket.AF_INET and sock.getsockname() in addresses:
                yield sock.getsockname(), sock


class Streams:
    """Long greedy answers that are streamed while something breaks."""

    def __init__(self, server: Deployed) -> None:
        self._server = server
        self.talks = [Talk({"prompt": prompt, "max_tokens": STREAM_TOKENS}) for prompt in STREAMED]
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()))
        self._thread.start()
        assert self._begun.wait(DEADLINE_S), "no stream has begun"

    def close(self) -> None:
        """Wait until every stream has ended."""
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), "a stream does not end"

    def check(self, undisturbed: Streams) -> None:
        """Check that all streams ended as undisturbed ones do."""
        for talk, expected in zip(self.talks, undisturbed.talks, strict=True):
            assert talk.tokens == STREAM_TOKENS, f"{talk.tokens} tokens: {talk.over!r}"
            talk.check(expected)

    async def _read_all(self) -> None:
        async with client_of(self._server) as client:
            reading = [asyncio.create_task(talk.read(client)) for talk in self.talks]
            await self.talks[0].says(10)
            self._begun.set()
            await asyncio.gather(*reading, return_exceptions=True)


@pytest.fixture(scope="module")
def undisturbed(server: Deployed) -> Streams:
    with closing(Streams(server)) as streams:
        return streams


GANGS = [("PrefillGang", 0), ("PrefillGang", 1), ("DecodeGang", 0), ("DecodeGang", 1)]
CASES = [
    *((fault, gang, index) for fault in (kill, freeze, cut, cut_back) for gang, index in GANGS),
    *((fault, lost, 0) for fault in (kill, freeze) for lost in ENDS_REQUESTS),
]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("fault", "deployment", "index"), CASES)
def test_answers_come_again(
    server: Deployed,
    undisturbed: Streams,
    fault: Callable[[Deployed, int], None],
    deployment: str,
    index: int,
    busy: bool,
) -> None:
    server.wait_ready()
    factor, streams = slowdown(), None
    with Outage(server, PROMPT, TOKENS) as outage:
        expected = outage.probes[0].text
        if busy:
            streams = Streams(server)
        pid = pid_of(server, deployment, index)
        outage.begin()
        fault(server, pid)
        took_s = outage.recovered()
    print(
        f"MEASURED {fault.__name__} {deployment} {index} {'busy' if busy else 'idle'}: "
        f"{took_s:.1f} s, longest {outage.longest_s():.1f} s, red {outage.red_s():.1f} s, "
        f"{len(outage.failed)} of {len(outage.probes)} failed, slowdown {factor:.2f}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    outage.check_tokens(expected)
    outage.check_health_was_honest()
    if streams is not None:
        streams.close()
    if deployment not in ENDS_REQUESTS:
        assert not outage.failed
        if streams is not None:
            streams.check(undisturbed)
    assert took_s <= factor * (KILLED_S if fault is kill else FROZEN_S)
    server.wait_ready()
    server.assert_only_cache_left()
