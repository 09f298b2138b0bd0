"""When a run has kept its service level objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from csps.loadgen.results.result import Result
from csps.protocols.errors import FaultError

NORMALIZED = tuple(f"mean_normalized_{part}_latency_ms" for part in ("total", "input", "output"))
"""LoongServe's latencies: per token in and out, TTFT per token in, TPOT."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may reach at most, and at least."""

    most: Mapping[str, float]
    """Of fields of the result."""
    attainment: float | None = None
    """Least share of requests within the SLO; None where there is none."""
    failed: float = 0.0
    """Greatest share of requests that fail."""

    @classmethod
    def times_light_load(cls, light: Result, factor: float, *, failed: float = 0.0) -> Limits:
        """LoongServe's: so many times the latencies of a run without load.

        Raises:
            FaultError: that run has no latencies.
        """
        if not light["completed"]:
            reasons = ", ".join(light["failed_by_reason"]) or "it was empty"
            raise FaultError(f"no request of the light load completed: {reasons}")
        most = {name: factor * light[name] for name in NORMALIZED if name in light}
        return cls(most=most, failed=failed)

    def missed_by(self, result: Result) -> str:
        """What a run has missed, in words; empty if nothing."""
        lost = result["num_prompts"] - result["completed"]
        if lost > self.failed * result["num_prompts"]:
            return f"{lost} of {result['num_prompts']} requests did not complete"
        for name, limit in self.most.items():
            if result.get(name, 0.0) > limit:
                return f"{name} {result[name]:.3g} > {limit:.3g}"
        if self.attainment is not None and result["slo_attainment"] < self.attainment:
            return f"{result['slo_attainment']:.1%} of requests within SLO < {self.attainment:.1%}"
        return ""
