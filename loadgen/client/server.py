"""The server under load: its address and the connections that are open to it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from csps.loadgen.client.connection import Connection, OnBody
from csps.protocols.errors import ConfigError, ConnectionLost, FaultError

CONNECT_S = 10.0
"""For a connection to be accepted."""
ASK_S = 30.0
"""For an answer that takes no computing, as the list of models."""


class Server:
    """Sends requests, each over a connection that is free, or a new one."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"'{base_url}' is no http or https address")
        self._host, self._tls = url.hostname, url.scheme == "https"
        self._port = url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/").removesuffix("/v1")
        own = {"Host": url.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (own | dict(headers or {})).items())
        self._free: list[Connection] = []
        self.connections = 0
        """That were opened."""

    def encode(self, path: str, body: bytes = b"", *, request_id: str = "") -> bytes:
        """The bytes of a POST, or of a GET where there is no body."""
        line = f"{'POST' if body else 'GET'} {self._path}{path} HTTP/1.1\r\n"
        extra = f"x-request-id: {request_id}\r\n" if request_id else ""
        return f"{line}{self._headers}{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, request: bytes, on_body: OnBody) -> int:
        """Send what `encode` made; returns the HTTP status when the answer has ended.

        Raises:
            FaultError: there is no connection, or it breaks.
        """
        connection = self._free.pop() if self._free else None
        if connection is None or not connection.reusable:
            connection = await self._connect()
        complete = False
        try:
            status = await connection.send(request, on_body)
            complete = True
            return status
        finally:
            if complete and connection.reusable:
                self._free.append(connection)
            else:
                connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    Connection,
                    self._host,
                    self._port,
                    ssl=ssl.create_default_context() if self._tls else None,
                )
        except TimeoutError:
            raise ConnectionLost(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise ConnectionLost(f"no connection: {error.strerror or error}") from None
        self.connections += 1
        return connection

    async def ask(self, path: str) -> Any:
        """GET some JSON.

        Raises:
            FaultError: the server cannot be reached, or answers something else.
        """
        body = bytearray()
        async with asyncio.timeout(ASK_S):
            status = await self.send(self.encode(path), lambda data, _: body.extend(data))
        if status != 200:
            raise FaultError(f"{path}: the server answered {status}")
        try:
            return json.loads(body)
        except ValueError:
            raise FaultError(f"{path}: the server did not answer JSON") from None

    def close(self) -> None:
        """Hang up."""
        for connection in self._free:
            connection.close()
        self._free.clear()
