"""Mutual TLS for connections of MessagePack-RPC.

Both sides show a certificate of one authority, whose only purpose should be this cell: whoever has
a certificate of it may connect. Names in certificates are not compared, because ranks and routers
find each other by addresses that nobody knows before. The handshake by the cluster secret
(`protocols.rpc.wire`) follows inside.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from csps.protocols.core.errors import ConfigError

_PARTS = 8
"""Messages of a handshake in both directions, and more."""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files."""

    certificate: str
    """This process's certificate, with those between it and the authority."""
    key: str
    """The certificate's private key, without a password."""
    authority: str
    """Certificates of the authority that signs those of all processes."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Contexts for both ends of a connection."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(cls, files: TlsFiles) -> Self:
        """Read the files and check that two processes with them accept each other.

        Raises:
            ConfigError: a file cannot be read, key and certificate do not belong together, or the
                certificate is expired, of another authority or not for both ends.
        """
        tls = cls(
            server=_context(ssl.PROTOCOL_TLS_SERVER, files),
            client=_context(ssl.PROTOCOL_TLS_CLIENT, files),
        )
        tls._check(files)
        return tls

    def _check(self, files: TlsFiles) -> None:
        """Hold a handshake in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            self.client.wrap_bio(to_client, to_server),
            self.server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(_PARTS):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLCertVerificationError as exc:
                    raise ConfigError(
                        f"tls.certificate: {files.certificate}: {exc.verify_message}; it must be "
                        f"valid now, signed by {files.authority}, and for servers and clients"
                    ) from None


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    for name in ("certificate", "key", "authority"):
        _check_readable(f"tls.{name}", getattr(files, name))
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError:
        raise ConfigError(f"tls.authority: {files.authority} holds no PEM certificate") from None
    try:
        # Without the callback OpenSSL asks on the terminal.
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as exc:
        why = (
            "is not the key of the certificate"
            if exc.reason == "KEY_VALUES_MISMATCH"
            else "and the certificate are not a PEM certificate and its key without a password"
        )
        raise ConfigError(f"tls.key: {files.key} {why} ({files.certificate})") from None
    return context


def _no_password() -> str:
    return ""


def _check_readable(name: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as exc:
        raise ConfigError(f"{name}: cannot read {path}: {exc.strerror}") from None
