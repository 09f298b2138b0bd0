"""Faults of single connections between the processes of a deployed server, by their own sockets.

The kernel runs a filter for each socket, which may drop what arrives (`black_holes`), all of it or
at random; it paces what a socket sends; and it resets a connection on request. So one connection
breaks while those beside it, of the same processes, go on. A firewall's rules would have to name
ports, and the kernels of small virtual machines have no netem.

A socket that listens hands its filter to the connections that it accepts: what vanishes for good
vanishes for those that try again, too.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from black_holes import borrowed, sockets_of, swallow
from deployed_server import Deployed, name_of

from csps.protocols.gang.messages import RankDescription
from csps.services.launch.ray_head import session_of

_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47
_UNPACED = (1 << 64) - 1
_LOAD_RANDOM = struct.pack("HBBI", 0x20, 0, 0, (0xFFFF_F000 + 56) & 0xFFFF_FFFF)
_SOCK_DIAG, _SOCK_DESTROY = 4, 21
_REQUEST, _ACK = 1, 4
LOSS = 0.01
SLOW_BYTES_S = 256 * 1024
HOLE_S, GAP_S = 0.1, 0.3
"""Time for which packets vanish, and time until they do so again: TCP sends them again after 0.2 s
or more."""
ESTABLISHED, LISTENS = "01", "0A"
KINDS = ("rpc", "log", "mesh", "kv", "store", "http")


@dataclass(frozen=True)
class SocketEnd:
    """One end of a connection, or a socket that listens."""

    pid: int
    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int]
    state: str

    @contextmanager
    def opened(self) -> Iterator[socket.socket]:
        """Yield the process' socket."""
        with borrowed(self.pid, self.descriptor) as sock:
            yield sock

    def is_still_there(self) -> bool:
        """Return False if the process has closed it, or has ended."""
        with suppress(OSError), self.opened() as sock:
            return sock.getsockname()[:2] == self.local
        return False


@dataclass(frozen=True)
class Connection:
    """Both ends of a connection within the machine. The first is the one that `one way` cuts."""

    ends: tuple[SocketEnd, ...]


def tcp_ends(pids: Sequence[int]) -> list[SocketEnd]:
    """Return all TCP sockets of processes."""
    rows = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        rows[fields[9]] = _address(fields[1]), _address(fields[2]), fields[3]
    found = []
    for pid in pids:
        with suppress(OSError):
            for descriptor, inode in sockets_of(pid).items():
                if inode in rows:
                    found.append(SocketEnd(pid, descriptor, *rows[inode]))
    return found


def _address(field: str) -> tuple[str, int]:
    host, port = field.split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


class Topology:
    """The connections of a deployed server, by what they carry."""

    def __init__(self, server: Deployed) -> None:
        self.ranks = server.ranks()
        self._rpc = set(server.registry.rank_addresses())
        self._stores = {(rank.store_host, rank.store_port) for rank in self.ranks}
        self._gang_of = {rank.pid: rank.gang_id for rank in self.ranks}
        self.routers = sorted(server.pids("Router"))
        pids = session_of(server.head.pid)
        self.fronts = [pid for pid in pids if name_of(pid) == "haproxy"]
        self._pids = [*self._gang_of, *self.routers, *self.fronts]

    def rank(self, role: str, rank: int) -> RankDescription:
        """Return a rank of the gang of a role."""
        return next(one for one in self.ranks if (one.role, one.rank) == (role, rank))

    def connections(self, kind: str, pid: int | None = None) -> list[Connection]:
        """Return the connections of a kind, those of one process if it is named, with its end
        first.

        Raises:
            AssertionError: there is none, so that a fault would hit nothing.
        """
        found, ends = [], tcp_ends(self._pids)
        by_addresses = {(end.local, end.remote): end for end in ends}
        for end in ends:
            other = by_addresses.get((end.remote, end.local))
            first = end.pid == pid if pid is not None else other is None or end.local > other.local
            if end.state == ESTABLISHED and other and first and self._kind(end, other) == kind:
                found.append(Connection((end, other)))
        assert found, f"there is no {kind} connection"
        return found

    def ends(self, kind: str, pid: int | None = None) -> list[SocketEnd]:
        """Return both ends of the connections of a kind."""
        return [end for connection in self.connections(kind, pid) for end in connection.ends]

    def listeners(self, kind: str, pid: int | None = None) -> list[SocketEnd]:
        """Return the sockets that listen for connections of a kind."""
        addresses = {"rpc": self._rpc, "store": self._stores}.get(kind, set())
        return [
            end
            for end in tcp_ends(self._pids)
            if end.state == LISTENS and end.local in addresses and pid in (None, end.pid)
        ]

    def _kind(self, end: SocketEnd, other: SocketEnd) -> str | None:
        gangs = [self._gang_of.get(one.pid) for one in (end, other)]
        addresses = {end.local, other.local}
        if addresses & self._rpc:
            return "rpc" if None in gangs else None
        if addresses & self._stores:
            return "store"
        if None in gangs:
            front = {end.pid, other.pid} & set(self.fronts)
            return "http" if front and {end.pid, other.pid} & set(self.routers) else None
        if gangs[0] != gangs[1]:
            return "kv"
        # Of what ranks of one gang have with each other, gloo's sockets have a time limit.
        with end.opened() as sock:
            limited = any(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        return "mesh" if limited else "log"


Fault = Callable[[Topology, str, "int | None"], AbstractContextManager[None]]
"""Breaks the connections of a kind, those of one process if it is named. HTTP connections are
looked up when the context opens: they come and go."""


@contextmanager
def reset(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Reset connections; both ends learn it at once."""
    for connection in topology.connections(kind, pid):
        with suppress(ConnectionError, FileNotFoundError):  # meanwhile it ended by itself
            _destroy(connection.ends[0])
    yield


@contextmanager
def black_hole(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Let everything vanish in both directions, new connections included."""
    with _filtered([*topology.ends(kind, pid), *topology.listeners(kind, pid)], swallow):
        yield


@contextmanager
def one_way(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Let everything vanish that arrives at the first end; the other end hears it still."""
    firsts = [connection.ends[0] for connection in topology.connections(kind, pid)]
    with _filtered(firsts, swallow):
        yield


@contextmanager
def one_way_back(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Let everything vanish that the first end sends."""
    others = [connection.ends[1] for connection in topology.connections(kind, pid)]
    with _filtered(others, swallow):
        yield


@contextmanager
def loss(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Drop one packet in a hundred in both directions."""
    with _filtered([*topology.ends(kind, pid), *topology.listeners(kind, pid)], _drop_some):
        yield


@contextmanager
def delay(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Let packets vanish for a moment, again and again, so that TCP has to send them again."""
    ends, over = topology.ends(kind, pid), threading.Event()

    def blink() -> None:
        while not over.is_set():
            with _filtered(ends, swallow):
                over.wait(HOLE_S)
            over.wait(GAP_S)

    thread = threading.Thread(target=blink, name="delay")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def slow(topology: Topology, kind: str, pid: int | None) -> Iterator[None]:
    """Let both ends send at most so many bytes a second, once they have sent ten packets: that many
    Linux never paces."""
    ends = topology.ends(kind, pid)
    try:
        for end in ends:
            _pace(end, SLOW_BYTES_S)
        yield
    finally:
        for end in ends:
            _pace(end, _UNPACED)


FAULTS: dict[str, Fault] = {
    "reset": reset,
    "black hole": black_hole,
    "one way": one_way,
    "one way back": one_way_back,
    "delay": delay,
    "loss": loss,
    "slow": slow,
}


@contextmanager
def _filtered(ends: Sequence[SocketEnd], attach: Callable[[socket.socket], None]) -> Iterator[None]:
    with ExitStack() as attached:
        for end in ends:
            with suppress(OSError), end.opened() as sock:
                attach(sock)
                attached.callback(_detach, end)
        yield


def _detach(end: SocketEnd) -> None:
    # A replaced process has closed it, and its number may stand for another socket.
    if end.is_still_there():
        with suppress(OSError), end.opened() as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _drop_some(sock: socket.socket) -> None:
    program = ctypes.create_string_buffer(
        _LOAD_RANDOM
        + struct.pack("HBBI", 0x25, 0, 1, int((1 - LOSS) * 2**32))  # above: drop
        + struct.pack("HBBI", 0x06, 0, 0, 0)
        + struct.pack("HBBI", 0x06, 0, 0, 0xFFFF_FFFF)
    )
    filter_program = struct.pack("HP", 4, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)


def _pace(end: SocketEnd, bytes_s: int) -> None:
    if end.is_still_there():
        with suppress(OSError), end.opened() as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_s))


def _destroy(end: SocketEnd) -> None:
    """Have the kernel abort a connection: both ends get an error, with a reset on the way.

    Disconnecting the socket by `connect` would do so to the other end only, and event loops of this
    one (gloo's) would spin.
    """
    (source, source_port), (target, target_port) = end.local, end.remote
    request = struct.pack("BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFF_FFFF)
    request += struct.pack(">HH", source_port, target_port)
    request += struct.pack("4s12x4s12x", socket.inet_aton(source), socket.inet_aton(target))
    request += struct.pack("I", 0) + b"\xff" * 8  # any interface, any cookie
    header = struct.pack("IHHII", 16 + len(request), _SOCK_DESTROY, _REQUEST | _ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.send(header + request)
        error = struct.unpack_from("i", netlink.recv(4096), 16)[0]
    if error:
        raise OSError(-error, "the kernel does not abort the connection")
