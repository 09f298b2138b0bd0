"""Faults of a connection do to it what they say, and nothing is left of them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from broken_connections import FAULTS, SLOW_BYTES_S, Connection, SocketEnd, tcp_ends

SHORT_S, DEADLINE_S = 0.3, 20.0


class Pair:
    """A connection of this process with itself."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.first = socket.create_connection(self.listening.getsockname())
        self.second, _ = self.listening.accept()
        for sock in (self.first, self.second):
            sock.settimeout(DEADLINE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connections(self, kind: str, pid: int | None = None) -> list[Connection]:
        by_local = {end.local: end for end in tcp_ends([os.getpid()]) if end.state == "01"}
        return [
            Connection((by_local[self.first.getsockname()], by_local[self.second.getsockname()]))
        ]

    def ends(self, kind: str, pid: int | None = None) -> list[SocketEnd]:
        return list(self.connections(kind)[0].ends)

    def listeners(self, kind: str, pid: int | None = None) -> list[SocketEnd]:
        address = self.listening.getsockname()
        return [
            end for end in tcp_ends([os.getpid()]) if end.state == "0A" and end.local == address
        ]

    def close(self) -> None:
        for sock in (self.listening, self.first, self.second):
            sock.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def arrives(sender: socket.socket, receiver: socket.socket) -> bool:
    """Return True if a byte comes through soon."""
    sender.sendall(b"x")
    receiver.settimeout(SHORT_S)
    try:
        return receiver.recv(1) == b"x"
    except TimeoutError:
        return False
    finally:
        receiver.settimeout(DEADLINE_S)


def test_a_reset_ends_both_sides(pair: Pair) -> None:
    try:
        with FAULTS["reset"](pair, "", None):  # type: ignore[arg-type]
            with pytest.raises(ConnectionResetError):
                pair.second.recv(1)
            with pytest.raises(ConnectionAbortedError):
                pair.first.recv(1)
    except PermissionError as error:
        pytest.skip(f"needs CAP_NET_ADMIN: {error}")


@pytest.mark.parametrize(
    ("fault", "there", "back"),
    [("black hole", False, False), ("one way", True, False), ("one way back", False, True)],
)
def test_packets_vanish_in_these_directions_until_the_fault_is_undone(
    pair: Pair, fault: str, there: bool, back: bool
) -> None:
    """A sender without acknowledgements still sends: what it says arrives."""
    with FAULTS[fault](pair, "", None):  # type: ignore[arg-type]
        assert arrives(pair.first, pair.second) == there
        assert arrives(pair.second, pair.first) == back
        if fault == "black hole":
            with pytest.raises(TimeoutError):
                socket.create_connection(pair.listening.getsockname(), SHORT_S)
    pair.second.recv(1) if not there else None
    pair.first.recv(1) if not back else None
    assert arrives(pair.first, pair.second)
    assert arrives(pair.second, pair.first)


@pytest.mark.parametrize("fault", ["loss", "delay"])
def test_everything_arrives_in_spite_of(pair: Pair, fault: str) -> None:
    data = os.urandom(1 << 19)
    with FAULTS[fault](pair, "", None):  # type: ignore[arg-type]
        sending = threading.Thread(target=pair.first.sendall, args=(data,))
        sending.start()
        received = bytearray()
        while len(received) < len(data):
            received += pair.second.recv(1 << 16)
        sending.join()
    assert bytes(received) == data


def test_a_slow_connection_sends_no_faster(pair: Pair) -> None:
    data = bytes(SLOW_BYTES_S // 2)
    for _ in range(12):
        assert arrives(pair.first, pair.second)
    with FAULTS["slow"](pair, "", None):  # type: ignore[arg-type]
        began = time.monotonic()
        sending = threading.Thread(target=pair.first.sendall, args=(data,))
        sending.start()
        received = 0
        while received < len(data):
            received += len(pair.second.recv(1 << 16))
        sending.join()
        assert time.monotonic() - began > 0.25
