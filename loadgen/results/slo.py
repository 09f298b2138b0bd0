"""Service level objectives: bounds on a request's latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from csps.loadgen.results.record import RequestRecord
from csps.protocols.errors import ConfigError, nearest

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Milliseconds that a request's latencies may reach; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """Of `ttft:2000 tpot:50`.

        Raises:
            ConfigError: a word is no metric with a number.
        """
        bounds: dict[str, float] = {}
        for word in words:
            name, _, milliseconds = word.partition(":")
            if name not in METRICS:
                raise ConfigError(f"unknown goodput metric '{name}'{nearest(name, METRICS)}")
            try:
                bounds[name] = float(milliseconds)
            except ValueError:
                raise ConfigError(f"goodput: expected {name}:MILLISECONDS, got '{word}'") from None
        return cls(**bounds)

    def __bool__(self) -> bool:
        return any(bound is not None for bound in vars(self).values())

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request completed within all bounds; a single token has a TPOT of 0."""
        if not record.completed:
            return False
        latencies = (record.ttft_s, record.tpot_s or 0.0, record.e2el_s)
        bounds = (self.ttft, self.tpot, self.e2el)
        return all(
            bound is None or 1000 * latency <= bound
            for latency, bound in zip(latencies, bounds, strict=True)
        )

    def share(self, records: Iterable[RequestRecord]) -> float:
        """Of all requests, those that failed or were cancelled included; 0 of none."""
        met = [self.met_by(record) for record in records]
        return sum(met) / len(met) if met else 0.0
