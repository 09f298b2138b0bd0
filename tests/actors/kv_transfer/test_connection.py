"""What a connection to another gang leaves behind when that gang is killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kv_ends import IN_FLIGHT, ended, pair
from torch.distributed import TCPStore

from csps.actors.comm.process_group import PeerLost
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.worker.kv_link import KvLinkEnd
from csps.models.network.spec import ModelSpec
from csps.protocols.gang.messages import ConnectKv

HOST = "127.0.0.1"
DEADLINE_S = 60.0
CONNECT = {"store_host": HOST, "store_port": 0, "prefill_ranks": 1, "decode_ranks": 1}


def connected(store: TCPStore, number: int, *, is_decode: bool) -> KvConnection:
    message = ConnectKv(epoch=f"epoch {number}", prefill_tp=1, decode_tp=1, **CONNECT)  # type: ignore[arg-type]
    return KvConnection(store, message, rank=0, is_decode=is_decode, host=HOST)


def prefill_rank(number: int, decode: Connection) -> None:
    """Connect, and be killed."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    decode.send(store.port)
    connection = connected(store, number, is_decode=False)
    decode.recv()
    assert not connection.closed
    os.kill(os.getpid(), signal.SIGKILL)


def threads_and_descriptors() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def lose_a_peer(number: int) -> None:
    """Connect to a rank in another process, which is killed, and close the connection."""
    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn").Process(
        target=prefill_rank, args=(number, theirs)
    )
    spawned.start()
    try:
        assert ours.poll(DEADLINE_S)
        deadline = timedelta(seconds=DEADLINE_S)
        store = TCPStore(HOST, ours.recv(), is_master=False, timeout=deadline)
        connection = connected(store, number, is_decode=True)
        ours.send("connected")
        with pytest.raises(PeerLost):
            connection.next_message(0)
        connection.close()
    finally:
        spawned.kill()
        spawned.join()
        spawned.close()
        ours.close()
        theirs.close()


def gloo_threads() -> int:
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum("gloo" in name.read_text() for name in names)


@pytest.mark.parametrize("prefills", [True, False])
def test_a_rank_that_leaves_keeps_no_thread_of_gloo(spec: ModelSpec, prefills: bool) -> None:
    """Without waiting for Python to look for circles."""
    gc.collect()
    before = gloo_threads()
    gc.disable()
    try:
        loop = SimpleNamespace(outgoing_transfers=SimpleNamespace(use=lambda sender: None))
        unused: Any = None
        link = KvLinkEnd(unused, unused, unused, cast(Any, loop), unused, unused)
        with pair(spec) as (connection, receiver):
            if prefills:
                link._sender = KvSender(
                    connection,
                    receiver.pool,
                    spec,
                    rank=0,
                    in_flight_bytes=IN_FLIGHT,
                    checked=0.0,
                    on_lost=lambda reason: None,
                    on_broken=lambda error: None,
                )
            else:
                link._receiver = receiver.end
            receiver.end.close()
            ended(receiver.end.threads)
        # What the test itself refers to, `link` alone has to keep.
        del connection, receiver
        link.leave()
        deadline = time.monotonic() + DEADLINE_S
        while gloo_threads() > before:
            assert time.monotonic() < deadline, f"{gloo_threads()} threads of {before}"
            time.sleep(0.01)
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_rank_keeps_no_thread_and_no_descriptor_of_gangs_that_were_killed() -> None:
    """A decode gang outlives many prefill gangs."""
    lose_a_peer(0)
    gc.collect()
    before = threads_and_descriptors()
    for number in (1, 2, 3):
        lose_a_peer(number)
    gc.collect()
    deadline = time.monotonic() + DEADLINE_S
    while any(now > then for now, then in zip(threads_and_descriptors(), before, strict=True)):
        assert time.monotonic() < deadline, f"{threads_and_descriptors()} of {before}"
        time.sleep(0.01)  # gloo's thread ends by itself
