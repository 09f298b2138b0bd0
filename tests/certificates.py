"""Authorities and certificates for tests, as PEM files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from csps.protocols.rpc.tls import TlsFiles

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
DAY = timedelta(days=1)


@dataclass
class Authority:
    """An authority with a file of its own."""

    folder: Path
    name: str = "cell"

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed(self.name, self._key, authority=True, valid=DAY, uses=())
        self.path = self.folder / f"{self.name}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str = "process",
        *,
        valid: timedelta = DAY,
        uses: Sequence[ObjectIdentifier] = BOTH,
        password: bytes | None = None,
    ) -> TlsFiles:
        """Write a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(name, key, authority=False, valid=valid, uses=uses)
        paths = [self.folder / f"{self.name}-{name}.{kind}" for kind in ("crt", "key")]
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password)
                if password
                else serialization.NoEncryption(),
            )
        )
        return TlsFiles(certificate=str(paths[0]), key=str(paths[1]), authority=str(self.path))

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        authority: bool,
        valid: timedelta,
        uses: Sequence[ObjectIdentifier],
    ) -> x509.Certificate:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + valid)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return builder.sign(self._key, hashes.SHA256())
