"""A MessagePack-RPC peer written from the specification alone: the tests' oracle for the wire."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import Any, Self

import msgpack


def proof(secret: bytes, role: bytes, version: int, name: str, *nonces: bytes) -> bytes:
    parts = [role, str(version).encode(), name.encode(), *nonces]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


class RawPeer:
    """One connection; sends any bytes, reads one object at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._unpacker = msgpack.Unpacker()

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Self:
        return cls(*await asyncio.open_connection(*address))

    def send(self, *messages: Any) -> None:
        self.writer.write(b"".join(map(msgpack.packb, messages)))

    async def receive(self) -> Any:
        """The next object; None at the end of the stream."""
        while True:
            for message in self._unpacker:
                return message
            data = await self.reader.read(1 << 16)
            if not data:
                return None
            self._unpacker.feed(data)

    async def ask(self, msgid: int, method: str, *params: Any) -> Any:
        self.send([0, msgid, method, list(params)])
        return await self.receive()

    async def hello(self, *, version: int, nonce: bytes = b"n" * 32, name: str = "raw") -> Any:
        greeting = {"protocol_version": version, "client_nonce": nonce, "name": name}
        return await self.ask(1, "hello", greeting)

    async def authenticate(self, secret: bytes, *, version: int) -> None:
        nonce, name = b"n" * 32, "raw"
        _, _, error, reply = await self.hello(version=version, nonce=nonce, name=name)
        assert error is None
        nonces = (nonce, reply["server_nonce"])
        answer = {"proof": proof(secret, b"client", version, name, *nonces)}
        _, _, error, reply = await self.ask(2, "authenticate", answer)
        assert error is None
        assert reply["proof"] == proof(secret, b"server", version, name, *nonces)

    def close(self) -> None:
        self.writer.close()
