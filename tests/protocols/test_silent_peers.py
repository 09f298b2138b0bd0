"""Peers that say nothing any more, although their connection stands: frozen, or out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from black_holes import swallow

from csps.protocols.core.errors import ConnectionLost
from csps.protocols.rpc import wire
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.server import Peer, RpcServer

SECRET = b"a cluster secret"
PATIENCE_S = 30.0


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[RpcClient, Peer]]:
    """Yield a client and its server's end of the connection."""
    server = RpcServer({"echo": lambda payload, _: payload}, secret=SECRET)
    address = await server.start("127.0.0.1")
    client = await RpcClient.connect(*address, secret=SECRET, name="test", deadline_s=PATIENCE_S)
    [peer] = server.peers
    try:
        yield client, peer
    finally:
        client.abort(ConnectionLost("the test is over"))
        await server.close(0.0)


def socket_of(end: RpcClient | Peer) -> Any:
    return end._transport.get_extra_info("socket")


@pytest.mark.parametrize("deaf", ["client", "server"])
@pytest.mark.parametrize("speaks", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_packets_that_vanish_end_the_connection_within_seconds(
    monkeypatch: pytest.MonkeyPatch, deaf: str, speaks: bool
) -> None:
    """The kernel's own limit is a quarter of an hour for data, and a minute for silence."""
    monkeypatch.setattr(wire, "UNACKNOWLEDGED_S", 0.5)
    async with connected() as (client, peer):
        swallow(socket_of(client if deaf == "client" else peer))
        if speaks:
            client.notify("echo")
        reason = await asyncio.wait_for(client.closed, PATIENCE_S / 2)
        # Whichever end notices first resets the other one, if that hears it.
        assert isinstance(reason.__cause__, TimeoutError | ConnectionResetError)


async def test_a_server_answers_pings() -> None:
    async with connected() as (client, _):
        for _ in range(3):
            client.ping()
        assert client.unanswered == 3
        await client.call("echo", deadline_s=PATIENCE_S)  # answered in order of arrival
        assert client.unanswered == 0


async def test_a_peer_that_is_frozen_leaves_pings_unanswered() -> None:
    """Its kernel goes on acknowledging what it never reads."""
    async with connected() as (client, peer):
        peer._transport.pause_reading()
        for _ in range(3):
            client.ping()
            await asyncio.sleep(0.01)
        assert client.unanswered == 3
        peer._transport.resume_reading()
        await client.call("echo", deadline_s=PATIENCE_S)
        assert client.unanswered == 0
