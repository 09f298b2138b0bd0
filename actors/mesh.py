"""Process groups of one rank: point-to-point over the gang, all-reduce inside an instance.

A sequence-parallel group is a subset of the gang formed per job by grouped point-to-point
operations, so changing the degree of parallelism creates no communicator. The groups are made
directly from a store instead of through `torch.distributed.init_process_group`, because a rank
lives in several worlds at once (its gang, the KV connection to the other role) and must leave one
without touching the others.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

from csps.actors.launch_order import LaunchOrder

_log = logging.getLogger(__name__)

JOIN_DEADLINE = timedelta(seconds=60)
"""For every rank of a group to arrive."""
PEER_DEADLINE = timedelta(minutes=30)
"""For a peer to come to an exchange: longer than all that its log may have before it. A peer that
died is noticed at once, so this only ends true hangs."""
DEVICE_DEADLINE = timedelta(minutes=2)
"""For an exchange between devices, from the call on: NCCL's watchdog ends the process after it.
Above the longest layer, and what may overtake it."""
ABORT_DEADLINE = timedelta(seconds=20)
"""For NCCL to give up what is under way. It may hang in this itself, and then the process ends."""
IDLE = timedelta(days=365)
"""For loops that wait for work; they end when the peer dies or the group is closed."""
LAUNCH_ORDER_SINCE = (2, 26)
"""NCCL's first version that keeps one order over all communicators of a device."""
ABORT_HANGS = 70
"""Exit status of a process that ends so."""
_TAGS_OF_A_LANE = 64
_CLOSE_PROBE = timedelta(milliseconds=1)
"""For a message that never comes, whose timeout closes a gloo group."""


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
    CLOSE_PROBE = 16
    ROWS = 17
    RELAYED_ROWS = 18
    ROW_SUMS = 19
    IMPORTANCE = 20
    WEIGHTS = 21
    SUMS_TO_RELAY = 23
    KEPT_ROWS = 24
    HISTORY_ANSWER = 25
    RING = 26


@dataclass(frozen=True)
class StoreAddress:
    """Where a gang's rendezvous store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class HostedStore:
    """A rendezvous store served by this process for as long as the object lives."""

    address: StoreAddress
    store: Store


def host_store(host: str) -> HostedStore:
    """Serve a rendezvous store on a free port of `host`, and on no other address.

    The socket is ours because a store that makes its own listens on all interfaces, and, where
    that is IPv6 with mapped addresses, asks the DNS for the name of everyone who connects.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_DEADLINE,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )
    return HostedStore(StoreAddress(host, port), store)


def join_store(address: StoreAddress) -> Store:
    """Connect to a store that another rank serves."""
    return TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=JOIN_DEADLINE
    )


class PeerLost(RuntimeError):
    """An operation with a peer failed: it died, was too late, or the group was closed. Whatever
    else goes wrong around it, memory that runs out for instance, is no word about the peer."""


@contextmanager
def with_peer() -> Iterator[None]:
    """Around operations with peers: what torch says of them becomes PeerLost."""
    try:
        yield
    except RuntimeError as exc:
        raise PeerLost(str(exc)) from exc


class Group(Protocol):
    """What is used of torch's gloo and NCCL groups; its stubs leave these methods out."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...

    def eager_connect_single_device(self, device: torch.device, /) -> None: ...


class Pending:
    """Operations under way; keeps their tensors alive until `wait`.

    Must be waited for: gloo never sends a message whose handle is dropped while it waits for the
    receiver.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[Tensor],
        world: threading.Event | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """
        Args:
            in_order: see `Mesh.in_order`.
        """
        self._works = [(work, in_order) for work in works]
        self._tensors = list(tensors)
        self._closed = {world} if world is not None else set()
        """Set when the world of one of the operations is closed."""

    @classmethod
    def all(cls, operations: Iterable[Pending]) -> Pending:
        """Several operations as one."""
        whole = cls([], [])
        for operation in operations:
            whole._works += operation._works
            whole._tensors += operation._tensors
            whole._closed |= operation._closed
        return whole

    def wait(self, deadline: timedelta = PEER_DEADLINE) -> None:
        """Block until all are done; raises PeerLost when a peer died or is too late.

        Where exchanges are in order the current stream waits and not the host, and the deadline is
        the watchdog's: a wait with a deadline would poll on the host.
        """
        self.hold_up(deadline)
        self._works.clear()
        self._tensors.clear()

    def hold_up(self, deadline: timedelta = PEER_DEADLINE) -> None:
        """`wait`, but another stream may wait for the same as well, and the tensors stay: only the
        stream that they belong to may give them back."""
        with with_peer():
            for work, in_order in self._works:
                if in_order:
                    work.wait()
                else:
                    work.wait(deadline)
            if any(world.is_set() for world in self._closed):
                # What was under way in an aborted NCCL group ends like a success, with garbage.
                raise RuntimeError("the group was closed")


@dataclass(frozen=True)
class BegunExchange:
    """A group of sends and receives under way."""

    received: Pending
    sent: Pending
    """Done once the tensors sent may change. Empty on CUDA, where `received` stands for both."""


GroupMaker = Callable[[Store, int, int, str], Group]
"""(store, rank, size, host) -> a group that all ranks of the store have joined."""


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
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self._in_groups = self._cuda or data_group is not None
        scoped = PrefixStore(name, store)
        self._control = gloo_group(PrefixStore("control", scoped), rank, world_size, host)
        make = data_group or (_nccl if self._cuda else gloo_group)
        self._data = make(PrefixStore("data", scoped), rank, world_size, host)
        if self._in_groups and world_size > 1:
            # NCCL makes a communicator in its first call, in which all ranks must take part: the
            # first exchange of a part of the gang would wait for the others forever.
            self._data.eager_connect_single_device(self.device)

    @with_peer()
    def tell(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
        """Start sending a control message, on the host; it must not change before `wait`."""
        self._count(peer, words)
        return Pending([self._control.send([words], peer, tag)], [words], self._closed)

    @with_peer()
    def hear(self, words: Tensor, peer: int, tag: ControlTag) -> Pending:
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
        return self._in_groups

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
        return self._grouped(sends, recvs) if self._in_groups else self._single(sends, recvs, tag)

    def _count(self, peer: int, tensor: Tensor) -> None:
        # Of control messages as well, which any thread may send.
        with self._counting:
            self.bytes_sent[peer] += tensor.nbytes

    def _single(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: Tag
    ) -> BegunExchange:
        number = self._tag(tag)
        received = [self._data.recv([tensor], peer, number) for peer, tensor in recvs]
        sent = [self._data.send([tensor], peer, number) for peer, tensor in sends]
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
        self._data._start_coalescing()
        for peer, tensor in recvs:
            self._data.recv([tensor], peer, 0)
        for peer, tensor in sends:
            self._data.send([tensor], peer, 0)
        works = [self._data._end_coalescing()]
        tensors = [tensor for _, tensor in (*recvs, *sends)]
        return BegunExchange(
            received=Pending(works, tensors, self._closed, in_order=True), sent=Pending([], [])
        )

    def close(self) -> None:
        """Leave the world: pending operations fail, here and at peers that wait for this rank."""
        self._closed.set()
        close_gloo(self._control, self.rank, self.world_size)
        if self._in_groups:
            _abort(self._data)
        else:
            close_gloo(self._data, self.rank, self.world_size)


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


class InstanceGroup:
    """The tensor-parallel ranks of one instance, which sum partial results."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        size: int,
        device: str,
        host: str,
        data_group: GroupMaker | None = None,
        launches: LaunchOrder | None = None,
    ) -> None:
        """
        Args:
            data_group, launches: as a mesh's.
        """
        self._launches = launches or LaunchOrder()
        self.rank, self.size = rank, size
        cuda = torch.device(device).type == "cuda"
        self._in_order = cuda or data_group is not None
        self._closed = threading.Event()
        self._group: Group | None = None
        if size > 1:
            make = data_group or (_nccl if cuda else gloo_group)
            self._group = make(PrefixStore(name, store), rank, size, host)
            if self._in_order:
                self._group.eager_connect_single_device(torch.device(device))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the instance, in place."""
        self._launches.check()
        if self._group is not None and tensor.numel():
            with with_peer():
                work = self._group.allreduce([tensor])
            Pending([work], [tensor], self._closed, in_order=self._in_order).wait()
        return tensor

    def close(self) -> None:
        """Leave the group: pending sums fail, here and at the other ranks."""
        if self._group is None:
            return
        self._closed.set()
        if self._in_order:
            _abort(self._group)
        else:
            close_gloo(self._group, self.rank, self.size)


def gloo_group(store: Store, rank: int, size: int, host: str) -> Group:
    """Join a gloo group that listens on `host`, and wait until all ranks have."""
    group_of: Any = dist.ProcessGroupGloo  # the stubs lag behind its options
    options = group_of._Options()
    options._devices = [group_of.create_device(hostname=host)]
    options._timeout = JOIN_DEADLINE
    group = group_of(store, rank, size, options)
    # Its collectives take their deadline from the group, not from `wait`.
    group._set_default_timeout(PEER_DEADLINE)
    return cast(Group, group)


def _nccl(store: Store, rank: int, size: int, host: str) -> Group:
    # Gang and instance share a device: their kernels run in the order of the host's calls, which
    # is the same on every rank (`LaunchOrder`). Without this each stream has an order of its own,
    # and two ranks that run the two communicators' kernels in different ones wait for each other.
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < LAUNCH_ORDER_SINCE:
        wanted = ".".join(map(str, LAUNCH_ORDER_SINCE))
        raise RuntimeError(f"NCCL {'.'.join(map(str, version))} is older than {wanted}")
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = DEVICE_DEADLINE
    return cast(Group, dist.ProcessGroupNCCL(store, rank, size, options))


def _abort(group: Group) -> None:
    """End what is under way on the device, or this process."""
    aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_DEADLINE.total_seconds())
    if aborting.is_alive():
        _log.critical("a group's abort took more than %s: the process ends", ABORT_DEADLINE)
        os._exit(ABORT_HANGS)


def close_gloo(group: Group, rank: int, size: int) -> None:
    """Close all connections of a gloo group, which wakes everyone who waits on them.

    `shutdown` and `abort` of a gloo group leave its waiters where they are, and dropping it closes
    nothing as long as one of them waits. A timeout closes every pair of the group: gloo says so
    ("lets all pairs know about this application side timeout"). A pair whose peer is gone
    already does not time out but fails, hence the loop.
    """
    for peer in range(size):
        if peer != rank:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, Tag.CLOSE_PROBE).wait(_CLOSE_PROBE)
