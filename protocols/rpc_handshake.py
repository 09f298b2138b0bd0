"""Who is there: the first two calls on every connection. No I/O.

::

    hello         {protocol_version, client_nonce, name}  ->  {protocol_version, server_nonce}
    authenticate  {proof: P("client")}                    ->  {proof: P("server")}

`P(role)` is the HMAC-SHA256, under the cluster secret, of the role, the version, the client's name
and both nonces. Fresh nonces of both sides keep a recorded handshake from being replayed, the role
keeps one side's proof from being reflected as the other's. The client proves itself first: a
stranger who merely connects gets nothing that he could test guesses of the secret against.

This authenticates the peers at the time of connecting. It does not encrypt: the network between
the nodes of a cluster is trusted not to be listened to or altered.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from csps.protocols.errors import (
    AuthenticationFailed,
    ConfigError,
    ProtocolError,
    ProtocolMismatch,
    abridged,
)
from csps.protocols.schema import pack, unpack

HELLO, AUTHENTICATE = "hello", "authenticate"
_NONCE_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Hello:
    protocol_version: int
    client_nonce: bytes
    name: str
    """What the client calls itself, for logs; the secret does not vouch for it."""


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    protocol_version: int
    server_nonce: bytes


@dataclass(frozen=True, kw_only=True)
class Proof:
    proof: bytes


def _proof(
    secret: bytes, role: Literal["client", "server"], hello: Hello, server_nonce: bytes
) -> bytes:
    mac = hmac.new(secret, digestmod="sha256")
    version = str(hello.protocol_version).encode()
    for part in (role.encode(), version, hello.name.encode(), hello.client_nonce, server_nonce):
        # Lengths keep two different lists of parts from being the same bytes.
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise ConfigError("the cluster secret must not be empty")


def _check_version(ours: int, theirs: object) -> None:
    """Before anything else is looked at: another version may have other fields."""
    if type(theirs) is not int:
        raise ProtocolError(f"protocol_version must be an integer, got {abridged(theirs)}")
    if theirs != ours:
        raise ProtocolMismatch(ours=ours, theirs=theirs)


class ServerHandshake:
    """The server's half, one for each connection."""

    def __init__(self, secret: bytes, version: int) -> None:
        _check_secret(secret)
        self._secret, self._version = secret, version
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._hello: Hello | None = None
        self.done = False

    @property
    def name(self) -> str:
        """What the client called itself; empty before it did."""
        return self._hello.name if self._hello else ""

    def answer(self, method: str, payload: Any) -> dict[str, Any]:
        """The result of a call that arrived before the handshake was done.

        Raises
        ------
        ProtocolMismatch, AuthenticationFailed, ProtocolError
            The connection must be closed.
        """
        if method == HELLO and self._hello is None:
            return self._greet(payload)
        if method == AUTHENTICATE and self._hello is not None:
            return self._authenticate(self._hello, payload)
        raise AuthenticationFailed(
            f"call {abridged(method)} refused: a connection starts with one "
            f"'{HELLO}' and then '{AUTHENTICATE}'"
        )

    def _greet(self, payload: Any) -> dict[str, Any]:
        _check_version(
            self._version, payload.get("protocol_version") if isinstance(payload, dict) else None
        )
        hello = unpack(Hello, payload)
        if len(hello.client_nonce) != _NONCE_BYTES:
            raise ProtocolError(
                f"client_nonce must have {_NONCE_BYTES} bytes, got {len(hello.client_nonce)}"
            )
        self._hello = hello
        return pack(HelloReply(protocol_version=self._version, server_nonce=self._nonce))

    def _authenticate(self, hello: Hello, payload: Any) -> dict[str, Any]:
        expected = _proof(self._secret, "client", hello, self._nonce)
        if not hmac.compare_digest(unpack(Proof, payload).proof, expected):
            raise AuthenticationFailed("the client does not know the cluster secret")
        self.done = True
        return pack(Proof(proof=_proof(self._secret, "server", hello, self._nonce)))


class ClientHandshake:
    """The client's half."""

    def __init__(self, secret: bytes, version: int, name: str) -> None:
        _check_secret(secret)
        self._secret = secret
        self._hello = Hello(
            protocol_version=version, client_nonce=secrets.token_bytes(_NONCE_BYTES), name=name
        )

    def hello(self) -> dict[str, Any]:
        """Payload of `hello`."""
        return pack(self._hello)

    def authenticate(self, reply: Any) -> dict[str, Any]:
        """Payload of `authenticate`, given the answer to `hello`."""
        self._server_nonce = unpack(HelloReply, reply).server_nonce
        return pack(Proof(proof=_proof(self._secret, "client", self._hello, self._server_nonce)))

    def verify(self, reply: Any) -> None:
        """Check the answer to `authenticate`; `AuthenticationFailed` unless the server knows."""
        expected = _proof(self._secret, "server", self._hello, self._server_nonce)
        if not hmac.compare_digest(unpack(Proof, reply).proof, expected):
            raise AuthenticationFailed("the server does not know the cluster secret")
