"""Process groups of one rank: point-to-point over the gang, all-reduce inside an instance.

A sequence-parallel group is a subset of the gang formed per job by grouped point-to-point
operations, so changing the degree of parallelism creates no communicator. The groups are made
directly from a store instead of through `torch.distributed.init_process_group`, because a rank
lives in several worlds at once (its gang, the bridge to the other role) and must leave one
without touching the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

JOIN_DEADLINE = timedelta(seconds=60)
"""For every rank of a group to arrive."""
PEER_DEADLINE = timedelta(minutes=30)
"""For a peer to reach a collective: longer than the longest prefill job that may run before it.
A peer that died is noticed at once, so this only ends true hangs."""
IDLE = timedelta(days=365)
"""For loops that wait for work; they end when the peer dies or the group is closed."""


class Tag(IntEnum):
    """Message streams between two ranks; each is first in, first out."""

    CONTROL = 1
    FIRST_EXCHANGE = 2
    SECOND_EXCHANGE = 3
    LAST_ROW_QUERY = 4
    LAST_ROW_PARTIAL = 5
    KV_MOVE = 6
    DECODE_QUERY = 7
    DECODE_PARTIAL = 8
    DECODE_REPORT = 9
    DECODE_TOKEN = 10
    KV_HEADER = 11
    KV_KEYS = 12
    KV_VALUES = 13
    HISTORY = 14


@dataclass(frozen=True)
class StoreAddress:
    """Where a gang's rendezvous store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class HostedStore:
    """A rendezvous store served by this process for as long as the object lives."""

    address: StoreAddress
    store: dist.Store


def host_store(host: str) -> HostedStore:
    """Serve a rendezvous store on a free port of `host`."""
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=JOIN_DEADLINE, use_libuv=True
    )
    return HostedStore(StoreAddress(host, store.port), store)


def join_store(address: StoreAddress) -> dist.Store:
    """Connect to a store that another rank serves."""
    return dist.TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=JOIN_DEADLINE
    )


class Pending:
    """Operations under way; keeps their tensors alive until `wait`."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        self._works = list(works)
        self._tensors = list(tensors)

    @classmethod
    def all(cls, operations: Iterable[Pending]) -> Pending:
        """Several operations as one."""
        whole = cls([], [])
        for operation in operations:
            whole._works += operation._works
            whole._tensors += operation._tensors
        return whole

    def wait(self, deadline: timedelta = PEER_DEADLINE) -> None:
        """Block until all are done; raises RuntimeError when a peer died or is too late."""
        for work in self._works:
            work.wait(deadline)
        self._works.clear()
        self._tensors.clear()


class Mesh:
    """One world of ranks as seen by one of them.

    Data goes through NCCL for CUDA tensors and gloo otherwise; `send` and `recv` of one tag
    between two ranks match in order. Tensors must be contiguous; empty ones are not sent, which
    both sides decide alike because both know the shapes.
    """

    def __init__(
        self, store: dist.Store, *, name: str, rank: int, world_size: int, device: str, host: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._cuda = torch.device(device).type == "cuda"
        scoped = dist.PrefixStore(name, store)
        self._control = _gloo(dist.PrefixStore("control", scoped), rank, world_size, host)
        self._data: dist.ProcessGroup = (
            _nccl(dist.PrefixStore("data", scoped), rank, world_size)
            if self._cuda
            else self._control
        )

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> Pending:
        """Start sending; the tensor must not change before `wait`."""
        group = self._data if tensor.is_cuda else self._control
        return Pending([group.send([tensor], peer, tag)], [tensor])

    def recv(self, tensor: Tensor, peer: int, tag: Tag) -> Pending:
        """Start receiving into a contiguous tensor."""
        group = self._data if tensor.is_cuda else self._control
        return Pending([group.recv([tensor], peer, tag)], [tensor])

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
    ) -> Pending:
        """Start a group of sends and receives, each a (peer, tensor); none may wait for another."""
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        tensors = [tensor for _, tensor in (*recvs, *sends)]
        if not self._cuda:
            works = [self._data.recv([tensor], peer, tag) for peer, tensor in recvs]
            works += [self._data.send([tensor], peer, tag) for peer, tensor in sends]
            return Pending(works, tensors)
        # NCCL would deadlock on ungrouped pairs: all of them go into one launch.
        with dist._coalescing_manager(group=self._data, async_ops=True) as coalesced:
            for peer, tensor in recvs:
                self._data.recv([tensor], peer, 0)
            for peer, tensor in sends:
                self._data.send([tensor], peer, 0)
        return Pending(coalesced.works, tensors)

    def close(self) -> None:
        """Leave the world; pending operations of peers with this rank fail."""
        for group in {id(g): g for g in (self._control, self._data)}.values():
            group.shutdown()


class InstanceGroup:
    """The tensor-parallel ranks of one instance, which sum partial results."""

    def __init__(
        self, store: dist.Store, *, name: str, rank: int, size: int, device: str, host: str
    ) -> None:
        self.size = size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            scoped = dist.PrefixStore(name, store)
            cuda = torch.device(device).type == "cuda"
            self._group = _nccl(scoped, rank, size) if cuda else _gloo(scoped, rank, size, host)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the instance, in place."""
        if self._group is not None and tensor.numel():
            self._group.allreduce([tensor]).wait(PEER_DEADLINE)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.shutdown()


def _gloo(store: dist.Store, rank: int, size: int, host: str) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = JOIN_DEADLINE
    group = dist.ProcessGroupGloo(store, rank, size, options)
    return group


def _nccl(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PEER_DEADLINE
    return dist.ProcessGroupNCCL(store, rank, size, options)
