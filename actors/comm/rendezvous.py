"""The rendezvous store, through which the ranks of a gang learn each other's addresses.

Rank 0 serves it for as long as it lives, because ranks of another gang join it later for KV. It is
a torch store, so that torch's process groups find their peers through it. torch's own `TCPStore`
lets everyone who reaches its port list, read and change all keys, and so take the place of a rank.
This one answers over MessagePack-RPC, whose handshake proves that both sides know the cluster
secret (`protocols.rpc.wire`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from csps.protocols.core.errors import ConnectionLost, DeadlineExceeded, FaultError
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import pack, unpack
from csps.protocols.rpc.server import Peer, RpcServer
from csps.protocols.rpc.tls import Tls

T = TypeVar("T")

JOIN_DEADLINE = timedelta(seconds=60)
"""Time limit for every rank of a group to arrive."""
CALL_S = 10.0
"""Seconds for the store to answer a call that waits for nobody, and to start and to end."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of a gang's rendezvous store."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    key: str
    value: bytes


@dataclass(frozen=True, kw_only=True)
class Keys:
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Addition:
    key: str
    amount: int


class _LoopThread:
    """An event loop in a thread of its own: torch calls a store from threads that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rendezvous", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine and return its result."""
        if not self.alive:
            work.close()
            raise ConnectionLost("the rendezvous store was left")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(seconds + CALL_S)  # the coroutine has a deadline of its own
        except TimeoutError:
            running.cancel()
            raise DeadlineExceeded("rendezvous", seconds) from None

    @property
    def alive(self) -> bool:
        """Return whether the thread has not been ended."""
        return not self._loop.is_closed()

    def end(self) -> None:
        """End the thread. Idempotent."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_S)
            self._loop.close()


class _Table:
    """Keys and values, on the loop of their server."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def set(self, payload: Any, peer: Peer) -> None:
        entry = unpack(Entry, payload)
        self._put(entry.key, entry.value)

    def add(self, payload: Any, peer: Peer) -> int:
        addition = unpack(Addition, payload)
        total = int(self._values.get(addition.key, b"0")) + addition.amount
        self._put(addition.key, str(total).encode())
        return total

    def check(self, payload: Any, peer: Peer) -> bool:
        return self._has(unpack(Keys, payload))

    async def get(self, payload: Any, peer: Peer) -> list[bytes]:
        """Return the values of keys as soon as all of them are there."""
        keys = unpack(Keys, payload)
        while not self._has(keys):
            await self._changed.wait()
        return [self._values[key] for key in keys.keys]

    def _has(self, keys: Keys) -> bool:
        return all(key in self._values for key in keys.keys)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()


class RendezvousStore(Store):
    """A connection to a store, for torch. Any thread may call it."""

    def __init__(self, thread: _LoopThread, client: RpcClient) -> None:
        super().__init__()
        self._thread, self._client = thread, client

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call("set", Entry(key=key, value=data))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it."""
        values: list[bytes] = self._call("get", Keys(keys=(key,)), JOIN_DEADLINE)
        return values[0]

    def wait(self, keys: Sequence[str], timeout: timedelta = JOIN_DEADLINE) -> None:
        """Wait for keys."""
        self._call("get", Keys(keys=tuple(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; False as well if rank 0 is gone."""
        # NCCL asks on a thread of its own, which an exception would end, and the process with it.
        try:
            return bool(self._call("check", Keys(keys=tuple(keys))))
        except FaultError:
            return False

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._call("add", Addition(key=key, amount=amount)))

    def close(self) -> None:
        """Disconnect. Groups that were formed do not need the store any more. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._client.close(), CALL_S)
            self._thread.end()

    def _call(
        self, method: str, message: object, timeout: timedelta = timedelta(seconds=CALL_S)
    ) -> Any:
        seconds = timeout.total_seconds()
        call = self._client.call(method, pack(message), deadline_s=seconds)
        return self._thread.run(call, seconds)


class HostedStore:
    """A store that this process serves until `close`."""

    def __init__(self, host: str, secret: bytes, tls: Tls | None) -> None:
        self._thread = _LoopThread()
        self._server = self._thread.run(self._serve(host, secret, tls), CALL_S)
        self.store = join_store(self.address, secret, tls)

    async def _serve(self, host: str, secret: bytes, tls: Tls | None) -> RpcServer:
        table = _Table()
        handlers = {"set": table.set, "get": table.get, "check": table.check, "add": table.add}
        server = RpcServer(handlers, secret=secret, tls=tls)
        self.address = StoreAddress(host, (await server.start(host))[1])
        return server

    def close(self) -> None:
        """End the store: waiting for a key fails. Idempotent."""
        self.store.close()
        if self._thread.alive:
            self._thread.run(self._server.close(0.0), CALL_S)
            self._thread.end()


def host_store(host: str, secret: bytes, tls: Tls | None = None) -> HostedStore:
    """Serve a rendezvous store on a free port of `host`, and on no other address.

    Args:
        secret: the cluster secret.
        tls: encrypts its connections, if given.
    """
    return HostedStore(host, secret, tls)


def join_store(address: StoreAddress, secret: bytes, tls: Tls | None = None) -> RendezvousStore:
    """Connect to a store that another rank serves.

    Raises:
        FaultError: it cannot be reached in time, or does not know the secret.
    """
    thread = _LoopThread()
    seconds = JOIN_DEADLINE.total_seconds()
    connecting = RpcClient.connect(
        address.host, address.port, secret=secret, name="rank", deadline_s=seconds, tls=tls
    )
    try:
        return RendezvousStore(thread, thread.run(connecting, seconds))
    except BaseException:
        thread.end()
        raise
