"""Choice of ring pass-KV or pass-Q for each prefill (Context Parallelism §3.4, App. C and D).

There are two rules. Alg. 5 compares what is sent around the ring, whether attention hides it, and
what pass-Q sends at the end, which nothing hides and Alg. 1 leaves out. The empirical rule
separates measured points. Both take T new tokens after P of history:

    Eq. 2   T* = N C e r / (2 BW)         from so many on keys and values hide behind attention
    Alg. 5  pass-KV if T / (T + P) >= 2 r (1 - T / T*)
    App. D  pass-KV if alpha ln T + beta ln(T / (T + P)) + gamma > 0

with N members, r = KV heads / query heads, e bytes a number, C operations and BW bytes a second of
a rank. As printed, Alg. 5 also takes pass-KV if T >= T*, which its other clause implies. The paper
prints alpha -1.059, beta 1.145 and gamma 12.112, which always chooses pass-Q; gamma 12.68 agrees
with all of its measurements (Table 4). The operations of a prefill follow CP App. A.
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
    """Properties of a model on which the rules depend."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    element_bytes: int

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.element_bytes) < 1:
            raise ValueError(f"heads, kv_heads and element_bytes must be at least 1: {self}")

    @property
    def ratio(self) -> float:
        """KV heads over query heads."""
        return self.kv_heads / self.heads


@dataclass(frozen=True, kw_only=True)
class RingSpeeds:
    """Measured speeds of a rank, which are below its specified peak."""

    flops: float
    """Operations of attention per second."""
    bytes_per_s: float
    """Bytes per second to the next rank of the ring."""

    def __post_init__(self) -> None:
        if not (0 < self.flops < float("inf") and 0 < self.bytes_per_s < float("inf")):
            raise ValueError(f"speeds must be positive and finite: {self}")


def hiding_tokens(model: RingModel, speeds: RingSpeeds, members: int) -> float:
    """Return T*: new tokens from which on attention hides pass-KV's messages (Eq. 2)."""
    seconds_ratio = speeds.flops / speeds.bytes_per_s
    return members * seconds_ratio * model.element_bytes * model.ratio / 2


def algorithm_5(
    new: int, history: int, *, model: RingModel, speeds: RingSpeeds, members: int
) -> Ring:
    """Choose by Alg. 5, the refined rule."""
    shown = 1 - new / hiding_tokens(model, speeds, members)
    return _ring(miss_rate(new, history) >= 2 * model.ratio * shown)


@dataclass(frozen=True, kw_only=True)
class EmpiricalRule:
    """h(T, P) of App. D, with natural logarithms."""

    alpha: float
    beta: float
    gamma: float

    def value(self, new: int, history: int) -> float:
        """Return h to a millionth, so that machines agree."""
        exact = self.alpha * log(new) + self.beta * log(miss_rate(new, history)) + self.gamma
        return round(exact, 6)

    def choose(self, new: int, history: int) -> Ring:
        """Choose by the sign of h."""
        return _ring(self.value(new, history) > 0)


@dataclass(frozen=True, kw_only=True)
class FittedRule:
    """A rule that was fitted to measurements of groups of one size."""

    sp: int
    tp: int
    rule: EmpiricalRule


@dataclass(frozen=True, kw_only=True)
class RingRules:
    """Rules of one machine: the fitted rule of a group's size, or else Alg. 5."""

    model: RingModel
    inside: RingSpeeds
    """Speeds on one server."""
    between: RingSpeeds
    """Speeds over several servers."""
    fitted: tuple[FittedRule, ...] = ()

    def choose(self, shape: GroupShape, new: int, history: int) -> Ring:
        """Choose for a prefill of `new` tokens, at least one, on a group."""
        rule = self.fitted_to(shape)
        if rule is not None:
            return rule.choose(new, history)
        speeds = self.inside if len(shape.servers) == 1 else self.between
        return algorithm_5(new, history, model=self.model, speeds=speeds, members=shape.sp)

    def fitted_to(self, shape: GroupShape) -> EmpiricalRule | None:
        """Return the rule of groups with as many instances of as many ranks, or None."""
        size = shape.sp, shape.tp
        return next((rule.rule for rule in self.fitted if (rule.sp, rule.tp) == size), None)

    @cached_property
    def canonical(self) -> bytes:
        """JSON bytes, equal for equal rules; `parse_rules` reads them."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `canonical`, in hexadecimal."""
        return hashlib.sha256(self.canonical).hexdigest()


def parse_rules(canonical: bytes) -> RingRules:
    """Return the rules with this `canonical`.

    Raises:
        ConfigError: the bytes are not those of rules.
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
        raise ConfigError(f"invalid ring rules: {error!r}") from None


def parse_fitted(data: list[dict[str, object]]) -> tuple[FittedRule, ...]:
    """Return fitted rules from JSON; raise KeyError, TypeError or ValueError if they are
    invalid."""
    return tuple(
        FittedRule(
            sp=int(str(fields["sp"])),
            tp=int(str(fields["tp"])),
            rule=EmpiricalRule(**fields["rule"]),  # type: ignore[arg-type]
        )
        for fields in data
    )


def miss_rate(new: int, history: int) -> float:
    """Return T / (T + P): the fraction of a context whose KV was not cached."""
    return new / (new + history)


def _ring(pass_kv: bool) -> Ring:
    return "ring_kv" if pass_kv else "ring_q"


def prefill_flops(
    *, parameters: int, layers: int, width: int, new: int, history: int = 0, batch: int = 1
) -> float:
    """Return the operations for computing `new` tokens after `history`; causal attention counts
    half.

    Args:
        parameters: of the whole model; each is one multiplication and one addition per token.
        width: query heads times head dimension.
    """
    products = 2.0 * parameters * new
    attention = 4.0 * layers * width * new * (history + new / 2)
    return batch * (products + attention)


def flops_per_second(flops: float, *, seconds: float, devices: int) -> float:
    """Return the operations per second of each device."""
    return flops / seconds / devices


def utilization(flops: float, *, seconds: float, devices: int, peak: float) -> float:
    """Return the MFU: the fraction of the devices' peak that was reached.

    Args:
        peak: operations per second of a device.
    """
    return flops_per_second(flops, seconds=seconds, devices=devices) / peak
