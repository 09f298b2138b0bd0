"""Another implementation of MessagePack-RPC calls our server: pynvim's, which is synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pynvim.msgpack_rpc import tcp_session
from pynvim.msgpack_rpc.session import Session
from raw_rpc import proof

from csps.protocols.rpc.server import Peer, RpcServer
from csps.protocols.rpc.wire import SCHEMA_VERSION

SECRET = b"a cluster secret"
SECONDS = 60.0


async def add(payload: Any, peer: Peer) -> Any:
    await asyncio.sleep(0)
    return sum(payload["numbers"])


def count(upto: int, peer: Peer) -> str:
    for index in range(upto):
        peer.notify("token", {"index": index})
    return "counted"


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Our server, on a loop of its own in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = RpcServer({"add": add, "count": count}, secret=SECRET)
    try:
        yield asyncio.run_coroutine_threadsafe(server.start("127.0.0.1"), loop).result(SECONDS)
        asyncio.run_coroutine_threadsafe(server.close(0.1), loop).result(SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


class CallFailed(Exception):
    pass


@pytest.fixture
def session() -> Iterator[Session]:
    with serving() as address:
        # It introduces itself by a notification of neovim's before anything else.
        session = tcp_session(*address)
        session.error_wrapper = lambda error: CallFailed(error["code"], error["message"])
        try:
            yield session
        finally:
            session.close()


def authenticate(session: Session) -> None:
    nonce, name = b"p" * 32, "pynvim"
    hello = {"protocol_version": SCHEMA_VERSION, "client_nonce": nonce, "name": name}
    server_nonce = session.request("hello", hello)["server_nonce"]
    ours = proof(SECRET, b"client", SCHEMA_VERSION, name, nonce, server_nonce)
    theirs = proof(SECRET, b"server", SCHEMA_VERSION, name, nonce, server_nonce)
    assert session.request("authenticate", {"proof": ours})["proof"] == theirs


def test_calls_metadata_and_errors(session: Session) -> None:
    authenticate(session)
    assert session.request("add", {"numbers": [1, 2, 3]}) == 6
    assert session.request("add", {"numbers": []}, {"deadline_ms": 5000}) == 0
    with pytest.raises(CallFailed, match="unknown method 'ad'; did you mean 'add'"):
        session.request("ad")


def test_notifications(session: Session) -> None:
    authenticate(session)
    assert session.request("count", 100) == "counted"
    for index in range(100):
        message = session.next_message()
        assert (message.name, message.args) == ("token", [{"index": index}])


def test_is_refused_without_the_secret(session: Session) -> None:
    with pytest.raises(CallFailed, match="AuthenticationFailed"):
        session.request("add", {"numbers": [1]})
