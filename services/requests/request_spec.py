"""One validated request, its service-level objectives and its prefix-cache key.

The prefix cache finds KV by chain hashes of token blocks (`PrefixKey`). A block's hash covers all
tokens up to the block's end, the owner of the KV (API key and `cache_salt`), and the bounds within
which the KV may be inexact. KV therefore never crosses API keys, salts or bounds: that would take
two texts with the same 16-byte BLAKE2b digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import AskedRing, Attention, Objective, RequestClass
from csps.protocols.gang.messages import Sampling
from csps.services.scheduling.events.events import Promise

SloName = Literal["ttft", "tpot", "e2e", "all"]
"""Names of bounds; a request meets "all" if it meets every bound that it has."""


@dataclass(frozen=True, kw_only=True)
class SloBounds:
    """Service-level objectives in milliseconds; None for no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    refuse: bool = False
    """True if the client wants to be refused once a bound is predicted to be missed."""

    def evaluate(
        self, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
    ) -> dict[SloName, bool]:
        """Return, per bound, whether a complete answer met it.

        An answer of one token has no time per output token and so no bound on it.
        """
        measured: dict[SloName, tuple[float | None, float | None]] = {
            "ttft": (self.ttft_ms, ttft_s),
            "tpot": (self.tpot_ms, tpot_s),
            "e2e": (self.e2e_ms, e2e_s),
        }
        return _with_all(
            {
                name: seconds * 1e3 <= bound_ms
                for name, (bound_ms, seconds) in measured.items()
                if bound_ms is not None and seconds is not None
            }
        )

    def missed(self) -> dict[SloName, bool]:
        """Return every bound as missed, for a request without a complete answer."""
        bounds: dict[SloName, float | None] = {
            "ttft": self.ttft_ms,
            "tpot": self.tpot_ms,
            "e2e": self.e2e_ms,
        }
        return _with_all({name: False for name, bound in bounds.items() if bound is not None})

    @property
    def promise(self) -> Promise | None:
        """Bounds as the scheduler knows them; None without any."""
        bounds = [
            None if bound_ms is None else int(bound_ms * 1e6)
            for bound_ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        ]
        if not any(bounds):
            return None
        ttft_ns, tpot_ns, e2e_ns = bounds
        return Promise(ttft_ns=ttft_ns, tpot_ns=tpot_ns, e2e_ns=e2e_ns, refuse=self.refuse)


def _with_all(met: dict[SloName, bool]) -> dict[SloName, bool]:
    return {**met, "all": all(met.values())} if met else {}


class ApiKey(NamedTuple):
    """What is known of a client's API key, without the key itself."""

    name: str = ""
    """Name for logs, metrics and settings, which several keys may share; empty: the server is open.
    """
    tenant: int = 0
    """Number of the name, from 1, for the scheduler; 0: the server is open."""
    digest: bytes = b""
    """SHA-256 of the key, by which it is recognized and its cached KV kept apart."""


NO_KEY = ApiKey()
"""Stands for the keys of an open server."""
KEY_REVOKED = "The API key was revoked."

DIGEST_BYTES = 16


@dataclass(frozen=True)
class PrefixKey:
    """Seed and block size of a request's block hashes.

    Args:
        seed: start of the first block's hash; differs between owners, salts and bounds.
        block: tokens per block.
    """

    seed: bytes
    block: int

    @classmethod
    def of(cls, *, owner: bytes, salt: str | None, block: int, bounds: str = "") -> PrefixKey:
        """Return the key shared by requests with the same API key and the same salt.

        Args:
            owner: digest of the API key; empty if the server needs no key.
            salt: the request's `cache_salt`; None and "" are different salts.
            block: tokens per block.
            bounds: key of the bounds within which the KV may be inexact; empty for exact KV.
        """
        seed = blake2b(digest_size=DIGEST_BYTES)
        salted = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
        for part in (owner, salted, *((bounds.encode(),) if bounds else ())):
            seed.update(len(part).to_bytes(8, "little") + part)
        return cls(seed.digest(), block)

    def hashes(self, tokens: NDArray[np.int32], known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Return the hashes of all whole blocks of `tokens` behind the `known` ones."""
        last = known[-1] if known else self.seed
        data, size = tokens.astype("<i4", copy=False).tobytes(), self.block * 4
        found: list[bytes] = []
        for start in range(len(known) * size, len(data) - size + 1, size):
            last = blake2b(last + data[start : start + size], digest_size=DIGEST_BYTES).digest()
            found.append(last)
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """One client call, validated and tokenized; immutable."""

    client_request_id: str
    api_key: ApiKey = NO_KEY
    prompt: NDArray[np.int32]
    """Token ids [tokens], at least one."""
    sampling: Sampling
    objective: Objective = field(default_factory=Objective)
    attention: Attention = "auto"
    csa: CsaSettings | None = None
    """Sparse-attention settings; None for exact attention, or if the configurator chooses all of
    them."""
    open: bool = False
    """The configurator chooses how the request attends, within the bounds of `objective`."""
    given: tuple[str, ...] = ()
    """Fields of `csa` that the client fixed although the rest is `open`."""
    refuse_unmet: bool = False
    """The request fails if its bounds are predicted to be missed."""
    strategy: AskedRing | None = None
    """Ring strategy that the client asked for."""
    slo: SloBounds = field(default_factory=SloBounds)
    priority: int = 0
    """Client's priority; lower ones come first."""
    prefix: PrefixKey | None = None
    """Prefix-cache key for lookup and insertion; None disables prefix caching for this request."""
    hashes: tuple[bytes, ...] = ()
    """Hashes of the prompt's whole blocks."""
    session: str | None = None
    """Client's name of the conversation, for traces of requests."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to report beside the log-probability of each of the prompt's
    tokens; None reports none. Such a prompt is computed as a whole, without cached KV."""
    deadline_s: float | None = None
    """Seconds after submission at which an unfinished request fails; None for no deadline."""

    @cached_property
    def cls(self) -> RequestClass:
        """Class of the request: requests of one class can run in one step."""
        objective = self.objective if self.open else None
        return RequestClass(self.csa, self.strategy, objective, self.given)

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or not self.prompt.size:
            raise ValueError(
                f"a prompt is a non-empty vector of token ids, not of shape {self.prompt.shape}"
            )
        assert self.prompt_logprobs is None or not self.hashes, "cached KV has no log-probabilities"
