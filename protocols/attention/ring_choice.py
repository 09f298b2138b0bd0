"""Ring pass-KV or ring pass-Q, prefill by prefill (Context Parallelism §3.4, App. C and D).

Two rules. Alg. 5 compares what goes round, whether that hides behind attention, and what pass-Q
sends in the end, which nothing hides and Alg. 1 leaves out; the empirical one separates measured
points. Both take T new tokens after P of history:

    Eq. 2   T* = N C e r / (2 BW)         from so many on keys and values hide behind attention
    Alg. 5  pass-KV if T / (T + P) >= 2 r (1 - T / T*)
    App. D  pass-KV if alpha ln T + beta ln(T / (T + P)) + gamma > 0

with N members, r = KV heads / query heads, e bytes a number, C operations and BW bytes a second of
a rank. As printed Alg. 5 also takes pass-KV if T >= T*, which its other clause implies. The paper
prints alpha -1.059, beta 1.145 and gamma 12.112, which is always pass-Q; gamma 12.68 is right about
all of its measurements (Table 4).

Operations of a prefill, for comparing what a machine reaches with its peak (CP App. A).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import log

from csps.protocols.attention.plan import Ring
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape


@dataclass(frozen=True, kw_only=True)
class RingModel:
    """What of a model the rules depend on."""

    heads: int
    """Query heads."""
    kv_heads: int
    element_bytes: int

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.element_bytes) < 1:
            raise ValueError(f"sizes of attention start at 1: {self}")

    @property
    def ratio(self) -> float:
        """KV heads over query heads."""
        return self.kv_heads / self.heads


@dataclass(frozen=True, kw_only=True)
class RingSpeeds:
    """What a rank reaches, which is less than what its maker says."""

    flops: float
    """Operations of attention a second."""
    bytes_per_s: float
    """To the next rank of the ring."""

    def __post_init__(self) -> None:
        if not (0 < self.flops < float("inf") and 0 < self.bytes_per_s < float("inf")):
            raise ValueError(f"speeds are positive: {self}")


def hiding_tokens(model: RingModel, speeds: RingSpeeds, members: int) -> float:
    """T*: new tokens from which on pass-KV's messages take no longer than attention (Eq. 2)."""
    seconds_ratio = speeds.flops / speeds.bytes_per_s
    return members * seconds_ratio * model.element_bytes * model.ratio / 2


def algorithm_5(
    new: int, history: int, *, model: RingModel, speeds: RingSpeeds, members: int
) -> Ring:
    """Alg. 5, the refined one."""
    shown = 1 - new / hiding_tokens(model, speeds, members)
    return _ring(miss_rate(new, history) >= 2 * model.ratio * shown)


@dataclass(frozen=True, kw_only=True)
class EmpiricalRule:
    """h(T, P) of App. D, with natural logarithms."""

    alpha: float
    beta: float
    gamma: float

    def value(self, new: int, history: int) -> float:
        """h, to a millionth, so that machines do not differ by their last digits."""
        exact = self.alpha * log(new) + self.beta * log(miss_rate(new, history)) + self.gamma
        return round(exact, 6)

    def choose(self, new: int, history: int) -> Ring:
        """By its sign."""
        return _ring(self.value(new, history) > 0)


@dataclass(frozen=True, kw_only=True)
class FittedRule:
    """A rule that was fitted to what groups of one size have measured."""

    sp: int
    tp: int
    rule: EmpiricalRule


@dataclass(frozen=True, kw_only=True)
class RingRules:
    """What chooses on one machine: the fitted rule of a group's size, or else Alg. 5."""

    model: RingModel
    inside: RingSpeeds
    """On one server."""
    between: RingSpeeds
    """Over several."""
    fitted: tuple[FittedRule, ...] = ()

    def choose(self, shape: GroupShape, new: int, history: int) -> Ring:
        """For a prefill of `new` tokens, at least one, on a group."""
        rule = self.fitted_to(shape)
        if rule is not None:
            return rule.choose(new, history)
        speeds = self.inside if len(shape.servers) == 1 else self.between
        return algorithm_5(new, history, model=self.model, speeds=speeds, members=shape.sp)

    def fitted_to(self, shape: GroupShape) -> EmpiricalRule | None:
        """The rule of groups of as many instances of as many ranks."""
        size = shape.sp, shape.tp
        return next((it.rule for it in self.fitted if (it.sp, it.tp) == size), None)

    @cached_property
    def canonical(self) -> bytes:
        """As bytes: equal rules, equal bytes. `parse_rules` reads them."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `canonical`, in hexadecimal."""
        return hashlib.sha256(self.canonical).hexdigest()


def parse_rules(canonical: bytes) -> RingRules:
    """The rules whose `canonical` these bytes are.

    Raises:
        ConfigError: they are not those of rules.
    """
    try:
        data = json.loads(canonical)
        return RingRules(
            model=RingModel(**data["model"]),
            inside=RingSpeeds(**data["inside"]),
            between=RingSpeeds(**data["between"]),
            fitted=parse_fitted(data["fitted"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a ring's rules: {error}") from None


def parse_fitted(data: list[dict[str, object]]) -> tuple[FittedRule, ...]:
    """Fitted rules as JSON has them; raises KeyError, TypeError or ValueError."""
    return tuple(
        FittedRule(
            sp=int(str(it["sp"])),
            tp=int(str(it["tp"])),
            rule=EmpiricalRule(**it["rule"]),  # type: ignore[arg-type]
        )
        for it in data
    )


def miss_rate(new: int, history: int) -> float:
    """T / (T + P): the part of a context whose KV was not there."""
    return new / (new + history)


def _ring(pass_kv: bool) -> Ring:
    return "ring_kv" if pass_kv else "ring_q"


def prefill_flops(
    *, parameters: int, layers: int, width: int, new: int, history: int = 0, batch: int = 1
) -> float:
    """Operations of computing `new` tokens after `history`, causal attention counted by half.

    Args:
        parameters: of the whole model; each is a multiplication and an addition a token.
        width: query heads times head dimension.
    """
    products = 2.0 * parameters * new
    attention = 4.0 * layers * width * new * (history + new / 2)
    return batch * (products + attention)


def flops_per_second(flops: float, *, seconds: float, devices: int) -> float:
    """What each device has reached."""
    return flops / seconds / devices


def utilization(flops: float, *, seconds: float, devices: int, peak: float) -> float:
    """MFU: the part of what the devices could have done.

    Args:
        peak: operations of a device a second.
    """
    return flops_per_second(flops, seconds=seconds, devices=devices) / peak
