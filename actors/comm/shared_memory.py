"""Messages between ranks of one machine, through memory that both have mapped.

A message over gloo takes 50 us and more: gloo's own threads send and receive it, and wake the one
that waits. Here the sender copies it into memory and sends a header of 32 bytes over a Unix socket,
which wakes the receiving thread itself. That is enough for decoding, whose exchanges are small and
waited for at once; nobody polls, so a machine with more ranks than cores loses nothing.

The memory has no name (memfd), and neither has a file the socket's: both are gone with the last
process that holds them, however it ends. The socket tells at once that a peer has died. As it
orders a copy into the memory before the copy out of it, there are no atomic counters.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import Tensor
from torch._C._distributed_c10d import Store

from csps.actors.comm.process_group import PEER_DEADLINE
from csps.actors.comm.rendezvous import JOIN_DEADLINE
from csps.protocols.core.errors import AuthenticationFailed, DeadlineExceeded

RING_BYTES = 4 * 2**20
"""Memory for messages to one peer. Only what is used takes memory: messages start anew at its
beginning when the peer has taken all."""
_SHARE = 4
"""A message may fill one of so many parts of the memory. Longer ones wait for bandwidth and not for
wake-ups, and gloo sends them while ranks compute. When so large a part was taken, the sender is
told."""
_HEADER = struct.Struct("<4q")
"""Tag, place in the memory, bytes, and how many of the receiver's messages were taken."""
_TAKEN = -1
"""Tag of a header without a message, for peers that otherwise send nothing."""
_KEY_BYTES = 32
_HELLO = struct.Struct(f"<q{_KEY_BYTES}s")
"""Rank of the one that connects, and the key of the other."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the one at the other end of a Unix socket."""
HELLO_S = 10.0
"""Time limit for the first message of a connection."""
CLOSE_S = 5.0
"""Time limit for a thread to leave an operation when the memory is closed."""


@dataclass(frozen=True)
class _Card:
    """A rank's address, which others read from the store."""

    machine: str
    address: bytes
    key: bytes

    def text(self) -> str:
        return f"{self.machine} {self.address.hex()} {self.key.hex()}"

    @classmethod
    def of(cls, text: str) -> _Card:
        machine, address, key = text.split(" ")
        return cls(machine, bytes.fromhex(address), bytes.fromhex(key))


def machine() -> str:
    """Return a word that is equal on ranks that can share memory: those of one user who see the
    same network of the same kernel. It is empty where that is not supported."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{boot}/{network.st_ino}/{os.geteuid()}" if hasattr(os, "memfd_create") else ""


class SharedMessage:
    """A message that is sent or received, as an operation to wait for."""

    def __init__(self, memory: SharedMemory, link: _Link, tag: int, tensor: Tensor | None) -> None:
        assert tensor is None or tensor.is_contiguous(), "a message that is not contiguous"
        self._memory, self.link, self.tag = memory, link, tag
        self.tensor = tensor
        """Tensor of the message, which stays alive until the end."""
        self.address = 0 if tensor is None else tensor.data_ptr()
        self.bytes = 0 if tensor is None else tensor.nbytes
        self.done = False

    def wait(self, deadline: timedelta = PEER_DEADLINE) -> bool:
        """Wait until a received message is there, or the memory of a sent one may change.

        Raises:
            RuntimeError: the peer is gone or too late, or the memory was closed.
        """
        if not self.done:
            self._memory.wait_for(self, deadline.total_seconds())
        return True


class SharedMemory:
    """Messages between this rank and those on its machine. They match by tag, in order.

    One thread uses it at a time, and any thread closes it.
    """

    def __init__(self, store: Store, *, rank: int, size: int, ring_bytes: int = RING_BYTES) -> None:
        """Find the ranks of this machine; return when all of them have come.

        Args:
            store: shared by all ranks of the world.
        """
        self._lock = threading.Lock()
        self._poller = select.poll()
        self._links: dict[int, _Link] = {}
        self._by_number: dict[int, _Link] = {}
        self._ring_bytes = ring_bytes
        try:
            self._join(store, rank, size)
        except BaseException:
            self.close()
            raise

    def _join(self, store: Store, rank: int, size: int) -> None:
        here, key = machine(), secrets.token_bytes(_KEY_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            if here:
                server.bind("")  # the kernel chooses a name
                server.listen(size)
            store.set(str(rank), _Card(here, bytes(server.getsockname() or b"-"), key).text())
            cards = [_Card.of(store.get(str(peer)).decode()) for peer in range(size)]
            near = {peer for peer, card in enumerate(cards) if here and card.machine == here}
            for peer in sorted(peer for peer in near if peer < rank):
                self._add(peer, *_connect(cards[peer], rank, key, self._ring_bytes), first=True)
            later = {peer for peer in near if peer > rank}
            end = time.monotonic() + JOIN_DEADLINE.total_seconds()
            while later:
                server.settimeout(max(end - time.monotonic(), 1e-3))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    seconds = JOIN_DEADLINE.total_seconds()
                    raise DeadlineExceeded("shared memory of ranks", seconds) from None
                caller = _welcome(
                    connection, key, {p: cards[p].key for p in later}, self._ring_bytes
                )
                if caller is not None:  # a stranger otherwise
                    self._add(caller[0], connection, caller[1], first=False)
                    later.remove(caller[0])

    def carries(self, peer: int, tensor: Tensor) -> bool:
        """Return whether such a message goes through memory; its receiver decides alike."""
        return peer in self._links and tensor.nbytes <= self._ring_bytes // _SHARE

    def send(self, tensor: Tensor, peer: int, tag: int) -> SharedMessage:
        """Start to send; the tensor must not change before the end."""
        with self._lock:
            message = SharedMessage(self, link := self._links[peer], tag, tensor)
            link.send(message)
            while not message.done and self._advance(0):
                pass  # peers may have said that there is room again
        return message

    def recv(self, tensor: Tensor, peer: int, tag: int) -> SharedMessage:
        """Start to receive into a tensor."""
        with self._lock:
            message = SharedMessage(self, link := self._links[peer], tag, tensor)
            link.receive(message)
        return message

    def wait_for(self, message: SharedMessage, seconds: float) -> None:
        """Work on all messages until this one is done."""
        end = time.monotonic() + seconds
        with self._lock:
            while not message.done:
                message.link.check()
                left = end - time.monotonic()
                if left <= 0:
                    raise RuntimeError(
                        f"rank {message.link.peer} took part in no exchange for {seconds:g} s"
                    )
                self._advance(left)

    def _advance(self, seconds: float) -> bool:
        """Work on what peers have sent; return whether there was anything within this time."""
        ready = self._poller.poll(1e3 * seconds)
        for number, _ in ready:
            self._by_number[number].advance(self)
        return bool(ready)

    def close(self) -> None:
        """End all messages, here and at the peers. Idempotent."""
        for link in self._links.values():
            link.hang_up()  # wakes the thread that waits
        if self._lock.acquire(timeout=CLOSE_S):
            try:
                for link in self._links.values():
                    link.close()
            finally:
                self._lock.release()

    def _add(self, peer: int, connection: socket.socket, memory: mmap.mmap, *, first: bool) -> None:
        link = _Link(peer, connection, memory, first=first, poller=self._poller)
        self._links[peer] = self._by_number[connection.fileno()] = link


def _connect(
    card: _Card, rank: int, key: bytes, ring_bytes: int
) -> tuple[socket.socket, mmap.mmap]:
    """Connect to a rank, and give it the memory for messages both ways."""
    with ExitStack() as given_back:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given_back.enter_context(connection)
        connection.settimeout(JOIN_DEADLINE.total_seconds())
        connection.connect(card.address)
        number = os.memfd_create("csps-messages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, 2 * ring_bytes)
            memory = given_back.enter_context(mmap.mmap(number, 2 * ring_bytes))
            if not _same_user(connection):
                raise AuthenticationFailed("another user listens in the place of a rank")
            socket.send_fds(connection, [_HELLO.pack(rank, card.key)], [number])
        finally:
            os.close(number)
        if not hmac.compare_digest(connection.recv(_KEY_BYTES), key):
            raise AuthenticationFailed("whoever listens in the place of a rank is a stranger")
        connection.setblocking(False)
        given_back.pop_all()
    return connection, memory


def _welcome(
    connection: socket.socket, key: bytes, keys: dict[int, bytes], ring_bytes: int
) -> tuple[int, mmap.mmap] | None:
    """Return the rank that has connected, and the memory that it gives; None for a stranger.

    Args:
        keys: those of the expected ranks.
    """
    with ExitStack() as given_back, ExitStack() as files:
        given_back.enter_context(connection)
        if not _same_user(connection):
            return None
        connection.settimeout(HELLO_S)
        try:
            hello, numbers, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        except OSError:
            return None
        for number in numbers:
            files.callback(os.close, number)
        if len(hello) != _HELLO.size or len(numbers) != 1:
            return None
        rank, proof = _HELLO.unpack(hello)
        if rank not in keys or not hmac.compare_digest(proof, key):
            return None
        assert os.fstat(numbers[0]).st_size == 2 * ring_bytes, f"rank {rank} has another memory"
        memory = mmap.mmap(numbers[0], 2 * ring_bytes)
        connection.send(keys[rank])
        connection.setblocking(False)
        given_back.pop_all()
    return rank, memory


def _same_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


class _Link:
    """The connection with one peer."""

    def __init__(
        self,
        peer: int,
        connection: socket.socket,
        memory: mmap.mmap,
        *,
        first: bool,
        poller: select.poll,
    ) -> None:
        """Args:
        first: send through the first half of the memory, and receive through the second.
        """
        self.peer = peer
        self._socket, self._memory, self._poller = connection, memory, poller
        self._view = ctypes.c_char.from_buffer(memory)
        begin, self._room = ctypes.addressof(self._view), len(memory) // 2
        self._out, self._in = (begin, begin + self._room)[:: 1 if first else -1]
        self._lost = False
        self._unsent: deque[SharedMessage] = deque()
        self._untaken: deque[tuple[int, int]] = deque()
        """Begin and end of messages in the memory that the peer has yet to take."""
        self._taken_by_peer = 0
        self._taken = 0
        """Messages taken from the peer."""
        self._untold_bytes = 0
        """Bytes of those of which it does not know yet."""
        self._expected: defaultdict[int, deque[SharedMessage]] = defaultdict(deque)
        self._early: defaultdict[int, deque[bytes]] = defaultdict(deque)
        """Messages that came before they were asked for, by tag."""
        poller.register(connection, select.POLLIN)

    def check(self) -> None:
        """Raise RuntimeError if the peer is gone."""
        if self._lost:
            raise RuntimeError(f"rank {self.peer} has left the shared memory")

    def send(self, message: SharedMessage) -> None:
        """Send a message as soon as there is room for it."""
        self.check()
        self._unsent.append(message)
        self._flush()

    def receive(self, message: SharedMessage) -> None:
        """Receive a message."""
        early = self._early.get(message.tag)
        if not early:
            self.check()
            self._expected[message.tag].append(message)
            return
        data = early.popleft()
        _check_length(message, len(data))
        ctypes.memmove(message.address, data, len(data))
        message.done = True

    def advance(self, memory: SharedMemory) -> None:
        """Read a header, and send what has room now."""
        try:
            data = self._socket.recv(_HEADER.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._flush()
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        tag, place, length, taken = _HEADER.unpack(data)
        for _ in range(taken - self._taken_by_peer):
            self._untaken.popleft()
        self._taken_by_peer = taken
        if tag != _TAKEN:
            self._take(tag, place, length)
            if self._untold_bytes * _SHARE >= self._room:
                # Before the others, which may wait for what the peer does not send because of this.
                self._unsent.appendleft(SharedMessage(memory, self, _TAKEN, None))
                self._untold_bytes = 0
        self._flush()

    def hang_up(self) -> None:
        """Disconnect, from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give socket and memory back."""
        if self._socket.fileno() >= 0:
            self._lose()
            self._socket.close()
            del self._view
            self._memory.close()

    def _take(self, tag: int, place: int, length: int) -> None:
        assert 0 <= place <= place + length <= self._room, "a header outside the memory"
        if expected := self._expected[tag]:
            message = expected.popleft()
            _check_length(message, length)
            ctypes.memmove(message.address, self._in + place, length)
            message.done = True
        else:
            self._early[tag].append(ctypes.string_at(self._in + place, length))
        self._taken += 1
        self._untold_bytes += length

    def _flush(self) -> None:
        if not self._unsent or self._lost:
            return
        events = select.POLLIN
        while self._unsent:
            message = self._unsent[0]
            if (place := self._place(message.bytes)) is None:
                break  # until the peer has taken something
            ctypes.memmove(self._out + place, message.address, message.bytes)
            header = _HEADER.pack(message.tag, place, message.bytes, self._taken)
            try:
                self._socket.send(header, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                events |= select.POLLOUT
                break
            except OSError:
                self._lose()
                return
            self._untold_bytes = 0
            if message.tag != _TAKEN:
                self._untaken.append((place, place + message.bytes))
            self._unsent.popleft().done = True
        self._poller.modify(self._socket, events)

    def _place(self, length: int) -> int | None:
        """Return where a message may lie; None while there is no room."""
        if not self._untaken:
            return 0
        begin, end = self._untaken[0][0], self._untaken[-1][1]
        if end > begin:
            if end + length <= self._room:
                return end
            return 0 if length < begin else None
        return end if end + length < begin else None

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._poller.unregister(self._socket)


def _check_length(message: SharedMessage, length: int) -> None:
    assert message.bytes == length, (
        f"rank {message.link.peer} sends {length} bytes instead of {message.bytes}"
    )
