"""Service-level objectives of a request, and whether its answer met them.

Names of prompts' beginnings, by which kept KV is found again.

A chain hash of a block names all tokens up to its end, who may use their KV (API key and
`cache_salt`), and that it is exact, or within which bounds it is. So KV never goes from one key,
salt or bound to another: equal names would take two texts of one BLAKE2b digest of 16 bytes.

What a client wants of the router.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import AskedRing, Attention, Objective, RequestClass
from csps.protocols.gang.messages import Sampling

SloName = Literal["ttft", "tpot", "e2e", "all"]
"""Of what a bound is; "all" is met by requests that meet every bound that they have."""


@dataclass(frozen=True, kw_only=True)
class SloBounds:
    """Bounds in milliseconds; None where there is none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def judged(
        self, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
    ) -> dict[SloName, bool]:
        """Which bounds a whole answer met. An answer of one token has no time per further token,
        and so no bound on it either."""
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
        """All bounds, of a request that got no whole answer."""
        bounds: dict[SloName, float | None] = {
            "ttft": self.ttft_ms,
            "tpot": self.tpot_ms,
            "e2e": self.e2e_ms,
        }
        return _with_all({name: False for name, bound in bounds.items() if bound is not None})


def _with_all(met: dict[SloName, bool]) -> dict[SloName, bool]:
    return {**met, "all": all(met.values())} if met else {}


DIGEST_BYTES = 16


@dataclass(frozen=True)
class PrefixKey:
    """Whose KV it is, and what blocks are hashed.

    Args:
        seed: what the first block's hash begins with.
        block: tokens of one.
    """

    seed: bytes
    block: int

    @classmethod
    def of(cls, *, owner: bytes, salt: str | None, block: int, bounds: str = "") -> PrefixKey:
        """Of requests with the same API key (its digest, or nothing where none is needed) and the
        same salt; none is another one than an empty one.

        Args:
            bounds: within which KV was computed that may not be exact.
        """
        seed = blake2b(digest_size=DIGEST_BYTES)
        salted = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
        for part in (owner, salted, *((bounds.encode(),) if bounds else ())):
            seed.update(len(part).to_bytes(8, "little") + part)
        return cls(seed.digest(), block)

    def hashes(self, tokens: NDArray[np.int32], known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Of all whole blocks but those that are known already."""
        last = known[-1] if known else self.seed
        data, size = tokens.astype("<i4", copy=False).tobytes(), self.block * 4
        found: list[bytes] = []
        for start in range(len(known) * size, len(data) - size + 1, size):
            last = blake2b(last + data[start : start + size], digest_size=DIGEST_BYTES).digest()
            found.append(last)
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """A request, validated and tokenized."""

    client_request_id: str
    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    sampling: Sampling
    objective: Objective = field(default_factory=Objective)
    attention: Attention = "auto"
    csa: CsaSettings | None = None
    """With attention "csa", unless all of it is open."""
    open: bool = False
    """How it attends is the configurator's choice, within the bounds of the objective."""
    given: tuple[str, ...] = ()
    """If it is: fields of `csa` that are not."""
    refuse_unmet: bool = False
    """It fails if its bounds are not going to be met."""
    strategy: AskedRing | None = None
    """Of exact attention, if one was asked for."""
    slo: SloBounds = field(default_factory=SloBounds)
    prefix: PrefixKey | None = None
    """By which KV is found that others have left, and this is left to others; None: none is."""
    hashes: tuple[bytes, ...] = ()
    """Of the prompt's whole blocks."""
    deadline_s: float | None = None
    """Seconds after submission when the request fails if it has not finished; None waits."""

    @cached_property
    def cls(self) -> RequestClass:
        """What it shares with requests that can run in one step with it."""
        objective = self.objective if self.open else None
        return RequestClass(self.csa, self.strategy, objective, self.given)

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or not self.prompt.size:
            raise ValueError("a prompt is a non-empty row of token ids")
