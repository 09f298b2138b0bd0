"""Exchanges between the ranks of a gang, point to point, and threads that wait for their end.

A sequence-parallel group is a subset of the gang, formed for each step by grouped point-to-point
operations. So changing the degree of parallelism creates no communicator.
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

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from csps.actors.comm.process_group import (
    DataGroup,
    GroupMaker,
    LaunchOrder,
    Operation,
    Pending,
    close_gloo,
    gloo_group,
    indexed_device,
    with_peer,
)
from csps.actors.comm.shared_memory import SharedMemory

_TAGS_OF_A_LANE = 64


class ControlTag(IntEnum):
    """Channels of control messages between the hosts of two ranks."""

    DECODE_TOKEN = 10
    ROW_STATE = 11


class Tag(IntEnum):
    """Channels of data between two ranks; each is first in, first out, in its lane. NCCL has no
    tags: there, and in tests, all data of a pair of ranks is one channel."""

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
    WINDOW = 27


_WAITED_AT_ONCE = frozenset(
    {
        Tag.LAST_ROW_QUERY,
        Tag.LAST_ROW_PARTIAL,
        Tag.DECODE_QUERY,
        Tag.DECODE_PARTIAL,
        Tag.STORED_ROWS,
    }
)
"""Exchanges that the computing thread waits for itself, a few microseconds apart. The others go on
in gloo's threads while it computes."""


@dataclass(frozen=True)
class BegunExchange:
    """A group of sends and receives under way."""

    received: Pending
    sent: Pending
    """Operation that ends when the tensors sent may change. Empty on CUDA, where `received` stands
    for both."""


class Mesh:
    """One world of ranks as seen by one of them.

    Data goes through NCCL on CUDA and through gloo otherwise, or, between ranks of one machine,
    through shared memory if it is waited for at once. Messages of one tag between two ranks match
    in order. Tensors must be contiguous. Empty ones are not sent; both sides know the shapes
    and decide alike. Control messages go through a gloo group of their own on every device: in
    NCCL's one order, or behind a long message of data, they would wait for what they are to decide.

    Args:
        data_group: stands in for NCCL on another device; exchanges are then grouped as with NCCL.
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
        """Bytes sent by peer, since the mesh exists: read the difference."""
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self.waiting = WaitingThreads()
        """Threads for callers that need the time at which an exchange ended."""
        self.device = indexed_device(device)
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
        self._memory = None
        if not self._data.in_order:
            self._memory = SharedMemory(PrefixStore("memory", scoped), rank=rank, size=world_size)

    @with_peer()
    def send(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
        """Start to send a control message from the host; it must not change before `wait`."""
        self._count(peer, words)
        return Pending([self._control.send([words], peer, tag)], [words], self._closed)

    @with_peer()
    def recv(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
        """Start to receive a control message into a contiguous tensor on the host."""
        return Pending([self._control.recv([words], peer, tag)], [words], self._closed)

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Match exchanges begun inside only with those that peers begin in the same lane.

        Whatever preempts a step has a lane of its own: with gloo, a paused step may owe others rows
        that it passes on later. Where exchanges are in order there are no lanes: all ranks begin
        the same exchanges before the preemption.
        """
        before, self._lane = self._lane, number
        try:
            yield
        finally:
            self._lane = before

    def _tag(self, tag: Tag) -> int:
        return self._lane * _TAGS_OF_A_LANE + tag

    @property
    def in_order(self) -> bool:
        """Return whether exchanges end in the order of their calls. Then one may send what an
        earlier one receives, and waiting blocks the device's stream, not the host. Otherwise each
        exchange waits for its peers only, and the host waits for it."""
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
        """Start an `exchange` whose receives are known before there is anything to send."""
        return Expected(self, recvs, tag)

    @with_peer()
    def start_exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
    ) -> BegunExchange:
        """Start an `exchange` for callers that use what has arrived before their own tensors are
        sent."""
        self._launches.check()
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        for peer, tensor in sends:
            self._count(peer, tensor)
        return self._grouped(sends, recvs) if self.in_order else self._single(sends, recvs, tag)

    def _count(self, peer: int, tensor: Tensor) -> None:
        # The lock is for control messages, which any thread may send.
        with self._counting:
            self.bytes_sent[peer] += tensor.nbytes

    def _single(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: Tag
    ) -> BegunExchange:
        received = [self._recv(tensor, peer, tag) for peer, tensor in recvs]
        sent = [self._send(tensor, peer, tag) for peer, tensor in sends]
        return BegunExchange(
            received=Pending(received, [tensor for _, tensor in recvs], self._closed),
            sent=Pending(sent, [tensor for _, tensor in sends], self._closed),
        )

    def _recv(self, tensor: Tensor, peer: int, tag: Tag) -> Operation:
        if (memory := self._memory_for(tensor, peer, tag)) is not None:
            return memory.recv(tensor, peer, self._tag(tag))
        return self._data.group.recv([tensor], peer, self._tag(tag))

    def _send(self, tensor: Tensor, peer: int, tag: Tag) -> Operation:
        if (memory := self._memory_for(tensor, peer, tag)) is not None:
            return memory.send(tensor, peer, self._tag(tag))
        return self._data.group.send([tensor], peer, self._tag(tag))

    def _memory_for(self, tensor: Tensor, peer: int, tag: Tag) -> SharedMemory | None:
        """Return the memory through which a message goes. Sender and receiver decide alike."""
        memory = self._memory
        if memory is None or tag not in _WAITED_AT_ONCE or not memory.carries(peer, tensor):
            return None
        return memory

    def _grouped(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> BegunExchange:
        """Start all operations in one launch: NCCL would deadlock on ungrouped pairs."""
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
        if self._memory is not None:
            self._memory.close()
        close_gloo(self._control, self.rank, self.world_size)
        self._data.close()
        self.waiting.close()


class Expected:
    """An exchange whose receives come first, see `Mesh.expect`.

    With gloo the receives begin at once: a sender whose peer is not ready waits for two more round
    trips. Where exchanges are in order, receives are one group with the sends.
    """

    def __init__(self, mesh: Mesh, recvs: Sequence[tuple[int, Tensor]], tag: Tag) -> None:
        self._mesh, self._recvs, self._tag = mesh, recvs, tag
        ahead = recvs and not mesh.in_order
        self._begun = mesh.exchange([], recvs, tag) if ahead else None

    def send(self, sends: Sequence[tuple[int, Tensor]]) -> Pending:
        """Begin the sends; the returned operation ends with the whole exchange."""
        if self._begun is None:
            return self._mesh.exchange(sends, self._recvs, self._tag)
        return Pending.all((self._begun, self._mesh.exchange(sends, [], self._tag)))


class _Order(Enum):
    """An order to a waiting thread."""

    TAKE_BACK = auto()
    END = auto()


class WaitingThreads:
    """Threads of one rank's mesh that wait for operations. Any thread may call any method.

    Starting a thread waits until it runs. With fewer cores than runnable threads this takes
    milliseconds in the middle of a layer, so threads are kept and lent to one step after another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WaitingThread] = []
        self._closed = False

    def lend(self) -> WaitingThread:
        """Return an idle thread; `WaitingThread.release` gives it back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return WaitingThread(self)

    def close(self) -> None:
        """End all threads; lent ones end when they are released."""
        with self._lock:
            self._closed = True
            for thread in self._idle:
                thread.end()
            self._idle.clear()

    def take_back(self, thread: WaitingThread) -> None:
        """Accept a thread whose operations have ended."""
        with self._lock:
            if self._closed:
                thread.end()
            else:
                self._idle.append(thread)


class WaitingThread:
    """A thread that waits for pending operations, one after the other."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._threads = threads
        self._entries: SimpleQueue[tuple[Pending, Future[int]] | _Order] = SimpleQueue()
        # A daemon, because a peer that hangs must not keep a rank from ending.
        threading.Thread(target=self._run, name="waiting", daemon=True).start()

    def add(self, pending: Pending) -> Future[int]:
        """Return a future of the time (Unix, ns) at which the operation ends."""
        future: Future[int] = Future()
        self._entries.put((pending, future))
        return future

    def release(self) -> None:
        """Give the thread back when all added operations have ended."""
        self._entries.put(_Order.TAKE_BACK)

    def end(self) -> None:
        """End the thread."""
        self._entries.put(_Order.END)

    def _run(self) -> None:
        while (entry := self._entries.get()) is not _Order.END:
            if entry is _Order.TAKE_BACK:
                self._threads.take_back(self)
                continue
            pending, future = entry
            try:
                pending.wait()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(time.time_ns())
            del entry, pending, future  # an idle thread keeps no tensors alive
