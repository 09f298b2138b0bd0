"""Read the two kinds of secrets: the one between our own processes, and the keys of clients.

Neither is a setting: Ray writes application arguments into its log and shows them in its dashboard.
The cluster secret is made when the application is built. It travels in the deployments' constructor
arguments, which Ray does not show. Only the router reads API keys.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from csps.protocols.core.errors import ConfigError, Unauthorized
from csps.services.requests.request_spec import KEY_REVOKED, NO_KEY, ApiKey

_log = logging.getLogger(__name__)

SECRET_VARIABLE = "CSPS_CLUSTER_SECRET"
KEYS_VARIABLE = "CSPS_API_KEYS"
SECRET_MIN_LENGTH = 16
WATCH_PERIOD_S = 1.0
"""Time between two readings of the key file; a change counts at the second."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    """Return the API keys of the environment and of the file `path`, as `KEY` or `NAME KEY`.

    They are separated by commas or lines; `#` starts a comment, to the end of its line.

    Raises:
        ConfigError: the file cannot be read or is malformed; or the variable is set, or the file
            named, and holds no key: no server is open by mistake.
    """
    keys: list[str] = []
    sources: list[str] = []
    if (given := os.environ.get(KEYS_VARIABLE)) is not None:
        keys += _keys_in(given, KEYS_VARIABLE)
        if not keys:
            raise ConfigError(
                f"{KEYS_VARIABLE} is set and holds no key; unset it for an open server"
            )
        sources.append(KEYS_VARIABLE)
    if path is not None:
        where = f"api_keys_file: {path}"
        in_file = _keys_in(_read(path, where), where)
        if not in_file:
            raise ConfigError(f"{where} holds no key")
        keys += in_file
        sources.append(where)
    _check_names(keys, " and ".join(sources))
    return keys


class ApiKeys:
    """Keys of the clients that may use the server, as digests. Without any, the server is open."""

    def __init__(self, keys: Iterable[str], path: str | None = None) -> None:
        """Args:
        keys: each as `KEY` or `NAME KEY`.
        path: file of some of them, for `watch`.
        """
        self._path = path
        self._tenants: dict[str, int] = {}
        self._known = self._numbered(keys)
        self._open = not self._known

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Load the keys that `known_keys` returns."""
        return cls(known_keys(path), path)

    def _numbered(self, keys: Iterable[str]) -> dict[bytes, ApiKey]:
        known: dict[bytes, ApiKey] = {}
        for entry in keys:
            *names, key = entry.split()
            digest = _digest(key)
            # By the digest, and not by the line: a name must not change when another key goes.
            name = names[0] if names else f"key-{digest.hex()[:8]}"
            # A name keeps its number: what the scheduler counts for it goes on.
            tenant = self._tenants.setdefault(name, len(self._tenants) + 1)
            known[digest] = ApiKey(name, tenant, digest)
        return known

    def check(self, authorization: str | None) -> ApiKey:
        """Accept `Bearer <key>`; compare every known key, in constant time.

        Raises:
            Unauthorized: the key is missing or unknown.
        """
        if self._open:
            return NO_KEY
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized(
                "You didn't provide an API key. Put it into an Authorization header, as in "
                "'Authorization: Bearer KEY'."
            )
        given = _digest(secret.strip())
        # A list and not a generator: the search must not stop at the first match.
        known = self._known.values()
        found = [key for key in known if hmac.compare_digest(given, key.digest)]
        if not found:
            raise Unauthorized
        return found[0]

    def check_again(self, key: ApiKey) -> None:
        """Check that a key has not been revoked since it was accepted.

        Raises:
            Unauthorized: it has.
        """
        if not self._open and key.digest not in self._known:
            raise Unauthorized(KEY_REVOKED)

    def warn_of_unknown(self, names: Iterable[str]) -> None:
        """Warn of names in the settings that no key has. A key may still come."""
        for name in names:
            if name not in self._tenants:
                _log.warning("auth: no API key is named %s", name)

    async def watch(
        self, on_revoked: Callable[[Set[bytes]], None], *, period_s: float = WATCH_PERIOD_S
    ) -> None:
        """Take over changes of the key file, until cancelled.

        A file without keys revokes all of them. One that cannot be read or is malformed changes
        nothing, and the log says so.

        Args:
            on_revoked: called with the digests of keys that are no longer valid.
        """
        path = self._path
        assert path is not None, "there is no file to watch"
        where = f"api_keys_file: {path}"
        taken_over: str | None = None
        before: str | None = None
        while True:
            try:
                # On a thread, because a network file system may hang.
                text = await asyncio.to_thread(_read, path, where)
                # An editor may write in several pieces: a change counts once it was read twice.
                if text == before != taken_over:
                    taken_over = text
                    self._take_over(_keys_in(text, where), on_revoked)
            except ConfigError as error:
                text = str(error)
                if text != before:
                    _log.error("API keys stay as they are: %s", error)
            before = text
            await asyncio.sleep(period_s)

    def _take_over(self, in_file: Iterable[str], on_revoked: Callable[[Set[bytes]], None]) -> None:
        given = _keys_in(os.environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)
        keys = [*given, *in_file]
        _check_names(keys, f"api_keys_file: {self._path}")
        before, self._known = self._known, self._numbered(keys)
        added, revoked = self._known.keys() - before.keys(), before.keys() - self._known.keys()
        if added or revoked:
            _log.warning(
                "API keys added: %s; revoked: %s",
                _names(self._known[digest] for digest in added),
                _names(before[digest] for digest in revoked),
            )
        if revoked:
            on_revoked(revoked)


def _names(keys: Iterable[ApiKey]) -> str:
    return ", ".join(sorted(key.name for key in keys)) or "none"


def _check_names(keys: Iterable[str], where: str) -> None:
    """Refuse a key that two names have: limits and metrics of one would count the other's."""
    names: dict[str, str] = {}
    for entry in keys:
        *name, key = entry.split()
        mine = name[0] if name else "an entry without a name"
        if (other := names.setdefault(key, mine)) != mine:
            raise ConfigError(f"{where}: {other} and {mine} have one key; give each its own")


def _read(path: str, where: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where} cannot be read: {exc}") from None


def _keys_in(text: str, where: str) -> list[str]:
    """Return the keys of a text; no error shows one."""
    entries = [
        entry.strip() for line in text.splitlines() for entry in line.split("#", 1)[0].split(",")
    ]
    for number, entry in enumerate(entries, 1):
        words = entry.split()
        if len(words) > 2 or (len(words) == 2 and not _NAME.fullmatch(words[0])):
            raise ConfigError(
                f"{where}: entry {number} must be KEY or NAME KEY, with a name of at most 64 "
                "letters, digits, '.', '_' and '-'"
            )
    return [entry for entry in entries if entry]


def _digest(key: str) -> bytes:
    # Equal lengths, so that the comparison's time does not depend on a key's length.
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
