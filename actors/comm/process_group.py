"""Torch's process groups as ranks make, use and close them.

Groups are made directly from a store instead of through `torch.distributed.init_process_group`,
because a rank lives in several worlds at once (its gang, the KV connection to another gang) and
must leave one without touching the others.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work

from csps.actors.comm.rendezvous import JOIN_DEADLINE
from csps.protocols.core.errors import AuthenticationFailed
from csps.protocols.rpc.wire import notice_silence

_log = logging.getLogger(__name__)

PEER_DEADLINE = timedelta(minutes=30)
"""Time limit for a peer to join an exchange: longer than all that its log may have before it. A
dead peer is noticed at once, so this ends only true hangs."""
DEVICE_DEADLINE = timedelta(minutes=2)
"""Time limit of an exchange between devices, from the call on; then NCCL's watchdog ends the
process. Longer than the layers that may be before it on a device (`device_pace.AHEAD`), and than
what a peer's log may have before it."""
ABORT_DEADLINE = timedelta(seconds=20)
"""Time limit for NCCL to abort what is under way. If the abort hangs, the process ends."""
IDLE = timedelta(days=365)
"""Time limit for loops that wait for work; they end when the peer dies or the group is closed."""
LAUNCH_ORDER_SINCE = (2, 26)
"""First version of NCCL that keeps one order over all communicators of a device."""
ABORT_HANGS = 70
"""Exit status of a process whose abort hangs."""
_CLOSE_PROBE = timedelta(milliseconds=1)
"""Timeout of a receive that never completes, which closes a gloo group."""
_CLOSE_PROBE_TAG = 16
"""Tag of that receive, which no message has (`Tag`)."""
_PROOF_TAG = 15
"""Tag of what peers prove to each other before any other message."""
_PROOF_BYTES = 32


def indexed_device(name: str) -> torch.device:
    """Return a device by its name; `cuda` is the calling thread's current device, with its index.

    NCCL keeps a communicator by the index of its device, and looks for the index of a tensor's
    device. Of one that was connected without an index it knows nothing.
    """
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


class LaunchOrder:
    """The one thread that may begin operations on a device's communicators: gang and instance.

    NCCL runs the kernels of several communicators in the order of the host's calls, which has to be
    the same on every rank. Two threads have no common order, so that two ranks would wait for each
    other now and then.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def take(self) -> None:
        """Let only the calling thread begin operations from now on."""
        self._thread = threading.get_ident()

    def check(self) -> None:
        """Check that the calling thread may begin an operation."""
        assert self._thread in (None, threading.get_ident()), (
            f"thread {threading.current_thread().name} begins an exchange beside the engine's"
        )


class PeerLost(RuntimeError):
    """An operation with a peer failed: the peer died or was too late, or the group was closed.
    Other errors, such as a lack of memory, say nothing about the peer."""


@contextmanager
def with_peer() -> Iterator[None]:
    """Turn torch's errors of operations with peers into PeerLost."""
    try:
        yield
    except RuntimeError as exc:
        raise PeerLost(str(exc)) from exc


class TorchGroup(Protocol):
    """The used methods of torch's gloo and NCCL groups, which torch's stubs omit."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...

    def eager_connect_single_device(self, device: torch.device, /) -> None: ...


class Operation(Protocol):
    """A send, a receive or a sum under way."""

    def wait(self, timeout: timedelta = ..., /) -> bool: ...


GroupMaker = Callable[[Store, int, int, str], TorchGroup]
"""Function (store, rank, size, host) that returns a group joined by all ranks of the store."""


class DataGroup:
    """The group for a device's data: NCCL on CUDA, gloo otherwise.

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
        """Flag as in `Mesh.in_order`."""
        make = maker or (_nccl if cuda else gloo_group)
        self.group = make(store, rank, size, host)
        if self.in_order and size > 1:
            # NCCL makes a communicator in its first call, in which all ranks must take part: the
            # first exchange of a part of the gang would wait for the others forever.
            self.group.eager_connect_single_device(device)

    def close(self) -> None:
        """Leave the group: what is under way fails, here and at peers that wait for this rank."""
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
        works: Sequence[Operation],
        tensors: Sequence[Tensor],
        world: threading.Event | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """Args:
        in_order: see `Mesh.in_order`.
        """
        self._works = [(work, in_order) for work in works]
        self._tensors = list(tensors)
        self._closed = {world} if world is not None else set()
        """Events that are set when the world of one of the operations is closed."""

    @classmethod
    def all(cls, operations: Iterable[Pending]) -> Pending:
        """Combine several operations into one."""
        whole = cls([], [])
        for operation in operations:
            whole._works += operation._works
            whole._tensors += operation._tensors
            whole._closed |= operation._closed
        return whole

    def wait(self, deadline: timedelta = PEER_DEADLINE) -> None:
        """Block until all operations are done; raise PeerLost if a peer died or is too late.

        Where exchanges are in order, the current stream waits and not the host, and the deadline is
        the watchdog's: a wait with a deadline would poll on the host.
        """
        self.block_stream(deadline)
        self._works.clear()
        self._tensors.clear()

    def block_stream(self, deadline: timedelta = PEER_DEADLINE) -> None:
        """Wait as `wait` does, but keep the tensors, and let other streams wait for the same as
        well: only the stream to which the tensors belong may free them."""
        with with_peer():
            for work, in_order in self._works:
                if in_order:
                    work.wait()
                else:
                    work.wait(deadline)
            if any(world.is_set() for world in self._closed):
                # Operations of an aborted NCCL group end as if they had succeeded, with garbage.
                raise RuntimeError("the group was closed")


def gloo_group(store: Store, rank: int, size: int, host: str) -> TorchGroup:
    """Join a gloo group that listens on `host`; return when all ranks have joined, and have proved
    that they met at the store.

    Raises:
        AuthenticationFailed: a stranger has connected in the place of a rank.
    """
    if rank == 0:
        store.set("proof", secrets.token_hex(_PROOF_BYTES))
    others = _socket_inodes()
    group_of: Any = dist.ProcessGroupGloo  # the stubs lag behind its options
    options = group_of._Options()
    options._devices = [group_of.create_device(hostname=host)]
    options._timeout = JOIN_DEADLINE
    group = group_of(store, rank, size, options)
    # Collectives take their deadline from the group, not from `wait`.
    group._set_default_timeout(PEER_DEADLINE)
    joined = cast(TorchGroup, group)
    try:
        _prove(joined, rank, size, store.get("proof"))
        _notice_silence(others)
    except BaseException:
        close_gloo(joined, rank, size)
        raise
    return joined


def _notice_silence(others: Iterable[str]) -> None:
    """Let the kernel close connections of this process whose other end is silent, but for others.

    gloo itself would wait until the deadline of the operation: a gang in which packets between two
    ranks vanish would hang for minutes, while every rank answers the router's pings. gloo
    has no option for its sockets, so they are found by comparing. One that another thread has
    opened meanwhile is closed when it is silent, too, as this process' other connections are.
    """
    descriptors = _socket_inodes()
    for inode in descriptors.keys() - set(others):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptors[inode])) as sock:
            notice_silence(sock)


def _socket_inodes() -> dict[str, int]:
    """Return the descriptors of this process' sockets by their inodes; none without /proc."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[target] = int(name)
    return found


def _prove(group: TorchGroup, rank: int, size: int, key: bytes) -> None:
    """Prove to all peers that this rank knows the key, and check that they do. gloo itself takes
    whoever connects first and names the number of a pair, which is easy to guess.

    Raises:
        AuthenticationFailed: a peer does not know the key.
    """
    peers = [peer for peer in range(size) if peer != rank]
    ours = {peer: secrets.token_bytes(_PROOF_BYTES) for peer in peers}
    theirs = _swapped(group, ours)
    proofs = {peer: _proof(key, rank, peer, theirs[peer] + ours[peer]) for peer in peers}
    for peer, proof in _swapped(group, proofs).items():
        expected = _proof(key, peer, rank, ours[peer] + theirs[peer])
        if not hmac.compare_digest(proof, expected):
            raise AuthenticationFailed(f"whoever is connected as rank {peer} is a stranger")


def _proof(key: bytes, sender: int, receiver: int, nonces: bytes) -> bytes:
    return hmac.digest(key, f"{sender} to {receiver} ".encode() + nonces, "sha256")


def _swapped(group: TorchGroup, messages: dict[int, bytes]) -> dict[int, bytes]:
    """Send a message to each peer and return theirs, of the same length."""
    sent = {
        peer: torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for peer, message in messages.items()
    }
    received = {peer: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for peer in messages}
    with with_peer():
        works = [group.recv([received[peer]], peer, _PROOF_TAG) for peer in messages]
        works += [group.send([sent[peer]], peer, _PROOF_TAG) for peer in messages]
        for work in works:
            work.wait(JOIN_DEADLINE)
    return {peer: bytes(received[peer].tolist()) for peer in messages}


def _nccl(store: Store, rank: int, size: int, host: str) -> TorchGroup:
    # Gang and instance share a device: their kernels run in the order of the host's calls, which
    # is the same on every rank (`LaunchOrder`). Without this each stream has an order of its own,
    # and two ranks that run the two communicators' kernels in different ones wait for each other.
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < LAUNCH_ORDER_SINCE:
        wanted = ".".join(map(str, LAUNCH_ORDER_SINCE))
        raise RuntimeError(f"NCCL {'.'.join(map(str, version))} is older than {wanted}")
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # Otherwise a thread of torch's asks the store every second whether another rank wants a dump;
    # the store answers in Python, which may have ended by then.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = DEVICE_DEADLINE
    return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))


def _abort(group: TorchGroup) -> None:
    """Abort what is under way on the device, or end this process."""
    aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_DEADLINE.total_seconds())
    if aborting.is_alive():
        _log.critical("a group's abort took more than %s: the process ends", ABORT_DEADLINE)
        os._exit(ABORT_HANGS)


def close_gloo(group: TorchGroup, rank: int, size: int) -> None:
    """Close all connections of a gloo group, which wakes all threads that wait on them.

    `shutdown` and `abort` of a gloo group do not wake its waiters, and dropping the group closes
    nothing as long as one of them waits. A timeout closes every pair of the group: gloo says so
    ("lets all pairs know about this application side timeout"). A pair whose peer is gone already
    fails instead of timing out, hence the loop.
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
        """Args:
        data_group, launches: see `Mesh`.
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
                device=indexed_device(device),
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
