"""What a request asks for and what the configurator answers: objective in, configuration out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from csps.protocols.csa_template import CsaTemplate, CsaVariant

Attention = Literal["auto", "exact", "csa"]
Architecture = Literal["ntp", "tp", "tp_flat"]
"""SP-NTP; SP-TP with hierarchical collectives, or with flat ones for comparison (CSPS §3.2.1)."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """CSPS §3.2.6: least TTFT under an accuracy-loss bound, or the other way round."""

    kind: Literal["ttft", "accuracy"] = "ttft"
    max_accuracy_loss: float | None = None
    """Fraction in [0, 1]; None with kind "ttft" means none is allowed."""
    max_ttft_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class CsaOptions:
    """What a client fixes of its sparse attention; None leaves it to the configurator."""

    levels: int | None = None
    """N_v."""
    drop_ratios: tuple[tuple[float, ...], ...] | None = None
    """p of level 2, in [0, 1), by layer, the last one's for all further layers: one for all KV
    heads, or one per KV head."""
    micro_partitions: tuple[tuple[int, ...], ...] | None = None
    """M by layer and by level, the last one's for all further ones."""
    strategy: Architecture | None = None
    variant: CsaVariant = field(default_factory=CsaVariant)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """`plan`: everything the configurator needs to know about one request."""

    prompt_tokens: int
    objective: Objective = Objective()
    attention: Attention = "auto"
    csa: CsaOptions = CsaOptions()
    """Looked at with attention "csa" only."""
    locations: tuple[str, ...] = ()
    """Rack-Server-GPU ids of the prefill instances' first ranks; none while there is no gang."""
    tp: int = 1
    """Ranks of each of them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a request's prefill attends; `reason` is for people."""

    attention: Literal["exact", "csa"] = "exact"
    strategy: str = "ulysses"
    """By the engine's names (`actors/strategies/choice.py`)."""
    csa: CsaTemplate | None = None
    """With attention "csa"; and, with one exact level, for exact SP-TP, which needs to know where
    its group stands."""
    predicted_ttft_ms: float | None = None
    predicted_accuracy_loss: float | None = None
    reason: str = ""
