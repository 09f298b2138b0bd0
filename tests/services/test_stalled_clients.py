"""Clients that stop in the middle of a request get an answer and lose their connection.

Real sockets: before HAProxy with the configuration that Serve gives it, without Ray, and before
uvicorn alone, as Serve's own proxies and the router's port are.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn.config
from fake_service import FakeService, http_api
from live_haproxy import haproxy
from live_server import serving
from stalled_clients import HALF_SENT, HEADERS, IN_THE_BODY, IN_THE_HEADERS, outcome

from csps.protocols.core.errors import ConfigError
from csps.services.http import header_deadline
from csps.services.http.request_parser import RequestParser
from csps.services.launch import reverse_proxy as http_front
from csps.services.settings.settings import HttpSettings, Settings

PATIENCE_S = 0.3
"""Deadline for headers and for the next byte of a body."""
HAPROXY_S = 2
"""A longer deadline, as by default: HAProxy would otherwise answer before the router, with 400."""
DEADLINE_S = 60.0
STATUS = dict.fromkeys(IN_THE_HEADERS | IN_THE_BODY, 408) | {
    "unknown path": 404,
    "too long": 413,
}


@pytest.fixture
def patience_s(request: pytest.FixtureRequest) -> float:
    """Return the deadline, unless a test sets another one."""
    asked: float = getattr(request, "param", PATIENCE_S)
    return asked


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    monkeypatch.setenv(header_deadline.VARIABLE, str(patience_s))
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    assert header_deadline.install() == []


@pytest.fixture
async def router(tiny_llama: Path, patience_s: float) -> AsyncIterator[tuple[str, int]]:
    patience = HttpSettings(body_silence_s=patience_s)
    settings = Settings(model=str(tiny_llama), served_model_name="tiny", http=patience)
    parser = RequestParser(settings)
    api = http_api(parser, FakeService(parser.tokenizer, "Yes."))
    async with serving(api.app()) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.fixture
async def front(router: tuple[str, int]) -> AsyncIterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        async with haproxy(Path(folder), router, client_silence_s=HAPROXY_S) as address:
            yield address


async def test_haproxy_answers_and_disconnects(front: tuple[str, int]) -> None:
    await check_all(front)


async def test_uvicorn_answers_and_disconnects(router: tuple[str, int]) -> None:
    await check_all(router)


async def check_all(address: tuple[str, int]) -> None:
    clients = (outcome(*address, sent, deadline_s=DEADLINE_S) for sent in HALF_SENT.values())
    seen = dict(zip(HALF_SENT, await asyncio.gather(*clients), strict=True))
    assert {name: end.status for name, end in seen.items()} == STATUS
    assert all(end.open_s >= PATIENCE_S for end in seen.values())


async def test_a_silent_connection_is_closed_without_an_answer(router: tuple[str, int]) -> None:
    """There is no request to answer."""
    reader, writer = await asyncio.open_connection(*router)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read() == b""
    writer.close()


WHOLE = HEADERS + b"content-length: 2\r\n\r\n{}"


async def test_the_next_request_of_a_connection_has_the_same_deadline(
    router: tuple[str, int],
) -> None:
    reader, writer = await asyncio.open_connection(*router)
    async with asyncio.timeout(DEADLINE_S):
        writer.write(WHOLE)
        assert b" 400 " in await reader.readline()
        writer.write(HEADERS)
        rest = await reader.read()
    assert b"HTTP/1.1 408 " in rest
    writer.close()


@pytest.mark.parametrize("patience_s", [DEADLINE_S], indirect=True)
async def test_a_request_in_time_is_served_through_haproxy(front: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*front)
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 3}'
    async with asyncio.timeout(DEADLINE_S):
        writer.write(HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body[:9])
        await writer.drain()
        writer.write(body[9:])
        assert b" 200 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_an_invalid_deadline_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(header_deadline.VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"^CSPS_HEADER_DEADLINE_S is '{text}'"):
        http_front.reverse_proxy_environment(tmp_path, tmp_path, ports=[1, 2, 3], host="127.0.0.1")
