"""Attention options: what a request asks for, what the cost table compares, and what a plan chose.

The cost table, plans and the scheduler's log identify a strategy with its settings by one name.
Without settings it is the engine's name (`actors/attention/choice.py`); with settings they follow
it, so that whoever launches a step needs nothing else.

>>> half = CsaSettings(levels=2, drop_ratios=((0.5,),))
>>> option_name("csa", half)
'csa#{"drop_ratios":[[0.5]],"levels":2}'
>>> parse_option(option_name("csa", half)) == ("csa", half)
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from csps.protocols.attention.csa import Architecture, CsaPlan, CsaSettings
from csps.protocols.core.topology import GroupShape

SETTINGS = "#"
"""Separator between a strategy and its settings in an option's name."""
KNOWN_OPTIONS = 4_096
"""Number of names whose parsed options are cached."""


class Option(NamedTuple):
    """A strategy and its settings."""

    strategy: str
    """Engine's name of the strategy."""
    csa: CsaSettings | None
    """Settings of sparse attention; None: those of the request."""


def option_name(strategy: str, csa: CsaSettings | None) -> str:
    """Return the name of a strategy with these settings."""
    if csa is None:
        return strategy
    default = CsaSettings()
    changed = {
        field.name: getattr(csa, field.name)
        for field in fields(csa)
        if getattr(csa, field.name) != getattr(default, field.name)
    }
    return strategy + SETTINGS + msgspec.json.encode(changed, order="deterministic").decode()


@lru_cache(KNOWN_OPTIONS)
def parse_option(name: str) -> Option:
    """Return the strategy and the settings of a name."""
    strategy, separator, settings = name.partition(SETTINGS)
    csa = msgspec.json.decode(settings, type=CsaSettings) if separator else None
    return Option(strategy, csa)


Attention = Literal["auto", "exact", "csa"]
ObjectiveKind = Literal["ttft", "accuracy"]

ENGINE_NAMES: dict[Architecture, str] = {"ntp": "csa", "tp": "sp_tp", "tp_flat": "sp_tp_flat"}
"""Names of sparse attention's architectures in `actors/attention/choice.py`."""
Ring = Literal["ring_kv", "ring_q"]
"""Context parallelism's exact strategies, by the engine's names: pass-KV and pass-Q."""
RINGS: tuple[Ring, ...] = ("ring_kv", "ring_q")
AskedRing = Literal["ring_kv", "ring_q", "ring"]
"""Rings that a request may ask for; "ring" is the better variant for its prefill."""
ASKED_RINGS: tuple[AskedRing, ...] = (*RINGS, "ring")
RING_CLASSES: Mapping[str, AskedRing] = {f"{ring}/exact": ring for ring in ASKED_RINGS}
"""Classes of requests that ask for a ring, by the scheduler's names."""
EXACT, SPARSE = "ulysses", "csa"
"""Default strategies of requests, as long as nothing has been compared for them."""
LEVELS = "levels"
"""Exact strategy that computes by levels and drops nothing."""
PIGGYBACKED = "ride"
"""Strategy of prompts whose chunks are computed inside decode iterations (piggybacked prefill).
The value "ride" is an API and metric value."""
AUTO = "auto"
"""Class of requests that ask for nothing: exact, by any strategy."""
BOUNDED = "bounded"
"""Class of requests that leave all to the configurator, within bounds."""
BOUNDS = "?"
"""Separator between a class and a request's bounds in the scheduler's name of a class."""
KNOWN_BOUNDS = 4_096
"""Number of class names whose parsed bounds are cached."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Objective of CSPS §3.2.6: least TTFT under an accuracy-loss bound, or the other way round."""

    kind: ObjectiveKind = "ttft"
    max_accuracy_loss: float | None = None
    """Fraction in [0, 1]; None with kind "ttft" allows no loss."""
    max_ttft_ms: float | None = None

    @property
    def bounded(self) -> bool:
        """True if at least one bound is set."""
        return self.max_accuracy_loss is not None or self.max_ttft_ms is not None

    @property
    def most_loss(self) -> float:
        """Bound on the loss of accuracy. With the objective of least TTFT the default allows
        none."""
        if self.max_accuracy_loss is None:
            return 0.0 if self.kind == "ttft" else 1.0
        return self.max_accuracy_loss

    def met(self, ttft_ms: float, loss: float | None, error_ms: float = 0.0) -> bool | None:
        """Return True if a prediction meets the bounds, and False if it misses one.

        None if there are no bounds, if the loss was not predicted, and if TTFT exceeds its bound by
        no more than the prediction's error.

        Args:
            loss: predicted loss of accuracy; None if it was not predicted.
            error_ms: error of the predicted TTFT.
        """
        if not self.bounded:
            return None
        late_ms = 0.0 if self.max_ttft_ms is None else ttft_ms - self.max_ttft_ms
        bounds_loss = self.max_accuracy_loss is not None
        if late_ms > error_ms or (bounds_loss and loss is not None and loss > self.most_loss):
            return False
        return None if late_ms > 0 or (bounds_loss and loss is None) else True

    @property
    def key(self) -> str:
        """Kind and bounds as a name."""
        return f"{self.kind}:{self.max_accuracy_loss}:{self.max_ttft_ms}"

    @classmethod
    def of_key(cls, key: str) -> Objective:
        """Return the objective with that name."""
        kind, *bounds = key.split(":")
        loss, ttft_ms = (None if bound == "None" else float(bound) for bound in bounds)
        return cls(
            kind="ttft" if kind == "ttft" else "accuracy",
            max_accuracy_loss=loss,
            max_ttft_ms=ttft_ms,
        )


@dataclass(frozen=True)
class RequestClass:
    """Attention that a request may use. Requests of one class can share a step."""

    csa: CsaSettings | None = None
    """Sparse attention that was asked for; None is exact, unless there is an objective."""
    strategy: AskedRing | None = None
    """Exact strategy that was asked for; None: any strategy."""
    objective: Objective | None = None
    """Trade-off that the configurator may make; None allows nothing that loses accuracy."""
    given: tuple[str, ...] = ()
    """Fields of `csa` that the configurator must not change, if there is an objective."""

    @cached_property
    def key(self) -> str:
        """Scheduler's name of the class."""
        return self.row if self.objective is None else f"{self.row}{BOUNDS}{self.objective.key}"

    @cached_property
    def row(self) -> str:
        """Cost table's name of the class, which has the options for all bounds.

        It consists of the strategy in use until the options are known, and a digest of the rest.
        """
        if self.csa is None:
            asked = (key for key, ring in RING_CLASSES.items() if ring == self.strategy)
            return next(asked, AUTO if self.objective is None else BOUNDED)
        content = self.csa, self.given, self.objective is None
        digest = hashlib.sha256(msgspec.json.encode(content, order="deterministic"))
        fixed = self.csa.strategy
        default = SPARSE if fixed is None else ENGINE_NAMES[fixed]
        return f"{default}/{digest.hexdigest()[:16]}"


class ParsedClass(NamedTuple):
    """Parts of the scheduler's name of a class."""

    row: str
    """Cost table's name of the class."""
    objective: Objective | None


@lru_cache(KNOWN_BOUNDS)
def parse_class(cls: str) -> ParsedClass:
    """Split the scheduler's name of a class."""
    row, bounds, key = cls.partition(BOUNDS)
    return ParsedClass(row, Objective.of_key(key) if bounds else None)


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Attention of a request's prefill on the group that it has got; `reason` is for people."""

    attention: Literal["exact", "csa"] = "exact"
    strategy: str = EXACT
    """Engine's name of the strategy (`actors/attention/choice.py`)."""
    csa: CsaPlan | None = None
    """Plan with attention "csa", and for exact strategies that depend on the group's locations."""
    predicted_ttft_ms: float | None = None
    """Time to first token from submission, predicted when the prompt was placed; None where an
    earlier attempt has sampled the first token."""
    predicted_accuracy_loss: float | None = None
    bounds_met: bool | None = None
    """True if the request's bounds are predicted to be met, False if one is predicted to be missed
    by more than the prediction's error. None in between, without bounds, and where the loss of
    accuracy was not predicted."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StrategyQuestion:
    """A bucket of the cost table: how should requests of a class attend on groups of a shape?"""

    csa: CsaSettings | None
    """Sparse attention of the class."""
    bounded: bool = False
    """True if requests of the class choose by bounds."""
    given: tuple[str, ...] = ()
    """Fields of `csa` that must not change."""
    servers: tuple[int, ...]
    """Instances of the group on each server, in topology order."""
    racks: tuple[int, ...] = ()
    """Servers in each rack, in topology order; empty if all are in one rack."""
    tp: int
    tokens: int
    """Length in the middle of the bucket."""
    history: int = 0
    """Tokens before them with reused KV, distributed evenly; a length in the middle, too."""

    @property
    def places(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of such a group."""
        return GroupShape(self.servers, self.tp, self.racks).places


@dataclass(frozen=True, kw_only=True)
class StrategyQuestions:
    """`strategies`, to the configurator, in the background: no request waits for the answer."""

    asked: tuple[StrategyQuestion, ...]


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """One attention option."""

    strategy: str
    """Name of the option (`option_name`)."""
    reason: str
    """Reason for it, for people."""
    permille: int = 1000
    """Time in thousandths of the time of exact attention without micro-partitions. 1000 for
    an option without settings, whose time is known by its name."""
    loss: float | None = 0.0
    """Predicted loss of accuracy; None if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class StrategyChoices:
    """Answer in the order of the questions: the options of each."""

    chosen: tuple[tuple[StrategyChoice, ...], ...]
