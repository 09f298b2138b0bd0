"""Client and server over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgpack
import pytest
import pytest_asyncio
from opentelemetry import context as otel_context
from opentelemetry import trace
from raw_rpc import RawPeer

from csps.protocols.core.errors import (
    AuthenticationFailed,
    Cancelled,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    GangLost,
    ProtocolError,
    ProtocolMismatch,
    QueueFull,
    RemoteError,
    TransferError,
)
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.server import Handler, Peer, RpcServer
from csps.protocols.rpc.wire import SCHEMA_VERSION, RpcLimits

SECRET, VERSION = b"a cluster secret", 7
SECONDS = 60.0
"""Generous: what should not wait must not fail on a busy machine."""


class Cell:
    """Servers and clients of one test, closed at its end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.disconnected: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, handlers: dict[str, Handler], **options: Any) -> RpcServer:
        options = {"secret": SECRET, "version": VERSION, **options}
        server = RpcServer(handlers, on_disconnect=self._report, **options)
        self.address = await server.start("127.0.0.1")
        self._stack.push_async_callback(server.close, 0.0)
        return server

    def _report(self, peer: Peer) -> None:
        self.disconnected.put_nowait(peer.identity)

    async def connect(self, **options: Any) -> RpcClient:
        defaults = {"secret": SECRET, "version": VERSION, "name": "test", "deadline_s": SECONDS}
        client = await RpcClient.connect(*self.address, **{**defaults, **options})
        self._stack.push_async_callback(client.close)
        return client

    async def raw(self, *, authenticated: bool = True) -> RawPeer:
        peer = await RawPeer.connect(self.address)
        self._stack.callback(peer.close)
        if authenticated:
            await peer.authenticate(SECRET, version=VERSION)
        return peer


@pytest_asyncio.fixture
async def cell() -> AsyncIterator[Cell]:
    async with AsyncExitStack() as stack:
        yield Cell(stack)


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, SECONDS)


def echo(payload: Any, peer: Peer) -> Any:
    return payload


async def echo_later(payload: Any, peer: Peer) -> Any:
    await asyncio.sleep(0)
    return payload


class Hanging:
    """A handler that waits to be cancelled and says when it starts and how it ends."""

    def __init__(self) -> None:
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, payload: Any, peer: Peer) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# --- calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [echo, echo_later])
@pytest.mark.parametrize(
    "payload", [None, 0, -1, 2**63, 1.5, "ü", b"\x00\xff", [1, [2]], {"a": {"b": None}, 3: 4.5}]
)
async def test_result_equals_the_handlers(cell: Cell, handler: Handler, payload: Any) -> None:
    await cell.serve({"echo": handler})
    client = await cell.connect()
    assert await client.call("echo", payload, deadline_s=SECONDS) == payload


async def test_answers_may_overtake_each_other(cell: Cell) -> None:
    gates = [asyncio.Event() for _ in range(50)]

    async def wait(index: int, peer: Peer) -> int:
        await gates[index].wait()
        return index

    await cell.serve({"wait": wait})
    client = await cell.connect()
    calls = [asyncio.ensure_future(client.call("wait", i, deadline_s=SECONDS)) for i in range(50)]
    for index in reversed(range(50)):
        gates[index].set()
        assert await soon(calls[index]) == index


async def test_message_number_wraps_and_skips_calls_in_flight(cell: Cell) -> None:
    hanging = Hanging()
    await cell.serve({"hang": hanging, "echo": echo})
    client = await cell.connect()
    client._last_msgid = 2**32 - 2
    first = asyncio.ensure_future(client.call("hang", deadline_s=SECONDS))
    await soon(hanging.started.wait())
    assert await client.call("echo", "wrapped", deadline_s=SECONDS) == "wrapped"
    assert client._last_msgid == 0
    client._last_msgid = 2**32 - 2
    assert await client.call("echo", "skipped", deadline_s=SECONDS) == "skipped"
    assert client._last_msgid == 0
    first.cancel()


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        GangLost("rank 3 died"),
        TransferError("layer 2: 7 of 8 tokens"),
        QueueFull("32 requests wait", retry_after_s=1.5),
        DeadlineExceeded("prefill", 30),
    ],
)
@pytest.mark.parametrize("later", [False, True])
async def test_exceptions_come_back_as_the_same_class(
    cell: Cell, error: Exception, later: bool
) -> None:
    def fail(payload: Any, peer: Peer) -> None:
        raise error

    async def fail_later(payload: Any, peer: Peer) -> None:
        raise error

    await cell.serve({"fail": fail_later if later else fail})
    client = await cell.connect()
    with pytest.raises(type(error)) as caught:
        await client.call("fail", deadline_s=SECONDS)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


async def test_foreign_exceptions_become_remote_errors(cell: Cell) -> None:
    def fail(payload: Any, peer: Peer) -> None:
        raise ZeroDivisionError("no")

    await cell.serve({"fail": fail})
    client = await cell.connect()
    with pytest.raises(RemoteError, match="ZeroDivisionError: no"):
        await client.call("fail", deadline_s=SECONDS)


async def test_result_that_messagepack_cannot_carry(cell: Cell) -> None:
    await cell.serve({"bad": lambda payload, peer: object(), "echo": echo})
    client = await cell.connect()
    with pytest.raises(RemoteError, match="TypeError"):
        await client.call("bad", deadline_s=SECONDS)
    with pytest.raises(TypeError):
        await client.call("echo", object(), deadline_s=SECONDS)
    assert await client.call("echo", 1, deadline_s=SECONDS) == 1


async def test_unknown_method_names_the_nearest(cell: Cell) -> None:
    await cell.serve({"prefill": echo})
    client = await cell.connect()
    with pytest.raises(ProtocolError, match="unknown method 'prefil'; did you mean 'prefill'"):
        await client.call("prefil", deadline_s=SECONDS)


# --- deadlines and cancellation -------------------------------------------------------------


async def test_deadline_is_named_and_ends_the_handler(cell: Cell) -> None:
    hanging = Hanging()
    await cell.serve({"hang": hanging})
    client = await cell.connect()
    with pytest.raises(DeadlineExceeded, match=r"rpc hang did not finish within 0\.05 s"):
        await client.call("hang", deadline_s=0.05)
    await soon(hanging.cancelled.wait())


async def test_server_keeps_the_deadline_even_if_the_client_does_not(cell: Cell) -> None:
    hanging = Hanging()
    await cell.serve({"hang": hanging})
    raw = await cell.raw()
    _, msgid, error, result = await soon(raw.ask(9, "hang", None, {"deadline_ms": 20}))
    assert (msgid, error["code"], result) == (9, "DeadlineExceeded", None)
    assert hanging.cancelled.is_set()


async def test_cancelling_a_call_cancels_its_handler(cell: Cell) -> None:
    hanging = Hanging()
    await cell.serve({"hang": hanging, "echo": echo})
    client = await cell.connect()
    call = asyncio.ensure_future(client.call("hang", deadline_s=SECONDS))
    await soon(hanging.started.wait())
    call.cancel()
    await soon(hanging.cancelled.wait())
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await client.call("echo", 1, deadline_s=SECONDS) == 1


async def test_cancelled_before_its_first_step_is_answered_too(cell: Cell) -> None:
    await cell.serve({"hang": Hanging()})
    raw = await cell.raw()
    raw.send([0, 5, "hang", []], [2, "$cancel", [5]])
    _, msgid, error, _ = await soon(raw.receive())
    assert (msgid, error["code"]) == (5, Cancelled.__name__)


@pytest.mark.parametrize("params", [[], [77], [[1]], ["x"]])
async def test_cancelling_an_unknown_call_is_harmless(cell: Cell, params: list[Any]) -> None:
    await cell.serve({"echo": echo})
    raw = await cell.raw()
    raw.send([2, "$cancel", params])
    assert await soon(raw.ask(3, "echo", 1)) == [1, 3, None, 1]


# --- notifications --------------------------------------------------------------------------


async def test_ten_thousand_notifications_in_order_before_the_answer(cell: Cell) -> None:
    async def stream(count: int, peer: Peer) -> str:
        for index in range(count):
            peer.notify("token", index)
            if index % 100 == 0:
                await peer.drain()
        return "done"

    await cell.serve({"stream": stream})
    received: list[Any] = []
    client = await cell.connect(on_notification=lambda *message: received.append(message))
    assert await client.call("stream", 10_000, deadline_s=SECONDS) == "done"
    assert received == [("token", index) for index in range(10_000)]


async def test_notifications_to_the_server_keep_their_order(cell: Cell) -> None:
    received: list[int] = []
    await cell.serve({"add": lambda payload, peer: received.append(payload), "echo": echo})
    client = await cell.connect()
    for index in range(1000):
        client.notify("add", index)
    await client.call("echo", deadline_s=SECONDS)
    assert received == list(range(1000))


async def test_failing_notification_handlers_do_not_end_the_connection(cell: Cell) -> None:
    def fail(payload: Any, peer: Peer) -> None:
        peer.notify("pong")
        raise ZeroDivisionError

    async def fail_later(payload: Any, peer: Peer) -> None:
        raise ZeroDivisionError

    def fail_here(method: str, payload: Any) -> None:
        raise ZeroDivisionError

    await cell.serve({"fail": fail, "later": fail_later, "echo": echo})
    client = await cell.connect(on_notification=fail_here)
    for method in ("fail", "later", "unknown"):
        client.notify(method)
    assert await client.call("echo", 1, deadline_s=SECONDS) == 1


# --- who may speak --------------------------------------------------------------------------


async def test_wrong_secret_is_refused(cell: Cell) -> None:
    await cell.serve({})
    with pytest.raises(AuthenticationFailed, match="client does not know"):
        await cell.connect(secret=b"another secret")


async def test_empty_secret_is_a_configuration_error(cell: Cell) -> None:
    with pytest.raises(ConfigError):
        RpcServer({}, secret=b"")
    await cell.serve({})
    with pytest.raises(ConfigError):
        await cell.connect(secret=b"")


async def test_other_version_is_refused_by_both_numbers(cell: Cell) -> None:
    await cell.serve({})
    with pytest.raises(ProtocolMismatch, match="speaks version 6, the peer 7") as caught:
        await cell.connect(version=6)
    assert (caught.value.ours, caught.value.theirs) == (6, 7)


async def test_the_previous_schema_version_is_refused_by_both_numbers(cell: Cell) -> None:
    assert SCHEMA_VERSION == 8
    await cell.serve({}, version=SCHEMA_VERSION)
    with pytest.raises(ProtocolMismatch, match="speaks version 7, the peer 8") as caught:
        await cell.connect(version=SCHEMA_VERSION - 1)
    assert (caught.value.ours, caught.value.theirs) == (7, 8)


async def test_a_client_and_a_server_of_this_release_speak_the_schema_version(cell: Cell) -> None:
    server = RpcServer({}, secret=SECRET)
    assert server.version == SCHEMA_VERSION
    await cell.serve({"echo": echo}, version=SCHEMA_VERSION - 1)
    with pytest.raises(ProtocolMismatch, match="speaks version 8, the peer 7"):
        await RpcClient.connect(*cell.address, secret=SECRET, name="test", deadline_s=SECONDS)


async def test_calls_before_authentication_are_refused_and_end_the_connection(cell: Cell) -> None:
    called: list[Any] = []
    await cell.serve({"touch": lambda payload, peer: called.append(payload)})
    raw = await cell.raw(authenticated=False)
    raw.send([2, "touch", [1]])
    _, _, error, _ = await soon(raw.ask(1, "touch", 2))
    assert error["code"] == AuthenticationFailed.__name__
    assert (await soon(raw.receive()))[1] == "$closing"
    assert await soon(raw.receive()) is None
    assert called == []


async def test_a_recorded_proof_is_worthless(cell: Cell) -> None:
    await cell.serve({})
    first = await cell.raw(authenticated=False)
    _, _, _, reply = await first.hello(version=VERSION)
    second = await cell.raw(authenticated=False)
    _, _, _, other = await second.hello(version=VERSION)
    assert reply["server_nonce"] != other["server_nonce"]
    _, _, error, _ = await soon(second.ask(2, "authenticate", {"proof": b"x" * 32}))
    assert error["code"] == AuthenticationFailed.__name__


@asynccontextmanager
async def impostor(answer: Callable[[Any], Any]) -> AsyncIterator[tuple[str, int]]:
    """A server that answers every call with `answer(request)`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = RawPeer(reader, writer)
        while (request := await raw.receive()) is not None:
            raw.send(answer(request))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


async def test_client_refuses_a_server_without_the_secret(cell: Cell) -> None:
    def answer(request: Any) -> Any:
        # The best an impostor can do: reflect the client's own proof.
        greeting = {"protocol_version": VERSION, "server_nonce": b"s" * 32}
        return [1, request[1], None, greeting if request[2] == "hello" else request[3][0]]

    async with impostor(answer) as cell.address:
        with pytest.raises(AuthenticationFailed, match="server does not know"):
            await cell.connect()


async def test_handshake_has_a_deadline(cell: Cell) -> None:
    await cell.serve({}, limits=RpcLimits(handshake_s=0.02))
    raw = await cell.raw(authenticated=False)
    _, method, [error] = await soon(raw.receive())
    assert (method, error["code"]) == ("$closing", "DeadlineExceeded")
    assert await soon(raw.receive()) is None


async def test_connecting_has_a_deadline(cell: Cell) -> None:
    async with impostor(lambda request: [2, "ignore", []]) as cell.address:
        with pytest.raises(DeadlineExceeded, match="connecting to"):
            await cell.connect(deadline_s=0.05)


async def test_connecting_without_a_listener_fails(cell: Cell) -> None:
    server = await cell.serve({})
    await server.close(0)
    with pytest.raises(ConnectionLost, match="cannot connect to 127"):
        await cell.connect()


# --- what must not be sent ------------------------------------------------------------------


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"\xff" * 1000,
        msgpack.packb([0, 1]),
        msgpack.packb([0, "1", "echo", []]),
        msgpack.packb([1, 1, None, None]),
        msgpack.packb([3, 1, "echo", []]),
        msgpack.packb({}),
        b"\x91" * 5000,
        b"\xd9\x01\xff",
    ],
    ids=lambda garbage: garbage[:6].hex(),
)
async def test_garbage_ends_its_connection_and_no_other(
    cell: Cell, garbage: bytes, authenticated: bool
) -> None:
    server = await cell.serve({"echo": echo})
    client = await cell.connect()
    raw = await cell.raw(authenticated=authenticated)
    raw.writer.write(garbage)
    assert (await soon(raw.receive()))[:2] == [2, "$closing"]
    assert await soon(raw.receive()) is None
    raw.close()
    assert await client.call("echo", 1, deadline_s=SECONDS) == 1
    await cell.connect(name="the next")
    assert len(server.peers) <= 3


async def test_same_msgid_twice_is_refused(cell: Cell) -> None:
    hanging = Hanging()
    await cell.serve({"hang": hanging})
    raw = await cell.raw()
    raw.send([0, 5, "hang", []], [0, 5, "hang", []])
    _, method, [error] = await soon(raw.receive())
    assert (method, error["message"]) == ("$closing", "msgid 5 is already in use")


async def test_too_long_a_message_is_not_sent(cell: Cell) -> None:
    await cell.serve({"echo": echo})
    client = await cell.connect(limits=RpcLimits(max_frame_bytes=1000))
    with pytest.raises(ProtocolError, match=r"10\d\d bytes, 1000 allowed"):
        await client.call("echo", b"x" * 1000, deadline_s=SECONDS)
    assert await client.call("echo", b"x" * 900, deadline_s=SECONDS) == b"x" * 900


async def test_too_long_a_message_ends_the_connection_with_both_numbers(cell: Cell) -> None:
    await cell.serve({"echo": echo}, limits=RpcLimits(max_frame_bytes=100_000))
    client = await cell.connect()
    with pytest.raises(ConnectionLost, match=r"too long: \d{6,} bytes received, 100000 allowed"):
        await client.call("echo", b"x" * 5_000_000, deadline_s=SECONDS)
    assert "100000 allowed" in str(await soon(client.closed))


async def test_too_long_a_result_is_an_error_of_that_call_only(cell: Cell) -> None:
    limits = RpcLimits(max_frame_bytes=1000)
    await cell.serve({"zeros": lambda count, peer: bytes(count)}, limits=limits)
    client = await cell.connect()
    with pytest.raises(ProtocolError, match="1000 allowed"):
        await client.call("zeros", 2000, deadline_s=SECONDS)
    assert await client.call("zeros", 2, deadline_s=SECONDS) == b"\0\0"


async def test_strangers_may_send_little(cell: Cell) -> None:
    await cell.serve({})
    raw = await cell.raw(authenticated=False)
    raw.send([2, "x", [b"x" * 100_000]])
    _, method, [error] = await soon(raw.receive())
    assert method == "$closing"
    assert "65536 allowed" in error["message"]


async def test_megabytes_travel(cell: Cell) -> None:
    await cell.serve({"echo": echo})
    client = await cell.connect()
    payload = bytes(range(256)) * 40_000
    assert await client.call("echo", payload, deadline_s=SECONDS) == payload


# --- peers that do not read -----------------------------------------------------------------


async def test_drain_waits_for_a_slow_reader(cell: Cell) -> None:
    sent: list[int] = []
    waiting = asyncio.Event()

    async def stream(count: int, peer: Peer) -> None:
        for index in range(count):
            peer.notify("chunk", bytes(100_000))
            sent.append(index)
            if not peer._writable.is_set():
                waiting.set()
            await peer.drain()

    await cell.serve({"stream": stream}, limits=RpcLimits(high_water_bytes=1 << 16))
    raw = await cell.raw()
    raw.send([0, 3, "stream", [500]])
    await soon(waiting.wait())
    assert len(sent) < 500
    messages = [await soon(raw.receive()) for _ in range(501)]
    assert [message[0] for message in messages] == [2] * 500 + [1]


async def test_peer_that_never_reads_is_cut_off(cell: Cell) -> None:
    def flood(payload: Any, peer: Peer) -> None:
        for _ in range(400):
            peer.notify("chunk", bytes(100_000))

    limits = RpcLimits(max_frame_bytes=1 << 20, max_backlog_bytes=1 << 20)
    server = await cell.serve({"flood": flood}, limits=limits)
    raw = await cell.raw()
    [peer] = server.peers
    raw.send([0, 3, "flood", []])
    assert "unread" in str(await soon(peer.closed))


async def test_what_a_peer_may_leave_unread_is_a_fraction_of_what_may_be_sent(cell: Cell) -> None:
    """Sixteen ranks that read nothing at once cost half a gigabyte and not four."""
    server = await cell.serve({})
    raw = await cell.raw()
    [peer] = server.peers
    chunk, queued = bytes(1 << 20), 0
    while not peer.closed.done():
        with suppress(ConnectionLost):
            peer.notify("chunk", chunk)
            queued = max(queued, peer._transport.get_write_buffer_size())
        await asyncio.sleep(0)
    assert "unread" in str(peer.closed.result())
    assert 16 << 20 < queued <= 34 << 20
    raw.close()


async def test_one_long_message_is_queued_whole(cell: Cell) -> None:
    await cell.serve({"echo": echo}, limits=RpcLimits(max_backlog_bytes=1 << 16))
    client = await cell.connect(limits=RpcLimits(max_backlog_bytes=1 << 16))
    payload = bytes(10 << 20)
    assert await client.call("echo", payload, deadline_s=SECONDS) == payload


# --- ends -----------------------------------------------------------------------------------


async def test_losing_the_server_fails_pending_calls_at_once(cell: Cell) -> None:
    hanging = Hanging()
    server = await cell.serve({"hang": hanging})
    client = await cell.connect()
    calls = [asyncio.ensure_future(client.call("hang", deadline_s=3600)) for _ in range(3)]
    await soon(hanging.started.wait())
    for peer in server.peers:
        peer.abort(ConnectionLost("cut"))
    for call in calls:
        with pytest.raises(ConnectionLost):
            await soon(call)
    assert isinstance(await soon(client.closed), ConnectionLost)
    with pytest.raises(ConnectionLost):
        await client.call("hang", deadline_s=SECONDS)
    with pytest.raises(ConnectionLost):
        client.notify("hang")


async def test_losing_the_client_cancels_its_handlers_and_is_reported(cell: Cell) -> None:
    hanging = Hanging()
    server = await cell.serve({"hang": hanging})
    client = await cell.connect(name="router 1")
    call = asyncio.ensure_future(client.call("hang", deadline_s=SECONDS))
    await soon(hanging.started.wait())
    await client.close()
    await soon(hanging.cancelled.wait())
    assert await soon(cell.disconnected.get()) == "router 1"
    assert not server.peers
    with pytest.raises(ConnectionLost, match="closed by this side"):
        await call


async def test_notifying_a_client_that_is_gone(cell: Cell) -> None:
    server = await cell.serve({})
    client = await cell.connect()
    [peer] = server.peers
    await client.close()
    await soon(cell.disconnected.get())
    with pytest.raises(ConnectionLost):
        peer.notify("token", 1)


async def test_strangers_are_not_reported_as_disconnected(cell: Cell) -> None:
    server = await cell.serve({})
    raw = await cell.raw(authenticated=False)
    await raw.hello(version=VERSION)
    [peer] = server.peers
    raw.close()
    await soon(asyncio.shield(peer.closed))
    assert cell.disconnected.empty()


async def test_closing_lets_handlers_finish_within_the_grace(cell: Cell) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    async def work(payload: Any, peer: Peer) -> str:
        started.set()
        await finish.wait()
        return "finished"

    server = await cell.serve({"work": work})
    client = await cell.connect()
    call = asyncio.ensure_future(client.call("work", deadline_s=SECONDS))
    await soon(started.wait())
    closing = asyncio.ensure_future(server.close(SECONDS))
    finish.set()
    assert await soon(call) == "finished"
    await soon(closing)
    await soon(client.closed)
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await cell.connect()


async def test_closing_cancels_handlers_after_the_grace(cell: Cell) -> None:
    hanging = Hanging()
    server = await cell.serve({"hang": hanging})
    client = await cell.connect()
    call = asyncio.ensure_future(client.call("hang", deadline_s=SECONDS))
    await soon(hanging.started.wait())
    await soon(server.close(0.01))
    assert hanging.cancelled.is_set()
    with pytest.raises((Cancelled, ConnectionLost)):
        await soon(call)
    await client.close()
    await client.close()


async def test_closing_a_server_that_never_started() -> None:
    await soon(RpcServer({}, secret=SECRET).close(0))


# --- trace context --------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
async def test_handlers_run_in_the_callers_trace(cell: Cell, later: bool) -> None:
    def trace_id(payload: Any, peer: Peer) -> str:
        return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)

    async def trace_id_later(payload: Any, peer: Peer) -> str:
        await asyncio.sleep(0)
        return trace_id(payload, peer)

    await cell.serve({"trace_id": trace_id_later if later else trace_id})
    client = await cell.connect()
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, True, trace.TraceFlags(1)))
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        assert await client.call("trace_id", deadline_s=SECONDS) == f"{0xABC:032x}"
    finally:
        otel_context.detach(token)
    assert await client.call("trace_id", deadline_s=SECONDS) == "0" * 32


@pytest.mark.parametrize(
    "meta", [{"traceparent": "nonsense"}, {"traceparent": 5}, {"traceparent": "00-" + "0" * 60}]
)
async def test_malformed_trace_context_is_ignored(cell: Cell, meta: dict[str, Any]) -> None:
    await cell.serve({"echo": echo})
    raw = await cell.raw()
    assert await soon(raw.ask(3, "echo", 1, meta)) == [1, 3, None, 1]


async def test_malformed_deadline_is_an_error_of_the_call(cell: Cell) -> None:
    await cell.serve({"echo": echo_later})
    raw = await cell.raw()
    _, _, error, _ = await soon(raw.ask(3, "echo", 1, {"deadline_ms": "soon"}))
    assert error["code"] == ProtocolError.__name__
