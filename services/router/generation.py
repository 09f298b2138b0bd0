"""What a client wants of the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csps.protocols.csa_settings import CsaSettings
from csps.protocols.plans import AskedRing, Attention, Objective, RequestClass
from csps.protocols.sampling import Sampling
from csps.services.router.prefix_key import PrefixKey
from csps.services.router.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request, validated and tokenized."""

    request_id: str
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
    refuses: bool = False
    """It fails if its bounds are not going to be met."""
    strategy: AskedRing | None = None
    """Of exact attention, if one was asked for."""
    slo: Slo = field(default_factory=Slo)
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
