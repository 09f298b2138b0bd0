"""What a request asks for and what the configurator answers: objective in, configuration out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["auto", "exact", "csa"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """CSPS §3.2.6: least TTFT under an accuracy-loss bound, or the other way round."""

    kind: Literal["ttft", "accuracy"] = "ttft"
    max_accuracy_loss: float | None = None
    """Fraction in [0, 1]; None with kind "ttft" means none is allowed."""
    max_ttft_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """`plan`: everything the configurator needs to know about one request."""

    prompt_tokens: int
    objective: Objective = Objective()
    attention: Attention = "auto"
    levels: int | None = None
    drop_ratio: float | None = None
    locations: tuple[str, ...] = ()
    """Rack-Server-GPU ids of the prefill instances' first ranks."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a request's prefill attends; `reason` is for people."""

    attention: Literal["exact", "csa"] = "exact"
    strategy: str = "ulysses"
    predicted_ttft_ms: float | None = None
    predicted_accuracy_loss: float | None = None
    reason: str = ""
