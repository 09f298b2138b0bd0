"""Read the two kinds of secrets: the one between our own processes, and the keys of clients.

Neither is a setting: Ray writes application arguments into its log and shows them in its dashboard.
The cluster secret is made when the application is built. It travels in the deployments' constructor
arguments, which Ray does not show. Only the router reads API keys.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from csps.protocols.core.errors import ConfigError, Unauthorized

SECRET_VARIABLE = "CSPS_CLUSTER_SECRET"
KEYS_VARIABLE = "CSPS_API_KEYS"
SECRET_MIN_LENGTH = 16
TIMELINE_WORDS = ("everyone", "nobody")


@dataclass(frozen=True)
class ClusterSecret:
    """Secret that router and ranks share; its `repr` does not show it."""

    value: bytes = field(repr=False)


def cluster_secret() -> ClusterSecret:
    """Return the secret of `CSPS_CLUSTER_SECRET`, or a fresh one for this application start."""
    # Ray builds an application once and reuses the result while its arguments are unchanged, so a
    # fresh secret does not restart replicas by itself.
    given = os.environ.get(SECRET_VARIABLE)
    if given is None:
        return ClusterSecret(secrets.token_bytes(32))
    if len(given) < SECRET_MIN_LENGTH:
        raise ConfigError(f"{SECRET_VARIABLE} is shorter than {SECRET_MIN_LENGTH} characters")
    return ClusterSecret(given.encode())


def known_keys(path: str | None) -> list[str]:
    """Return the API keys of the environment and of `path`, one a line; `#` starts a comment.

    Raises:
        ConfigError: the file cannot be read, or holds no key: no server is open by mistake.
    """
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        keys += _keys_of(Path(path).expanduser())
    return [key for key in keys if key]


class ApiKeys:
    """Keys of the clients that may use the server, as digests. Without any, the server is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Load the keys that `known_keys` returns."""
        return cls(known_keys(path))

    def check(self, authorization: str | None) -> bytes:
        """Accept `Bearer <key>`; compare every known key, in constant time.

        Returns:
            The key's digest; empty if the server is open.

        Raises:
            Unauthorized: the key is missing or unknown.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(
                "You didn't provide an API key. Put it into an Authorization header, as in "
                "'Authorization: Bearer KEY'."
            )
        given = _digest(key.strip())
        # A list and not a generator: `any` must not stop at the first match.
        if not any([hmac.compare_digest(given, known) for known in self._digests]):  # noqa: C419
            raise Unauthorized
        return given


class TimelineClients:
    """Clients that may request a timeline: thousands of spans, which ranks have to write."""

    def __init__(self, keys: ApiKeys | None = None, *, everyone: bool = True) -> None:
        """Allow everyone, nobody, or the holders of some keys.

        Args:
            keys: keys of the allowed clients; None means everyone or nobody.
        """
        self._keys, self._everyone = keys, everyone

    @classmethod
    def load(cls, setting: str) -> TimelineClients:
        """Read the setting `telemetry.timeline_clients`.

        Raises:
            ConfigError: the setting names a file that cannot be read, or that holds no key.
        """
        if setting in TIMELINE_WORDS:
            return cls(everyone=setting == "everyone")
        keys = _keys_of(Path(setting), setting="telemetry.timeline_clients")
        return cls(ApiKeys(key for key in keys if key), everyone=False)

    def include(self, authorization: str | None) -> bool:
        """Return True if the client with this Authorization header may request a timeline."""
        if self._keys is None:
            return self._everyone
        try:
            self._keys.check(authorization)
        except Unauthorized:
            return False
        return True


def _keys_of(path: Path, *, setting: str = "api_keys_file") -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{setting}: cannot read {path}: {exc}") from None
    keys = [line.split("#", 1)[0].strip() for line in lines]
    if not any(keys):
        raise ConfigError(f"{setting}: {path} holds no key")
    return keys


def _digest(key: str) -> bytes:
    # Equal lengths, so that the comparison's time does not depend on a key's length.
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
