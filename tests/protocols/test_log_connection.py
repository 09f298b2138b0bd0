"""The connections of a gang's log: who is let in, who holds up whom, and what a frame is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FaultError,
    ProtocolError,
    ProtocolMismatch,
)
from csps.protocols.rpc.wire import ClientHandshake
from csps.protocols.sequencer import log_connection
from csps.protocols.sequencer.log_connection import (
    LOG_VERSION,
    MAX_FRAME,
    LogListener,
    LogSocket,
    join_log,
)

HOST, SECRET, WAIT_S = "127.0.0.1", b"only for tests", 60.0


@contextmanager
def listening() -> Iterator[LogListener]:
    listener = LogListener(HOST)
    try:
        yield listener
    finally:
        listener.close()


def join(listener: LogListener, rank: int, secret: bytes = SECRET) -> LogSocket:
    return join_log(HOST, listener.port, rank=rank, secret=secret, deadline_s=WAIT_S)


def accept(listener: LogListener, ranks: range, deadline_s: float = WAIT_S) -> dict[int, LogSocket]:
    return listener.accept(ranks, secret=SECRET, deadline_s=deadline_s)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@contextmanager
def pair() -> Iterator[tuple[LogSocket, LogSocket]]:
    one, other = map(LogSocket, connected())
    try:
        yield one, other
    finally:
        one.close()
        other.close()


# --- who is let in -------------------------------------------------------------------------


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


STRANGERS: dict[str, bytes] = {
    "silent": b"",
    "half a length": b"\0\0",
    "half a frame": frame(b"x" * 9)[:6],
    "a huge frame": (MAX_FRAME + 1).to_bytes(4, "big"),
    "nonsense": frame(b"\xc1"),
    "bad text": frame(b"\xa2\xff\xff"),
    "lists in lists": frame(b"\x91" * 100_000),
    "no call": frame(msgspec.msgpack.encode(7)),
    "another call": frame(msgspec.msgpack.encode(("cancel", {"sequence_id": 1}))),
    "an empty hello": frame(msgspec.msgpack.encode(("hello", None))),
}


@pytest.mark.parametrize("stays", [True, False])
def test_strangers_delay_no_rank(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, and before the ranks."""
    monkeypatch.setattr(log_connection, "HANDSHAKE_S", 2 * WAIT_S)
    with listening() as listener, ThreadPoolExecutor(3) as threads, ExitStack() as open_ones:
        for said in STRANGERS.values():
            stranger = socket.create_connection((HOST, listener.port))
            stranger.sendall(said)
            if stays:
                open_ones.enter_context(stranger)
            else:
                stranger.close()
        joining = [threads.submit(join, listener, rank) for rank in (2, 1)]
        members = accept(listener, range(1, 3))  # or the silent ones would have longer
        assert sorted(members) == [1, 2]
        for rank, joined in zip((2, 1), joining, strict=True):
            members[rank].send(b"to %d" % rank)
            assert joined.result(WAIT_S).receive() == b"to %d" % rank
            joined.result().close()
            members[rank].close()


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_disconnected(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener disconnects it as soon as it breaks the protocol, or when its time is over."""
    with listening() as listener, socket.create_connection((HOST, listener.port)) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(said)
        with ThreadPoolExecutor(1) as thread:
            with monkeypatch.context() as impatient:
                impatient.setattr(log_connection, "HANDSHAKE_S", 0.05)
                accepting = thread.submit(accept, listener, range(1, 2))
                assert hung_up(stranger)
            joined = join(listener, 1)
            [member] = accepting.result(WAIT_S).values()
            joined.close()
            member.close()


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_one_by_one_buy_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener, socket.create_connection((HOST, listener.port)) as stranger:
        over = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                stranger.sendall((10_000).to_bytes(4, "big"))
                while True:
                    stranger.sendall(b"x")
                    over.wait(0.01)
            over.set()

        with ThreadPoolExecutor(2) as threads:
            with monkeypatch.context() as impatient:
                impatient.setattr(log_connection, "HANDSHAKE_S", 0.3)
                trickling = threads.submit(trickle)
                accepting = threads.submit(accept, listener, range(1, 2))
                assert over.wait(WAIT_S), "the connection is still open"
            join(listener, 1).close()
            accepting.result(WAIT_S)[1].close()
            trickling.result(WAIT_S)


@pytest.mark.parametrize(
    ("rank", "secret"), [(1, b"another"), (0, SECRET), (3, SECRET)], ids=["secret", "low", "high"]
)
def test_an_unexpected_rank_is_refused(rank: int, secret: bytes) -> None:
    with listening() as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, range(1, 2))
        with pytest.raises(FaultError):
            join(listener, rank, secret).receive()
        joined = join(listener, 1)
        accepting.result(WAIT_S)[1].close()
        joined.close()


@pytest.mark.parametrize("name", ["9" * 5000, "\u0661", "01", "+1", ""], ids=lambda name: name[:3])
def test_a_rank_whose_name_is_no_rank_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the secret. Python converts no number of 5,000 digits."""

    def misnamed(secret: bytes, version: int, _: str) -> ClientHandshake:
        return ClientHandshake(secret, version, name)

    with listening() as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, range(1, 2))
        with monkeypatch.context() as changed:
            changed.setattr(log_connection, "ClientHandshake", misnamed)
            with pytest.raises(FaultError):
                join(listener, 1).receive()
        joined = join(listener, 1)
        accepting.result(WAIT_S)[1].close()
        joined.close()


def test_a_rank_of_the_previous_log_version_is_refused_by_both_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = LOG_VERSION, LOG_VERSION - 1
    assert (ours, theirs) == (4, 3)

    def previous_release(secret: bytes, version: int, name: str) -> ClientHandshake:
        return ClientHandshake(secret, version - 1, name)

    with listening() as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, range(1, 2))
        with monkeypatch.context() as older:
            older.setattr(log_connection, "ClientHandshake", previous_release)
            with pytest.raises(ProtocolMismatch, match="speaks version 3, the peer 4") as caught:
                join(listener, 1)
        assert (caught.value.ours, caught.value.theirs) == (theirs, ours)
        joined = join(listener, 1)
        accepting.result(WAIT_S)[1].close()
        joined.close()
    assert "this side speaks version 4, the peer 3" in caplog.text


def test_a_rank_comes_once() -> None:
    with listening() as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, range(1, 3))
        first = join(listener, 1)
        with pytest.raises(ConnectionLost):
            join(listener, 1).receive()
        second = join(listener, 2)
        members = accepting.result(WAIT_S)
        members[1].send(b"you")
        assert first.receive() == b"you"
        for connection in (first, second, *members.values()):
            connection.close()


def test_ranks_that_do_not_come_are_waited_for_so_long() -> None:
    with listening() as listener, pytest.raises(DeadlineExceeded):
        accept(listener, range(1, 2), 0.05)


# --- frames --------------------------------------------------------------------------------


@given(frames=st.lists(st.binary(max_size=50), max_size=8), cuts=st.lists(st.integers(1, 20)))
def test_frames_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    one, other = connected()
    receiver = LogSocket(other)
    stream = b"".join(map(frame, frames))
    found: list[bytes] = []
    while stream:
        length = cuts.pop() if cuts else len(stream)
        one.sendall(stream[:length])
        stream = stream[length:]
        found += receiver.arrived()
    assert found == frames
    one.close()
    receiver.close()


@pytest.mark.parametrize("who", [0, 1])
def test_closing_wakes_a_thread_that_waits_for_a_frame(who: int) -> None:
    """The waiting side or the other one may close."""
    with pair() as ends, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ends[0].receive)
        ends[who].close()
        with pytest.raises(ConnectionLost):
            waiting.result(WAIT_S)


def test_a_frame_that_is_too_long_is_no_frame() -> None:
    with pair() as (one, other):
        one._sock.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
        with pytest.raises(ProtocolError):
            other.receive()


def test_frames_of_several_threads_do_not_mix() -> None:
    with pair() as (one, other), ThreadPoolExecutor(4) as threads:
        sending: list[Callable[[], None]] = [
            lambda byte=byte: [  # type: ignore[misc]
                one.send(bytes([byte]) * 3000) for _ in range(20)
            ]
            for byte in range(3)
        ]
        running = [threads.submit(send) for send in sending]
        for _ in range(60):
            received = other.receive()
            assert received == received[:1] * 3000
        for future in running:
            future.result(WAIT_S)
