"""What a request asks for, and what became of it: objective in, plan out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from csps.protocols.csa import CsaPlan
from csps.protocols.csa_settings import Architecture, CsaSettings

Attention = Literal["auto", "exact", "csa"]

ENGINE_NAMES: dict[Architecture, str] = {"ntp": "csa", "tp": "sp_tp", "tp_flat": "sp_tp_flat"}
"""Sparse attention's architectures as `actors/engine/choice.py` names them."""
Ring = Literal["ring_kv", "ring_q"]
"""Context parallelism's exact strategies, by the engine's names: keys and values, or queries."""
RINGS: tuple[Ring, ...] = ("ring_kv", "ring_q")
AskedRing = Literal["ring_kv", "ring_q", "ring"]
"""As a request may ask for it; "ring" is whichever variant is better for its prefill."""
ASKED_RINGS: tuple[AskedRing, ...] = (*RINGS, "ring")
RING_CLASSES: Mapping[str, AskedRing] = {f"{it}/exact": it for it in ASKED_RINGS}
"""Classes of requests that ask for a ring, by the scheduler's names for them."""
EXACT, SPARSE = "ulysses", "csa"
"""Strategies of requests about which nothing has been compared yet."""
LEVELS = "levels"
"""The exact strategy that computes by levels and drops nothing."""
RIDE = "ride"
"""In a strategy's place, of prompts that a stream computes in pieces beside rows that decode."""
AUTO = "auto"
"""The class of requests that ask for nothing of their own: exact, by whichever strategy."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """CSPS §3.2.6: least TTFT under an accuracy-loss bound, or the other way round."""

    kind: Literal["ttft", "accuracy"] = "ttft"
    max_accuracy_loss: float | None = None
    """Fraction in [0, 1]; None with kind "ttft" means none is allowed."""
    max_ttft_ms: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether either bound was set."""
        return self.max_accuracy_loss is not None or self.max_ttft_ms is not None


@dataclass(frozen=True)
class RequestClass:
    """How a request may attend. Requests of one class can share a step, and the cost table has one
    row for all of them."""

    csa: CsaSettings | None = None
    """Sparse attention as asked for; None is exact."""
    strategy: AskedRing | None = None
    """Exact attention as asked for; None: by whichever strategy."""

    @cached_property
    def key(self) -> str:
        """The scheduler's name of the class: what it runs by while its bucket of the cost table is
        cold, and a digest of the rest."""
        if self.csa is None:
            asked = (key for key, ring in RING_CLASSES.items() if ring == self.strategy)
            return next(asked, AUTO)
        digest = hashlib.sha256(msgspec.json.encode(self.csa, order="deterministic"))
        fixed = self.csa.strategy
        cold = SPARSE if fixed is None else ENGINE_NAMES[fixed]
        return f"{cold}/{digest.hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a request's prefill attends on the group that it has got; `reason` is for people."""

    attention: Literal["exact", "csa"] = "exact"
    strategy: str = EXACT
    """By the engine's names (`actors/engine/choice.py`)."""
    csa: CsaPlan | None = None
    """With attention "csa"; and, dropping nothing, for exact strategies that go by where their
    group stands."""
    predicted_ttft_ms: float | None = None
    """From submission, as predicted when the prompt got its place; None where a former attempt has
    drawn the first token."""
    predicted_accuracy_loss: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StrategyQuestion:
    """How shall requests of a class attend on groups of a shape? A bucket of the cost table."""

    csa: CsaSettings | None
    """Of the class."""
    servers: tuple[int, ...]
    """Instances of the group on each server, in topology order."""
    tp: int
    tokens: int
    """A length in the middle of the bucket."""


@dataclass(frozen=True, kw_only=True)
class StrategyQuestions:
    """`strategies`, to the configurator, in the background: no request waits for the answer."""

    asked: tuple[StrategyQuestion, ...]


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy by the engine's name (`actors/engine/choice.py`), and why, for people."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StrategyChoices:
    """The answer, in the order of the questions."""

    chosen: tuple[StrategyChoice, ...]
