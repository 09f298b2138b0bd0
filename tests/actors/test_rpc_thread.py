"""Blocking work of a rank's RPC thread whose caller may be gone when it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from csps.actors.worker.router_connection import RpcThread
from csps.protocols.core.errors import DeadlineExceeded
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.server import Peer

SECRET = b"only for tests"
WAIT_S = 60.0


class Joining:
    """A group that is joined in a thread, when a test lets it be."""

    def __init__(self) -> None:
        self.go_on, self.discarded = threading.Event(), threading.Event()
        self.closed: list[tuple[str, str]] = []
        """What was discarded, and the thread that did it."""

    def join(self) -> str:
        assert self.go_on.wait(WAIT_S)
        return "a joined group"

    def close(self, group: str) -> None:
        self.closed.append((group, threading.current_thread().name))
        self.discarded.set()


@asynccontextmanager
async def serving(joining: Joining) -> AsyncIterator[RpcClient]:
    """Yield a client whose call `connect` joins the group."""
    rpc = RpcThread(secret=SECRET, on_disconnect=lambda peer: None)

    async def connect(payload: Any, peer: Peer) -> str:
        return await rpc.in_thread("joins", joining.join, joining.close)

    host, port = rpc.start("127.0.0.1", {"connect": connect, "echo": lambda payload, _: payload})
    client = await RpcClient.connect(host, port, secret=SECRET, name="test", deadline_s=WAIT_S)
    try:
        yield client
    finally:
        await client.close()
        await asyncio.to_thread(rpc.close)


async def test_what_is_joined_for_a_caller_that_waits_is_its_own() -> None:
    joining = Joining()
    async with serving(joining) as client:
        joining.go_on.set()
        assert await client.call("connect", deadline_s=WAIT_S) == "a joined group"
    assert not joining.closed


@pytest.mark.parametrize("leaves", ["by its deadline", "by disconnecting"])
async def test_what_is_joined_after_a_call_was_cancelled_is_closed(leaves: str) -> None:
    """Not on the RPC loop, where closing a group would delay pings."""
    joining = Joining()
    async with serving(joining) as client:
        if leaves == "by its deadline":
            with pytest.raises(DeadlineExceeded):
                await client.call("connect", deadline_s=0.05)
        else:
            call = asyncio.ensure_future(client.call("connect", deadline_s=WAIT_S))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(Exception, match="closed"):
                await call
        joining.go_on.set()
        assert await asyncio.to_thread(joining.discarded.wait, WAIT_S)
    assert joining.closed == [("a joined group", "joins")]
