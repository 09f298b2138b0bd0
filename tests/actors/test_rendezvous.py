"""The rendezvous store and the groups that form over it: strangers take no part."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from csps.actors.comm import process_group
from csps.actors.comm.process_group import close_gloo, gloo_group
from csps.actors.comm.rendezvous import (
    HostedStore,
    RendezvousStore,
    StoreAddress,
    host_store,
    join_store,
)
from csps.protocols.core.errors import AuthenticationFailed, DeadlineExceeded, FaultError

SECRET = b"of the cluster"
SOON = timedelta(seconds=0.2)


@pytest.fixture
def hosted() -> Iterator[HostedStore]:
    hosted = host_store("127.0.0.1", SECRET)
    yield hosted
    hosted.close()


@pytest.fixture
def joined(hosted: HostedStore) -> Iterator[RendezvousStore]:
    joined = join_store(hosted.address, SECRET)
    yield joined
    joined.close()


def test_values_of_one_rank_are_known_to_the_others(
    hosted: HostedStore, joined: RendezvousStore
) -> None:
    joined.set("key", "value")
    assert hosted.store.get("key") == b"value"
    assert joined.check(["key"])
    assert not joined.check(["key", "other"])
    assert [joined.add("count", 2), hosted.store.add("count", 3)] == [2, 5]
    binary = bytes(range(256))
    hosted.store.set("binary", binary)
    assert joined.get("binary") == binary


def test_a_value_is_waited_for(hosted: HostedStore, joined: RendezvousStore) -> None:
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(joined.get, "late")
        both = threads.submit(joined.wait, ["late", "later"])
        hosted.store.set("late", "value")
        assert waiting.result(30) == b"value"
        hosted.store.set("later", "value")
        both.result(30)
    with pytest.raises(DeadlineExceeded):
        joined.wait(["never"], SOON)


def test_a_store_that_ends_wakes_who_waits(hosted: HostedStore, joined: RendezvousStore) -> None:
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(joined.get, "never")
        joined.set("key", "value")
        hosted.close()
        with pytest.raises(FaultError):
            waiting.result(30)
    assert not joined.check(["key"])
    hosted.close()
    joined.close()
    assert not joined.check(["key"])


def test_a_store_listens_on_its_host_only(hosted: HostedStore) -> None:
    assert bound_addresses(hosted.address.port) == {"0100007F"}  # 127.0.0.1


def bound_addresses(port: int) -> set[str]:
    """Return the addresses, in hexadecimal, on which a local port listens, by the kernel's own
    list."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                address, bound = line.split()[1].rsplit(":", 1)
                if int(bound, 16) == port and line.split()[3] == "0A":
                    found.add(address)
    return found


# --- strangers -------------------------------------------------------------------------------


def test_a_stranger_cannot_join(hosted: HostedStore) -> None:
    with pytest.raises(AuthenticationFailed):
        join_store(hosted.address, b"guessed")


def test_a_stranger_cannot_read_or_write_as_torch_does(hosted: HostedStore) -> None:
    """Regression: torch's own store let everyone in."""
    hosted.store.set("key", "value")

    def read() -> bytes:
        port, no = hosted.address.port, False
        stranger = TCPStore("127.0.0.1", port, is_master=no, wait_for_workers=no, timeout=SOON)
        return stranger.get("key")

    with pytest.raises(RuntimeError):
        read()
    assert hosted.store.get("key") == b"value"


def test_a_stranger_that_serves_in_the_place_of_rank_0_learns_nothing() -> None:
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                received.append(data)
                connection.sendall(b"\x94\x01\x01\xc0\xc0")  # an answer without a proof

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(RuntimeError):
        join_store(StoreAddress("127.0.0.1", listener.getsockname()[1]), SECRET)
    thread.join(30)
    listener.close()
    assert SECRET not in b"".join(received)


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Return what each one returns, or its error."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        running = [threads.submit(body) for body in bodies]
        return [done.exception(60) or done.result() for done in running]


def test_a_group_forms_over_the_store(hosted: HostedStore) -> None:
    def join(rank: int) -> None:
        store = hosted.store if rank == 0 else join_store(hosted.address, SECRET)
        group = gloo_group(PrefixStore("group", store), rank, 3, "127.0.0.1")
        if rank:
            store.close()  # a group that has formed does not need it
        total = torch.ones(1)
        group.allreduce([total]).wait()
        assert total.item() == 3
        close_gloo(group, rank, 3)

    assert in_threads(*(lambda rank=rank: join(rank) for rank in range(3))) == [None] * 3  # type: ignore[misc]


def test_a_stranger_connected_as_a_peer_is_found() -> None:
    """It has a group's addresses, but not the key that lies in the store."""
    store = HashStore()

    def prove(group: Any, rank: int, size: int, key: bytes) -> None:
        known = key if rank == 0 else hashlib.sha256(b"guessed").digest()
        _prove(group, rank, size, known)

    _prove = process_group._prove
    with patch.object(process_group, "_prove", prove):
        errors = in_threads(
            lambda: gloo_group(store, 0, 2, "127.0.0.1"),
            lambda: gloo_group(store, 1, 2, "127.0.0.1"),
        )
    assert isinstance(errors[0], AuthenticationFailed)
    assert "rank 1" in str(errors[0])
    assert isinstance(errors[1], AuthenticationFailed)


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """A stranger that repeats what it receives proves nothing."""
    store = HashStore()

    def prove(group: Any, rank: int, size: int, key: bytes) -> None:
        if rank == 0:
            return _prove(group, rank, size, key)
        for _ in range(2):
            words = torch.empty(process_group._PROOF_BYTES, dtype=torch.uint8)
            group.recv([words], 0, process_group._PROOF_TAG).wait()
            group.send([words], 0, process_group._PROOF_TAG).wait()
        return None

    _prove = process_group._prove
    with patch.object(process_group, "_prove", prove):
        errors = in_threads(
            lambda: gloo_group(store, 0, 2, "127.0.0.1"),
            lambda: gloo_group(store, 1, 2, "127.0.0.1"),
        )
    assert isinstance(errors[0], AuthenticationFailed)
