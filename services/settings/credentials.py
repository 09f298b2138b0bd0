"""The two kinds of secrets: between our own processes, and from clients.

Neither is a setting: Ray writes application arguments into its log and shows them in its
dashboard. The cluster secret is made when the application is built and travels in the deployments'
constructor arguments, which Ray keeps to itself; API keys are read by the router alone.
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
    """Shared by router and ranks; does not show itself when printed."""

    value: bytes = field(repr=False)


def cluster_secret() -> ClusterSecret:
    """The secret from `CSPS_CLUSTER_SECRET`, or a fresh one for this application start.

    Ray builds an application once and keeps what came out for as long as its arguments stay, so a
    fresh secret does not restart replicas by itself.
    """
    given = os.environ.get(SECRET_VARIABLE)
    if given is None:
        return ClusterSecret(secrets.token_bytes(32))
    if len(given) < SECRET_MIN_LENGTH:
        raise ConfigError(f"{SECRET_VARIABLE} is shorter than {SECRET_MIN_LENGTH} characters")
    return ClusterSecret(given.encode())


def known_keys(path: str | None) -> list[str]:
    """API keys of the environment and of `path`, one a line; `#` starts a comment.

    Raises:
        ConfigError: the file cannot be read, or holds no key: better than an open server.
    """
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        keys += _keys_of(Path(path).expanduser())
    return [key for key in keys if key]


class ApiKeys:
    """Who may use the server. Holds digests only; without any key the server is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """As `known_keys` has them."""
        return cls(known_keys(path))

    def check(self, authorization: str | None) -> bytes:
        """Accept `Bearer <key>`; every known key is compared, in constant time.

        Returns:
            The key's digest; nothing where the server is open.

        Raises:
            Unauthorized: no key, or one that nobody was given.
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
    """Who may ask for the timeline of a request: thousands of spans, which ranks have to write."""

    def __init__(self, keys: ApiKeys | None = None, *, everyone: bool = True) -> None:
        """
        Args:
            keys: whose holders may, if not everyone or nobody.
        """
        self._keys, self._everyone = keys, everyone

    @classmethod
    def load(cls, setting: str) -> TimelineClients:
        """As `telemetry.timeline_clients` has it.

        Raises:
            ConfigError: it is a file that cannot be read, or that holds no key.
        """
        if setting in TIMELINE_WORDS:
            return cls(everyone=setting == "everyone")
        keys = _keys_of(Path(setting), setting="telemetry.timeline_clients")
        return cls(ApiKeys(key for key in keys if key), everyone=False)

    def include(self, authorization: str | None) -> bool:
        """Whether a client that says who it is in this way may."""
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
