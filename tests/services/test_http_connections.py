"""Connections before any request is whole: what a client may send without end, and what stops it.

Bytes are fed to the protocol class that `header_deadline.install` gives to every HTTP server of
Serve, over a transport in memory, so that processor time is the protocol's alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_gangs import until
from fake_service import FakeService, http_api
from live_server import serving
from ray.serve._private import replica
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.http_util import RequestIdMiddleware
from ray.serve.config import HTTPOptions
from uvicorn.server import ServerState

from csps.services.http import header_deadline
from csps.services.http.api import HttpApi
from csps.services.http.header_deadline import (
    CONNECTIONS_VARIABLE,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    TEXT_HEADERS,
    BoundedHttpProtocol,
)
from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

DEADLINE_S = 60
CALLBACK_S = 0.05
"""Processor time that one callback of the event loop may take."""
START = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
READ_BYTES = 256 * 1024
"""Most bytes that an event loop reads at a time."""


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; `close` only takes note, as while a client does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    waiting = 0

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_protocol(self, protocol: Any) -> None:
        raise AssertionError("the connection was handed to another protocol")

    @property
    def status(self) -> int | None:
        """Status of the first answer."""
        return int(self.written.split()[1]) if self.written else None

    @property
    def error(self) -> dict[str, Any]:
        """The error in the first answer."""
        error: dict[str, Any] = json.loads(self.written.partition(b"\r\n\r\n")[2])["error"]
        return error


class Connection:
    """One client's connection to an application that never answers, and what it cost."""

    def __init__(self, *, state: ServerState | None = None) -> None:
        async def waits(scope: Any, receive: Any, send: Any) -> None:
            self.scopes.append(scope)
            await asyncio.Event().wait()

        self.scopes: list[Any] = []
        config = uvicorn.Config(waits, log_config=None, lifespan="off")
        config.load()
        self.server_state = state or ServerState()
        loop = asyncio.get_running_loop()
        self.protocol = BoundedHttpProtocol(
            config=config, server_state=self.server_state, app_state={}, _loop=loop
        )
        self.transport = MemoryTransport()
        self.protocol.connection_made(self.transport)
        self.slowest_s = 0.0
        self.received = 0

    def receive(self, data: bytes) -> None:
        before = time.thread_time()
        self.protocol.data_received(data)
        self.slowest_s = max(self.slowest_s, time.thread_time() - before)
        self.received += len(data)

    def flood(self, data: bytes, *, most: int) -> None:
        """Send this again and again until the server stops listening."""
        while self.received < most and not self.transport.closed:
            self.receive(data)
        assert self.transport.closed, f"the server still listens after {self.received} bytes"
        assert self.slowest_s < CALLBACK_S

    def end(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        self.protocol.connection_lost(None)


@pytest.fixture
async def connection() -> Any:
    connection = Connection()
    yield connection
    connection.end()


# --- headers without end (found by a flood of one header: 16 MiB took 1.4 s of the loop) --------

ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "one header": (START + b"X-A: ", b"a" * 65536),
    "one header, large reads": (START + b"X-A: ", b"a" * READ_BYTES),
    "the name of a header": (START, b"a" * 65536),
    "the request line": (b"GET /", b"a" * 65536),
    "many headers": (START, b"a: b\r\n" * 10_000),
    "headers of some length": (START, b"name: %s\r\n" % (b"v" * 2000) * 32),
    "a trailer": (CHUNKED + b"0\r\nX-A: ", b"a" * 65536),
    "many trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000),
    "a chunk's extension": (CHUNKED + b"1;", b"a" * 65536),
    "empty lines": (b"", b"\r\n" * 32768),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_headers_without_end_are_refused(connection: Connection, kind: str) -> None:
    start, more = ENDLESS[kind]
    connection.receive(start)
    connection.flood(more, most=16 * 2**20)
    assert connection.received <= len(start) + MAX_HEADER_BYTES + 2 * len(more)
    assert connection.transport.status == 431
    assert connection.transport.error["code"] == "headers_too_large"


def headers(count: int, size: int) -> bytes:
    """Return a request of `count` headers whose names and values have `size` bytes in all."""
    names = [b"x-%03d" % index for index in range(count - 1)]
    left = size - len(b"Hostx/health") - sum(map(len, names))
    values = [b"v" * (left // len(names))] * len(names)
    values[0] += b"v" * (left % len(names))
    lines = [b"%s: %s\r\n" % header for header in zip(names, values, strict=True)]
    return START + b"".join(lines) + b"\r\n"


@pytest.mark.parametrize("piece", [1, 1000, READ_BYTES])
@pytest.mark.parametrize(
    ("count", "size", "refused"),
    [
        (MAX_HEADERS, MAX_HEADER_BYTES, False),
        (MAX_HEADERS, MAX_HEADER_BYTES + 1, True),
        (MAX_HEADERS + 1, 5000, True),
        (2, MAX_HEADER_BYTES, False),
        (2, MAX_HEADER_BYTES + 1, True),
    ],
)
async def test_headers_within_the_limits_are_served(
    connection: Connection, count: int, size: int, refused: bool, piece: int
) -> None:
    data = headers(count, size)
    for at in range(0, len(data), piece):
        connection.receive(data[at : at + piece])
    await asyncio.sleep(0)
    assert connection.transport.closed == refused
    assert len(connection.scopes) == (not refused)


async def test_requests_of_one_connection_are_counted_apart(connection: Connection) -> None:
    one = headers(MAX_HEADERS, MAX_HEADER_BYTES)
    for _ in range(MAX_PIPELINED):
        connection.receive(one)
    assert not connection.transport.closed


async def test_requests_that_do_not_wait_for_their_answers_are_limited(
    connection: Connection,
) -> None:
    """64 KiB of them took 60 ms of the loop, and each stayed in memory."""
    for _ in range(4):
        connection.receive((START + b"\r\n") * 7000)
    assert connection.slowest_s < CALLBACK_S
    assert len(connection.protocol.pipeline) <= MAX_PIPELINED
    assert connection.protocol.flow.read_paused


@pytest.mark.parametrize("size", [1, 4, 64, 4096])
async def test_a_body_in_tiny_chunks_takes_little_time(connection: Connection, size: int) -> None:
    chunk = b"%x\r\n%s\r\n" % (size, b"a" * size)
    connection.receive(CHUNKED)
    connection.receive(chunk * (READ_BYTES // len(chunk)))
    assert connection.slowest_s < CALLBACK_S
    assert not connection.transport.closed


async def test_a_large_body_is_no_header(connection: Connection) -> None:
    connection.receive(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
    for _ in range(40):
        connection.receive(b"a" * READ_BYTES)
        connection.protocol.cycle.body.clear()
    assert not connection.transport.closed


async def test_a_websocket_handshake_is_an_ordinary_request(connection: Connection) -> None:
    """Another protocol's class has none of these limits."""
    connection.receive(START + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    await asyncio.sleep(0)
    assert [scope["type"] for scope in connection.scopes] == ["http"]


# --- how many connections --------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "2")
    state = ServerState()
    connections = [Connection(state=state) for _ in range(3)]
    refused = connections.pop()
    assert refused.transport.status == 429
    assert b"\r\nRetry-After: 1\r\n" in refused.transport.written
    assert not any(connection.transport.closed for connection in connections)
    refused.end()
    connections.pop().end()
    assert not Connection(state=state).transport.closed


# --- headers that are not text ---------------------------------------------------------------


class ServeEntry:
    """Serve's own way from its HTTP server to the application, up to where it admits a request."""

    def __init__(self) -> None:
        (entry,) = (
            cls
            for cls in vars(replica).values()
            if isinstance(cls, type) and "_direct_ingress_asgi" in vars(cls)
        )
        self._replica: Any = object.__new__(entry)
        self._replica._user_callable_initialized = True
        self._replica._route_prefix = "/"
        self._replica._deployment_id = DeploymentID(name="Router")
        self._replica._user_callable_asgi_app = None
        self._replica._http_options = HTTPOptions()
        self._replica._can_accept_request = self._admit
        self.admitted: list[RequestMetadata] = []

    def _admit(self, metadata: RequestMetadata) -> bool:
        self.admitted.append(metadata)
        raise Admitted

    async def enter(self, scope: Any) -> None:
        async def nothing(*message: Any) -> None: ...

        with suppress(Admitted):
            await RequestIdMiddleware(self._replica._direct_ingress_asgi)(scope, nothing, nothing)


class Admitted(Exception):
    pass


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve_multiplexed_model_id",
        b"traceparent",
        b"user-agent",
        b"authorization",
        b"x-slo-ttft-ms",
    ],
)
async def test_a_header_that_is_not_utf8_is_never_an_internal_error(
    connection: Connection, name: bytes
) -> None:
    connection.receive(START + name + b": \xff\r\n\r\n")
    await asyncio.sleep(0)
    if name in TEXT_HEADERS:
        assert connection.transport.status == 400
        assert connection.transport.error["param"] == name.decode()
        assert not connection.scopes
    else:
        (scope,) = connection.scopes
        assert not any(value == b"\xff" for _, value in scope["headers"])
        serve = ServeEntry()
        await serve.enter(scope)
        assert serve.admitted


async def test_serve_reads_headers_that_are_utf8(connection: Connection) -> None:
    connection.receive(START + "x-request-id: né\r\nuser-agent: Zoë\r\n\r\n".encode())
    await asyncio.sleep(0)
    serve = ServeEntry()
    await serve.enter(connection.scopes[0])
    assert [metadata.request_id for metadata in serve.admitted] == ["né"]


# --- over sockets ----------------------------------------------------------------------------


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    header_deadline.install()


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> RequestParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))


@pytest.fixture
async def service(parser: RequestParser) -> FakeService:
    return FakeService(parser.tokenizer, "Yes.")


@pytest.fixture
def api(parser: RequestParser, service: FakeService) -> HttpApi:
    return http_api(parser, service)


async def answer_to(url: str, *parts: bytes) -> bytes:
    """Send all parts, whatever comes back, and return what came until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    async with asyncio.timeout(DEADLINE_S):
        for part in parts:
            writer.write(part)
            await writer.drain()
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.usefixtures("_installed")
async def test_a_client_that_goes_on_sending_still_gets_its_refusal(api: HttpApi) -> None:
    async with serving(api.app()) as url:
        answer = await answer_to(url, START + b"X-A: ", *[b"a" * 65536] * 64)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


@pytest.mark.usefixtures("_installed")
async def test_a_refusal_comes_behind_the_answer_before_it(api: HttpApi) -> None:
    async with serving(api.app()) as url:
        answer = await answer_to(url, START + b"\r\n" + START + b"X-A: ", b"a" * 200_000)
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert second.startswith(b"431 ")


# --- clients that do not read ----------------------------------------------------------------


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_loses_its_connection(
    api: HttpApi, service: FakeService, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    dropped = small_buffers(monkeypatch)
    monkeypatch.setattr(header_deadline, "WRITE_DEADLINE_S", 0.05)
    service.script *= 1000
    fields = {"stream": stream, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20}
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "tiny", "messages": messages, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    async with serving(api.app()) as url, asyncio.timeout(DEADLINE_S):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(head % len(body) + body)
            client.setblocking(False)
            await dropped.wait()
            answer = await rest_of(client)
        await until(lambda: service.handles[0].ended and not api.answers.in_use)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"[DONE]" not in answer, "the answer is whole"
    assert b'"usage"' not in answer, "the answer is whole"
    assert service.handles[0].unread_tokens == 0


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have the kernel take little for a client; return what is set when a connection is dropped."""
    dropped = asyncio.Event()
    made, expired = BoundedHttpProtocol.connection_made, BoundedHttpProtocol._write_expired

    def connection_made(self: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def write_expired(self: BoundedHttpProtocol, waiting: int) -> None:
        expired(self, waiting)
        if self.transport.is_closing():
            dropped.set()

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", connection_made)
    monkeypatch.setattr(BoundedHttpProtocol, "_write_expired", write_expired)
    return dropped


async def rest_of(client: socket.socket) -> bytes:
    """Return what the server has sent until the connection ended, in whatever way."""
    loop, received = asyncio.get_running_loop(), b""
    with suppress(ConnectionResetError):
        while part := await loop.sock_recv(client, 2**20):
            received += part
    return received


async def test_a_client_that_reads_slowly_keeps_its_connection(connection: Connection) -> None:
    protocol, transport = connection.protocol, connection.transport
    for waiting, left, dropped in ((100_000, 60_000, False), (60_000, 59_000, True)):
        transport.waiting = left
        protocol._write_expired(waiting)
        assert transport.closed == dropped
