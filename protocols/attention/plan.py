"""A strategy with all that it is told, under one name.

The cost table, plans and the scheduler's log know what they choose from by such names. Alone, a
strategy goes by the engine's name (`actors/attention/choice.py`); with settings of its own they stand
behind it, so that whoever launches a step needs nothing else.

>>> half = CsaSettings(levels=2, drop_ratios=((0.5,),))
>>> option_name("csa", half)
'csa#{"drop_ratios":[[0.5]],"levels":2}'
>>> parse_option(option_name("csa", half)) == ("csa", half)
True

What a request asks for, and what became of it: objective in, plan out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from csps.protocols.attention.csa import Architecture, CsaPlan, CsaSettings

SETTINGS = "#"
"""What stands behind it are the settings."""
KNOWN_OPTIONS = 4_096
"""Names that are read only once."""


class Option(NamedTuple):
    """What a name says."""

    strategy: str
    """By the engine's name."""
    csa: CsaSettings | None
    """None: as the request says."""


def option_name(strategy: str, csa: CsaSettings | None) -> str:
    """The name of a strategy with these settings."""
    if csa is None:
        return strategy
    usual = CsaSettings()
    told = {
        field.name: getattr(csa, field.name)
        for field in fields(csa)
        if getattr(csa, field.name) != getattr(usual, field.name)
    }
    return strategy + SETTINGS + msgspec.json.encode(told, order="deterministic").decode()


@lru_cache(KNOWN_OPTIONS)
def parse_option(name: str) -> Option:
    """The strategy and the settings of a name."""
    strategy, told, settings = name.partition(SETTINGS)
    csa = msgspec.json.decode(settings, type=CsaSettings) if told else None
    return Option(strategy, csa)


Attention = Literal["auto", "exact", "csa"]
ObjectiveKind = Literal["ttft", "accuracy"]

ENGINE_NAMES: dict[Architecture, str] = {"ntp": "csa", "tp": "sp_tp", "tp_flat": "sp_tp_flat"}
"""Sparse attention's architectures as `actors/attention/choice.py` names them."""
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
PIGGYBACKED = "ride"
"""In a strategy's place, of prompts that a stream computes in pieces beside rows that decode."""
AUTO = "auto"
"""The class of requests that ask for nothing of their own: exact, by whichever strategy."""
BOUNDED = "bounded"
"""The class of requests that leave all to the configurator, within bounds."""
BOUNDS = "?"
"""In the scheduler's name of a class: what stands behind it are a request's bounds."""
KNOWN_BOUNDS = 4_096
"""Names of classes that are read only once."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """CSPS §3.2.6: least TTFT under an accuracy-loss bound, or the other way round."""

    kind: ObjectiveKind = "ttft"
    max_accuracy_loss: float | None = None
    """Fraction in [0, 1]; None with kind "ttft" means none is allowed."""
    max_ttft_ms: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether either bound was set."""
        return self.max_accuracy_loss is not None or self.max_ttft_ms is not None

    @property
    def most_loss(self) -> float:
        """Bound on the loss of accuracy: with the objective of least TTFT none is allowed unless
        the client says so."""
        if self.max_accuracy_loss is None:
            return 0.0 if self.kind == "ttft" else 1.0
        return self.max_accuracy_loss

    def met(self, ttft_ms: float, loss: float | None) -> bool | None:
        """Whether a prediction keeps the bounds; None if there are none, or nobody knows.

        Args:
            loss: of accuracy; None was not predicted.
        """
        if not self.bounded:
            return None
        if self.max_ttft_ms is not None and ttft_ms > self.max_ttft_ms:
            return False
        if self.max_accuracy_loss is None:
            return True
        return None if loss is None else loss <= self.max_accuracy_loss

    @property
    def key(self) -> str:
        """All of it, as a name."""
        return f"{self.kind}:{self.max_accuracy_loss}:{self.max_ttft_ms}"

    @classmethod
    def of_key(cls, key: str) -> Objective:
        """The objective of that name."""
        kind, *bounds = key.split(":")
        loss, ttft_ms = (None if bound == "None" else float(bound) for bound in bounds)
        return cls(
            kind="ttft" if kind == "ttft" else "accuracy",
            max_accuracy_loss=loss,
            max_ttft_ms=ttft_ms,
        )


@dataclass(frozen=True)
class RequestClass:
    """How a request may attend. Requests of one class can share a step."""

    csa: CsaSettings | None = None
    """Sparse attention as asked for; None is exact, unless an objective is given."""
    strategy: AskedRing | None = None
    """Exact attention as asked for; None: by whichever strategy."""
    objective: Objective | None = None
    """What the configurator may trade for what; None leaves it nothing that loses accuracy."""
    given: tuple[str, ...] = ()
    """With an objective: the fields of `csa` that are to stay as they are."""

    @cached_property
    def key(self) -> str:
        """The scheduler's name of the class."""
        return self.row if self.objective is None else f"{self.row}{BOUNDS}{self.objective.key}"

    @cached_property
    def row(self) -> str:
        """The cost table's name of the class, which has the answers for all bounds: what it runs by
        while its bucket is cold, and a digest of the rest."""
        if self.csa is None:
            asked = (key for key, ring in RING_CLASSES.items() if ring == self.strategy)
            return next(asked, AUTO if self.objective is None else BOUNDED)
        content = self.csa, self.given, self.objective is None
        digest = hashlib.sha256(msgspec.json.encode(content, order="deterministic"))
        fixed = self.csa.strategy
        default = SPARSE if fixed is None else ENGINE_NAMES[fixed]
        return f"{default}/{digest.hexdigest()[:16]}"


class ParsedClass(NamedTuple):
    """What the scheduler's name of a class says."""

    row: str
    """Of the cost table."""
    objective: Objective | None


@lru_cache(KNOWN_BOUNDS)
def parse_class(cls: str) -> ParsedClass:
    """What a request of this class may have."""
    row, bounds, key = cls.partition(BOUNDS)
    return ParsedClass(row, Objective.of_key(key) if bounds else None)


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """How a request's prefill attends on the group that it has got; `reason` is for people."""

    attention: Literal["exact", "csa"] = "exact"
    strategy: str = EXACT
    """By the engine's names (`actors/attention/choice.py`)."""
    csa: CsaPlan | None = None
    """With attention "csa"; and, dropping nothing, for exact strategies that go by where their
    group stands."""
    predicted_ttft_ms: float | None = None
    """From submission, as predicted when the prompt got its place; None where a former attempt has
    drawn the first token."""
    predicted_accuracy_loss: float | None = None
    bounds_met: bool | None = None
    """Whether the request's bounds are kept, as far as that is predicted; None without bounds, and
    where the loss of accuracy was not predicted."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StrategyQuestion:
    """How shall requests of a class attend on groups of a shape? A bucket of the cost table."""

    csa: CsaSettings | None
    """Of the class."""
    bounded: bool = False
    """Requests of the class say by bounds what they choose."""
    given: tuple[str, ...] = ()
    """Fields of `csa` that are to stay as they are, if they do."""
    servers: tuple[int, ...]
    """Instances of the group on each server, in topology order."""
    tp: int
    tokens: int
    """A length in the middle of the bucket."""
    history: int = 0
    """Tokens before them whose KV was kept, evenly over the group; a length in the middle, too."""

    @property
    def places(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of such a group, all in one rack."""
        return tuple(
            f"0-{server}-{place}"
            for server, instances in enumerate(self.servers)
            for place in range(instances)
        )


@dataclass(frozen=True, kw_only=True)
class StrategyQuestions:
    """`strategies`, to the configurator, in the background: no request waits for the answer."""

    asked: tuple[StrategyQuestion, ...]


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """One way to attend."""

    strategy: str
    """An option (`protocols.options`)."""
    reason: str
    """For it, for people."""
    permille: int = 1000
    """Its time in thousandths of what exact attention takes that is not cut; 1000 of an option
    without settings: what is known of it by its name."""
    loss: float | None = 0.0
    """Predicted loss of accuracy; None if nobody can say."""


@dataclass(frozen=True, kw_only=True)
class StrategyChoices:
    """The answer, in the order of the questions: for each what its requests may choose from."""

    chosen: tuple[tuple[StrategyChoice, ...], ...]
