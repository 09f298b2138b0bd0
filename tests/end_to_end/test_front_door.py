"""The HTTP front on a real Ray: what becomes of it when HAProxy dies, and of clients that stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from unittest import mock

import httpx
import pytest
from deployed_server import Deployed, deployed, name_of, slowdown
from stalled_clients import HALF_SENT, IN_THE_BODY, IN_THE_HEADERS, outcome
from tiny_checkpoints import make_checkpoint

from csps.services.http.header_deadline import VARIABLE
from csps.services.launch.ray_head import session_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEALED_S = 8.0
"""A front whose HAProxy has died answers again within this, on a machine that has nothing else to
do (`slowdown`)."""
DEADLINE_S = 60.0
POLL_S = 0.05
IMPATIENT = {VARIABLE: "1", "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "3"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    model_dir = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    run_dir = tmp_path_factory.mktemp("run")
    with (
        mock.patch.dict(os.environ, IMPATIENT),
        deployed(model_dir, run_dir, http={"body_silence_s": 1.0}) as server,
    ):
        yield server


def haproxies(server: Deployed) -> list[int]:
    return [pid for pid in session_of(server.head.pid) if name_of(pid) == "haproxy"]


def answers(server: Deployed) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=1.0).status_code == 200
    except httpx.TransportError:
        return False


def test_a_killed_haproxy_is_replaced(server: Deployed) -> None:
    assert answers(server)
    for pid in haproxies(server):
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert not answers(server)
    while not answers(server):
        assert time.monotonic() - killed < DEADLINE_S, "the front does not come back"
        time.sleep(POLL_S)
    healed_s = time.monotonic() - killed
    assert healed_s < HEALED_S * (slower := slowdown()), f"{healed_s:.1f} s, others {slower:.1f} x"


def router_port(server: Deployed) -> int:
    """Return the port on which the router itself speaks HTTP."""
    ports = [int(address.rpartition(":")[2], 16) for address in server.listening("ray::ServeRepli")]
    (port,) = [port for port in ports if 30_000 <= port <= 31_000]
    return port


@pytest.mark.parametrize("door", ["front", "router"])
def test_half_sent_requests_are_answered_and_hung_up_on(server: Deployed, door: str) -> None:
    port = server.config.port if door == "front" else router_port(server)

    async def all_at_once() -> list[int]:
        clients = (outcome("127.0.0.1", port, kind, deadline_s=DEADLINE_S) for kind in kinds)
        return [seen.status for seen in await asyncio.gather(*clients)]

    kinds = [sent for name, sent in HALF_SENT.items() if name in IN_THE_HEADERS | IN_THE_BODY] * 50
    assert set(asyncio.run(all_at_once())) == {408}
    assert answers(server)
