"""Threads that wait for operations with peers, lent to one job after another.

Whoever starts a thread waits until it lives. Where ranks have fewer cores than they could use that
is until another one's turn is over, milliseconds in the middle of a layer, so that threads are
kept for the next job.

Exchanges between the ranks of a gang, point to point.

A sequence-parallel group is a subset of the gang formed per job by grouped point-to-point
operations, so changing the degree of parallelism creates no communicator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from queue import SimpleQueue

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from csps.actors.comm.process_group import (
    DataGroup,
    GroupMaker,
    LaunchOrder,
    Pending,
    close_gloo,
    gloo_group,
    with_peer,
)


class _Order(Enum):
    """What a thread is told beside what to wait for."""

    COME_BACK = auto()
    END = auto()


class WaitingThreads:
    """Of one rank's mesh. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WaitingThread] = []
        self._closed = False

    def lend(self) -> WaitingThread:
        """One that waits for nothing; to be given back (`WaitingThread.release`)."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return WaitingThread(self)

    def close(self) -> None:
        """End all of them, those that are lent when they come back."""
        with self._lock:
            self._closed = True
            for thread in self._idle:
                thread.end()
            self._idle.clear()

    def take_back(self, thread: WaitingThread) -> None:
        """What it was to wait for has ended."""
        with self._lock:
            if self._closed:
                thread.end()
            else:
                self._idle.append(thread)


class WaitingThread:
    """Waits for pending operations one after the other."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._threads = threads
        self._items: SimpleQueue[tuple[Pending, Future[int]] | _Order] = SimpleQueue()
        # A daemon: a peer that hangs must not keep a rank from ending.
        threading.Thread(target=self._run, name="waiting", daemon=True).start()

    def add(self, pending: Pending) -> Future[int]:
        """The time (Unix, ns) at which it has ended."""
        future: Future[int] = Future()
        self._items.put((pending, future))
        return future

    def release(self) -> None:
        """Others may have it when what was added has ended."""
        self._items.put(_Order.COME_BACK)

    def end(self) -> None:
        """Wait for nothing more."""
        self._items.put(_Order.END)

    def _run(self) -> None:
        while (item := self._items.get()) is not _Order.END:
            if item is _Order.COME_BACK:
                self._threads.take_back(self)
                continue
            pending, future = item
            try:
                pending.wait()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(time.time_ns())
            del item, pending, future  # an idle thread keeps nothing alive


_TAGS_OF_A_LANE = 64


class ControlTag(IntEnum):
    """Streams of control messages: what the hosts of two ranks tell each other."""

    DECODE_TOKEN = 10
    ROW_STATE = 11


class Tag(IntEnum):
    """Streams of data between two ranks; each is first in, first out, in its lane. NCCL knows no
    tags: there and in tests all of a pair's are one."""

    FIRST_EXCHANGE = 2
    SECOND_EXCHANGE = 3
    LAST_ROW_QUERY = 4
    LAST_ROW_PARTIAL = 5
    KV_MOVE = 6
    DECODE_QUERY = 7
    DECODE_PARTIAL = 8
    HISTORY = 14
    ROWS = 17
    RELAYED_ROWS = 18
    ROW_SUMS = 19
    IMPORTANCE = 20
    WEIGHTS = 21
    SUMS_TO_RELAY = 23
    STORED_ROWS = 24
    HISTORY_ANSWER = 25
    RING = 26


@dataclass(frozen=True)
class BegunExchange:
    """A group of sends and receives under way."""

    received: Pending
    sent: Pending
    """Done once the tensors sent may change. Empty on CUDA, where `received` stands for both."""


class Mesh:
    """One world of ranks as seen by one of them.

    Data goes through NCCL on CUDA and gloo otherwise; messages of one tag between two ranks match
    in order. Tensors must be contiguous; empty ones are not sent, which both sides decide alike
    because both know the shapes. What the hosts tell each other goes through a gloo group of its
    own on every device: in NCCL's one order, or behind a long message of data, it would wait for
    what it is to decide.

    Args:
        data_group: stands in for NCCL on another device; exchanges are then grouped as there.
        launches: shared by all groups of a device.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        world_size: int,
        device: str,
        host: str,
        data_group: GroupMaker | None = None,
        launches: LaunchOrder | None = None,
    ) -> None:
        self.rank = rank
        self._launches = launches or LaunchOrder()
        self._lane = 0
        self.world_size = world_size
        self.bytes_sent = [0] * world_size
        """By peer, since the mesh exists: read the difference."""
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self.waiting = WaitingThreads()
        """For those who want to know when an exchange ended."""
        self.device = torch.device(device)
        scoped = PrefixStore(name, store)
        self._control = gloo_group(PrefixStore("control", scoped), rank, world_size, host)
        self._data = DataGroup(
            PrefixStore("data", scoped),
            rank=rank,
            size=world_size,
            device=self.device,
            host=host,
            maker=data_group,
        )

    @with_peer()
    def send(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
        """Start sending a control message, on the host; it must not change before `wait`."""
        self._count(peer, words)
        return Pending([self._control.send([words], peer, tag)], [words], self._closed)

    @with_peer()
    def recv(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
        """Start receiving a control message into a contiguous tensor on the host."""
        return Pending([self._control.recv([words], peer, tag)], [words], self._closed)

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Inside, what is begun meets only what peers begin in the same lane: what interrupts a
        step has a lane of its own, because with gloo a step that stands still may owe others rows
        that it passes on later. Where exchanges are in order there are no lanes: what is begun
        before the interruption is the same at all ranks."""
        before, self._lane = self._lane, number
        try:
            yield
        finally:
            self._lane = before

    def _tag(self, tag: Tag) -> int:
        return self._lane * _TAGS_OF_A_LANE + tag

    @property
    def in_order(self) -> bool:
        """Exchanges then are over in the order of their calls, so that one may send what an earlier
        one receives, and waiting holds up the device's stream and not the host. Else each waits
        for nobody but its peers, and the host for it."""
        return self._data.in_order

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
    ) -> Pending:
        """Start a group of sends and receives, each a (peer, tensor); none may wait for another."""
        begun = self.start_exchange(sends, recvs, tag)
        return Pending.all((begun.received, begun.sent))

    def expect(self, recvs: Sequence[tuple[int, Tensor]], tag: Tag) -> Expected:
        """`exchange`, of which the receives are known before there is anything to send."""
        return Expected(self, recvs, tag)

    @with_peer()
    def start_exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
    ) -> BegunExchange:
        """`exchange` for those who use what has arrived before their own tensors are gone."""
        self._launches.check()
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        for peer, tensor in sends:
            self._count(peer, tensor)
        return self._grouped(sends, recvs) if self.in_order else self._single(sends, recvs, tag)

    def _count(self, peer: int, tensor: Tensor) -> None:
        # Of control messages as well, which any thread may send.
        with self._counting:
            self.bytes_sent[peer] += tensor.nbytes

    def _single(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: Tag
    ) -> BegunExchange:
        group, number = self._data.group, self._tag(tag)
        received = [group.recv([tensor], peer, number) for peer, tensor in recvs]
        sent = [group.send([tensor], peer, number) for peer, tensor in sends]
        return BegunExchange(
            received=Pending(received, [tensor for _, tensor in recvs], self._closed),
            sent=Pending(sent, [tensor for _, tensor in sends], self._closed),
        )

    def _grouped(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> BegunExchange:
        """NCCL would deadlock on ungrouped pairs: all of them go into one launch."""
        if not sends and not recvs:
            return BegunExchange(Pending([], []), Pending([], []))
        group = self._data.group
        group._start_coalescing()
        for peer, tensor in recvs:
            group.recv([tensor], peer, 0)
        for peer, tensor in sends:
            group.send([tensor], peer, 0)
        works = [group._end_coalescing()]
        tensors = [tensor for _, tensor in (*recvs, *sends)]
        return BegunExchange(
            received=Pending(works, tensors, self._closed, in_order=True), sent=Pending([], [])
        )

    def close(self) -> None:
        """Leave the world: pending operations fail, here and at peers that wait for this rank."""
        self._closed.set()
        close_gloo(self._control, self.rank, self.world_size)
        self._data.close()
        self.waiting.close()


class Expected:
    """An exchange whose receives come first, see `Mesh.expect`.

    With gloo they are begun at once: a sender whose peer has not said that it is ready waits for
    two trips more. Where exchanges are in order, receives are one group with what is sent.
    """

    def __init__(self, mesh: Mesh, recvs: Sequence[tuple[int, Tensor]], tag: Tag) -> None:
        self._mesh, self._recvs, self._tag = mesh, recvs, tag
        ahead = recvs and not mesh.in_order
        self._begun = mesh.exchange([], recvs, tag) if ahead else None

    def send(self, sends: Sequence[tuple[int, Tensor]]) -> Pending:
        """Begin to send as well; whoever waits, waits for all of the exchange."""
        if self._begun is None:
            return self._mesh.exchange(sends, self._recvs, self._tag)
        return Pending.all((self._begun, self._mesh.exchange(sends, [], self._tag)))
