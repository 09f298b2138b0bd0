"""Messages through shared memory: they are those that were sent, in order, and nobody waits for a
peer that is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from csps.actors.comm import shared_memory
from csps.actors.comm.process_group import PeerLost, Pending
from csps.actors.comm.rendezvous import StoreAddress, host_store, join_store
from csps.actors.comm.shared_memory import SharedMemory

T = TypeVar("T")
RING = 4096
SECRET = b"secret of this test"
SOON = timedelta(seconds=20)


def on_ranks(size: int, body: Callable[[int, SharedMemory], T]) -> list[T]:
    """Return the results of all ranks, each in a thread."""
    store = HashStore()

    def run(rank: int) -> T:
        memory = SharedMemory(store, rank=rank, size=size, ring_bytes=RING)
        try:
            return body(rank, memory)
        finally:
            ended.wait(SOON.total_seconds())
            memory.close()

    ended = threading.Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


Sent = list[tuple[int, int, int, int]]
"""Messages (sender, receiver, tag, bytes), in the order in which each rank sends its own."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, Sent]:
    size = draw(st.integers(2, 4))
    ranks = st.integers(0, size - 1)
    message = st.tuples(ranks, ranks, st.integers(0, 3), st.integers(1, RING // 4))
    sent = draw(st.lists(message.filter(lambda m: m[0] != m[1]), max_size=60))
    return size, sent


def content(number: int, length: int) -> Tensor:
    return torch.from_numpy(torch.arange(length).numpy() * 7 + number).to(torch.uint8)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(world=worlds(), seed=st.integers(0, 2**32))
def test_messages_arrive_in_the_order_of_their_tag(world: tuple[int, Sent], seed: int) -> None:
    """The memory is smaller than all messages, so that it goes round, and nobody may wait for its
    own sends before it has begun its receives."""
    size, sent = world

    def body(rank: int, memory: SharedMemory) -> None:
        random = Random(seed + rank)
        begun, waited = [], []
        mine = [(number, *m) for number, m in enumerate(sent) if rank in m[:2]]
        for number, sender, receiver, tag, length in mine:
            if sender == rank:
                begun.append((memory.send(content(number, length), receiver, tag), None, None))
            else:
                room = torch.zeros(length, dtype=torch.uint8)
                begun.append((memory.recv(room, sender, tag), room, content(number, length)))
        random.shuffle(begun)
        for message, room, expected in begun:
            message.wait(SOON)
            waited.append(room is None or torch.equal(room, expected))
        assert all(waited)

    on_ranks(size, body)


def test_messages_in_one_direction_need_no_answer() -> None:
    """A receiver that sends nothing says what it has taken, or the sender would wait for room."""
    count, length = 100, RING // 4

    def body(rank: int, memory: SharedMemory) -> list[int]:
        values = []
        for number in range(count):
            room = torch.full((length,), number, dtype=torch.uint8)
            message = memory.recv(room, 0, 1) if rank else memory.send(room, 1, 1)
            message.wait(SOON)
            values.append(int(room.sum()) // length)
        return values

    assert on_ranks(2, body)[1] == list(range(count))


def test_a_message_that_is_too_long_takes_another_way() -> None:
    def body(rank: int, memory: SharedMemory) -> list[bool]:
        sizes = RING // 4, RING // 4 + 1
        return [memory.carries(1 - rank, torch.empty(n, dtype=torch.uint8)) for n in sizes]

    assert on_ranks(2, body) == [[True, False]] * 2


def test_ranks_of_other_machines_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["one", "other", "one"])
    monkeypatch.setattr(shared_memory, "machine", lambda: next(names))
    word = torch.empty(1)

    def body(rank: int, memory: SharedMemory) -> int:
        return sum(memory.carries(peer, word) for peer in range(3))

    assert sorted(on_ranks(3, body)) == [0, 1, 1]


def test_a_platform_without_support_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "machine", lambda: "")
    word = torch.empty(1)
    assert on_ranks(2, lambda rank, memory: memory.carries(1 - rank, word)) == [False, False]


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    """Whoever finds the socket does not know the key, which only the store tells."""
    store, seen = HashStore(), threading.Event()
    joined: list[SharedMemory] = []

    def first() -> None:
        joined.append(SharedMemory(store, rank=0, size=2, ring_bytes=RING))

    thread = threading.Thread(target=first)
    thread.start()
    card = shared_memory._Card.of(store.get("0").decode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(card.address)
        stranger.settimeout(SOON.total_seconds())
        number = os.memfd_create("stranger")
        os.ftruncate(number, 2 * RING)
        hello = shared_memory._HELLO.pack(1, bytes(32))
        socket.send_fds(stranger, [hello], [number])
        os.close(number)
        second = threading.Thread(
            target=lambda: joined.append(SharedMemory(store, rank=1, size=2, ring_bytes=RING))
        )
        second.start()
        thread.join(SOON.total_seconds())
        second.join(SOON.total_seconds())
        assert stranger.recv(1) == b""
    assert len(joined) == 2
    for memory in joined:
        memory.close()
    assert not seen.is_set()


def _peer(pipe: Connection, port: int, sends: int) -> None:
    """Be rank 1, which sends some words and then does nothing."""
    torch.set_num_threads(1)
    store = join_store(StoreAddress("127.0.0.1", port), SECRET)
    memory = SharedMemory(PrefixStore("memory", store), rank=1, size=2)
    for _ in range(sends):
        memory.send(torch.ones(4), 0, 3).wait(SOON)
    pipe.send("ready")
    pipe.recv()


@contextmanager
def with_process(sends: int) -> Iterator[tuple[SharedMemory, int]]:
    """Yield the memory that this process shares with another, and its id."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    hosted = host_store("127.0.0.1", SECRET)
    process = spawn.Process(target=_peer, args=(theirs, hosted.address.port, sends), daemon=True)
    process.start()
    memory = SharedMemory(PrefixStore("memory", hosted.store), rank=0, size=2)
    try:
        assert ours.poll(SOON.total_seconds())
        ours.recv()
        assert process.pid is not None
        yield memory, process.pid
    finally:
        memory.close()
        process.kill()
        process.join(SOON.total_seconds())
        hosted.close()


def test_a_killed_peer_is_noticed_at_once_and_leaves_nothing() -> None:
    before = set(Path("/dev/shm").iterdir())
    with with_process(sends=1) as (memory, pid):
        message = memory.recv(torch.empty(4), 1, 7)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1"):
            Pending([message], []).wait(SOON)
        assert time.monotonic() - begin < 2.0
        arrived = torch.zeros(4)
        memory.recv(arrived, 1, 3).wait(SOON)  # sent before
        assert arrived.tolist() == [1.0] * 4
        with pytest.raises(RuntimeError, match="rank 1"):
            memory.send(torch.ones(4), 1, 7)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_frozen_peer_is_waited_for_until_the_deadline() -> None:
    with with_process(sends=0) as (memory, pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            message = memory.recv(torch.empty(4), 1, 7)
            with pytest.raises(PeerLost, match=r"no exchange for 0\.2 s"):
                Pending([message], []).wait(timedelta(seconds=0.2))
            for _ in range(5):  # its memory is full
                last = memory.send(torch.ones(shared_memory.RING_BYTES // 16), 1, 8)
            with pytest.raises(PeerLost, match=r"no exchange for 0\.2 s"):
                Pending([last], []).wait(timedelta(seconds=0.2))
        finally:
            os.kill(pid, signal.SIGCONT)


def test_closing_wakes_whoever_waits_and_gives_everything_back() -> None:
    files = len(os.listdir("/proc/self/fd"))
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(
            lambda rank: SharedMemory(store, rank=rank, size=2, ring_bytes=RING), range(2)
        )
        waiting = [
            threads.submit(memory.recv(torch.empty(4), 1 - rank, 1).wait, SOON)
            for rank, memory in enumerate((first, second))
        ]
        first.close()
        for future in waiting:
            assert isinstance(future.exception(SOON.total_seconds()), RuntimeError)
        second.close()
        first.close()
    assert len(os.listdir("/proc/self/fd")) == files
