"""RPC over mutual TLS: who gets in, who does not, and which files are refused at the start."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates import DAY, Authority
from cryptography.x509.oid import ExtendedKeyUsageOID

from csps.protocols.core.errors import (
    AuthenticationFailed,
    ConfigError,
    CspsError,
    FaultError,
    ProtocolError,
)
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.server import Peer, RpcServer
from csps.protocols.rpc.tls import Tls, TlsFiles
from csps.protocols.rpc.wire import RpcLimits

SECRET = b"a cluster secret"
SECONDS = 60.0
LONG = b"x" * (5 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return Tls.load(authority.issue())


@asynccontextmanager
async def serving(tls: Tls | None, **limits: Any) -> AsyncIterator[tuple[str, int]]:
    def echo(payload: Any, peer: Peer) -> Any:
        return payload

    server = RpcServer({"echo": echo}, secret=SECRET, tls=tls, limits=RpcLimits(**limits))
    address = await server.start("127.0.0.1")
    try:
        yield address
    finally:
        await server.close(0.0)


async def ask(
    address: tuple[str, int], tls: Tls | None, payload: object = 1, secret: bytes = SECRET
) -> object:
    client = await RpcClient.connect(
        *address, secret=secret, name="test", deadline_s=SECONDS, tls=tls
    )
    try:
        return await client.call("echo", payload, deadline_s=SECONDS)
    finally:
        await client.close()


async def test_long_messages_arrive_whole(tls: Tls) -> None:
    async with serving(tls) as address:
        assert await ask(address, tls, LONG) == LONG


async def test_a_peer_that_breaks_a_rule_learns_which(tls: Tls) -> None:
    """TLS has no half-closed connections."""
    async with serving(tls) as address:
        with pytest.raises(AuthenticationFailed, match="does not know the cluster secret"):
            await ask(address, tls, secret=b"another secret")


async def test_a_client_without_a_certificate_is_refused(tls: Tls, authority: Authority) -> None:
    without = ssl.create_default_context(cafile=authority.path)
    without.check_hostname = False
    async with serving(tls) as address:
        with pytest.raises(FaultError):
            await ask(address, replace(tls, client=without))
        assert await ask(address, tls) == 1


@pytest.mark.slow
async def test_a_client_without_tls_is_refused(tls: Tls) -> None:
    async with serving(tls) as address:
        with pytest.raises(CspsError) as refused:
            await ask(address, None)
        assert isinstance(refused.value, FaultError | ProtocolError)


async def test_a_server_without_tls_is_refused(tls: Tls) -> None:
    async with serving(None) as address:
        with pytest.raises(FaultError, match="cannot connect"):
            await ask(address, tls)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_certificate_of_another_authority_is_refused(
    tls: Tls, tmp_path: Path, side: str
) -> None:
    strange = Tls.load(Authority(tmp_path, "strangers").issue())
    ours, theirs = (tls, strange) if side == "client" else (strange, tls)
    async with serving(ours) as address:
        with pytest.raises(FaultError):
            await ask(address, theirs)


async def test_a_certificate_of_another_authority_is_refused_by_the_server_alone(
    tls: Tls, authority: Authority, tmp_path: Path
) -> None:
    """A client that accepts every server."""
    stranger = Tls.load(Authority(tmp_path, "strangers").issue())
    stranger.client.load_verify_locations(authority.path)
    async with serving(tls) as address:
        with pytest.raises(FaultError):
            await ask(address, stranger)


async def test_whoever_does_not_finish_the_handshake_is_cut_off(tls: Tls) -> None:
    async with serving(tls, handshake_s=0.2) as address, asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b""
        writer.close()


async def test_nothing_readable_is_sent(tls: Tls) -> None:
    """A relay between both sees neither names of methods nor payloads."""
    seen = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async with serving(tls) as address:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(*address)
            await asyncio.gather(copy(reader, back), copy(there, writer))

        relaying = await asyncio.start_server(relay, "127.0.0.1")
        port = relaying.sockets[0].getsockname()[1]
        assert await ask(("127.0.0.1", port), tls, "a private prompt") == "a private prompt"
        relaying.close()
        for known in (b"hello", b"authenticate", b"echo", b"private"):
            assert known not in seen
        assert len(seen) > 1000


def other_key(authority: Authority) -> TlsFiles:
    return replace(authority.issue("one"), key=authority.issue("two").key)


def no_authority(authority: Authority) -> TlsFiles:
    files = authority.issue("lone")
    return replace(files, authority=files.key)


def other_authority(authority: Authority) -> TlsFiles:
    return replace(
        authority.issue("strange"), authority=str(Authority(authority.folder, "other").path)
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            lambda cell: replace(cell.issue(), certificate="/none.crt"),
            r"^tls\.certificate: cannot read /none\.crt: No such file",
        ),
        (lambda cell: replace(cell.issue(), key="/"), r"^tls\.key: cannot read /: Is a directory"),
        (other_key, r"^tls\.key: .*cell-two\.key is not the key of the certificate"),
        (
            lambda cell: cell.issue("locked", password=b"sesame"),
            r"^tls\.key: .*locked\.key and the certificate are not .* without a password",
        ),
        (no_authority, r"^tls\.authority: .* holds no PEM certificate"),
        (
            lambda cell: cell.issue("old", valid=-DAY),
            r"^tls\.certificate: .*old\.crt: certificate has expired; it must be valid now",
        ),
        (other_authority, r"^tls\.certificate: .* must be .* signed by .*other\.pem"),
        (
            lambda cell: cell.issue("half", uses=[ExtendedKeyUsageOID.SERVER_AUTH]),
            r"^tls\.certificate: .*purpose; .* for servers and clients",
        ),
    ],
)
def test_files_that_no_process_could_use_are_refused(
    authority: Authority, files: Callable[[Authority], TlsFiles], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Tls.load(files(authority))
    assert "\n" not in str(refused.value)
