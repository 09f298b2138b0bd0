"""The store at which the ranks of a group find one another.

One host order of launches, over all communicators of a device.

Torch's groups of processes, as ranks make them, wait for what goes through them, and close them.

They are made directly from a store instead of through `torch.distributed.init_process_group`,
because a rank lives in several worlds at once (its gang, the KV connection to the other role) and
must leave one without touching the others.

Sums inside of an instance.
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
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

JOIN_DEADLINE = timedelta(seconds=60)
"""For every rank of a group to arrive."""


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


class LaunchOrder:
    """Says which thread begins what goes through a device's communicators: gang and instance.

    NCCL runs the kernels of several communicators in the order of the host's calls, which has to be
    the same on every rank. Two threads have no common order: two ranks would wait for each other,
    now and then.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def take(self) -> None:
        """From now on this thread begins everything."""
        self._thread = threading.get_ident()

    def check(self) -> None:
        """To be called where something begins."""
        assert self._thread in (None, threading.get_ident()), (
            f"thread {threading.current_thread().name} begins an exchange beside the engine's"
        )


_log = logging.getLogger(__name__)

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
_CLOSE_PROBE = timedelta(milliseconds=1)
"""For a message that never comes, whose timeout closes a gloo group."""
_CLOSE_PROBE_TAG = 16
"""Of that message, which no other one has (`Tag`)."""


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


class TorchGroup(Protocol):
    """What is used of torch's gloo and NCCL groups; its stubs leave these methods out."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...

    def eager_connect_single_device(self, device: torch.device, /) -> None: ...


GroupMaker = Callable[[Store, int, int, str], TorchGroup]
"""(store, rank, size, host) -> a group that all ranks of the store have joined."""


class DataGroup:
    """What a device's data goes through: NCCL on CUDA, gloo otherwise.

    Args:
        maker: stands in for NCCL on another device.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        maker: GroupMaker | None,
    ) -> None:
        self._rank, self._size = rank, size
        cuda = device.type == "cuda"
        self.in_order = cuda or maker is not None
        """See `Mesh.in_order`."""
        make = maker or (_nccl if cuda else gloo_group)
        self.group = make(store, rank, size, host)
        if self.in_order and size > 1:
            # NCCL makes a communicator in its first call, in which all ranks must take part: the
            # first exchange of a part of the gang would wait for the others forever.
            self.group.eager_connect_single_device(device)

    def close(self) -> None:
        """Leave it: what is under way fails, here and at peers that wait for this rank."""
        if self.in_order:
            _abort(self.group)
        else:
            close_gloo(self.group, self._rank, self._size)


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
        self.block_stream(deadline)
        self._works.clear()
        self._tensors.clear()

    def block_stream(self, deadline: timedelta = PEER_DEADLINE) -> None:
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


def gloo_group(store: Store, rank: int, size: int, host: str) -> TorchGroup:
    """Join a gloo group that listens on `host`, and wait until all ranks have."""
    group_of: Any = dist.ProcessGroupGloo  # the stubs lag behind its options
    options = group_of._Options()
    options._devices = [group_of.create_device(hostname=host)]
    options._timeout = JOIN_DEADLINE
    group = group_of(store, rank, size, options)
    # Its collectives take their deadline from the group, not from `wait`.
    group._set_default_timeout(PEER_DEADLINE)
    return cast(TorchGroup, group)


def _nccl(store: Store, rank: int, size: int, host: str) -> TorchGroup:
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
    return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))


def _abort(group: TorchGroup) -> None:
    """End what is under way on the device, or this process."""
    aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_DEADLINE.total_seconds())
    if aborting.is_alive():
        _log.critical("a group's abort took more than %s: the process ends", ABORT_DEADLINE)
        os._exit(ABORT_HANGS)


def close_gloo(group: TorchGroup, rank: int, size: int) -> None:
    """Close all connections of a gloo group, which wakes everyone who waits on them.

    `shutdown` and `abort` of a gloo group leave its waiters where they are, and dropping it closes
    nothing as long as one of them waits. A timeout closes every pair of the group: gloo says so
    ("lets all pairs know about this application side timeout"). A pair whose peer is gone
    already does not time out but fails, hence the loop.
    """
    for peer in range(size):
        if peer != rank:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _CLOSE_PROBE_TAG).wait(_CLOSE_PROBE)


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
        self._closed = threading.Event()
        self._data: DataGroup | None = None
        if size > 1:
            self._data = DataGroup(
                PrefixStore(name, store),
                rank=rank,
                size=size,
                device=torch.device(device),
                host=host,
                maker=data_group,
            )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the instance, in place."""
        self._launches.check()
        if self._data is not None and tensor.numel():
            with with_peer():
                work = self._data.group.allreduce([tensor])
            Pending([work], [tensor], self._closed, in_order=self._data.in_order).wait()
        return tensor

    def close(self) -> None:
        """Leave the group: pending sums fail, here and at the other ranks."""
        if self._data is not None:
            self._closed.set()
            self._data.close()
