"""Service-level objectives of a request, and whether its answer met them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Objective = Literal["ttft", "tpot", "e2e", "all"]
"""Of what a bound is; "all" is met by requests that meet every bound that they have."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds in milliseconds; None where there is none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def judged(
        self, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
    ) -> dict[Objective, bool]:
        """Which bounds a whole answer met. An answer of one token has no time per further token,
        and so no bound on it either."""
        measured: dict[Objective, tuple[float | None, float | None]] = {
            "ttft": (self.ttft_ms, ttft_s),
            "tpot": (self.tpot_ms, tpot_s),
            "e2e": (self.e2e_ms, e2e_s),
        }
        return _with_all(
            {
                name: seconds * 1e3 <= bound_ms
                for name, (bound_ms, seconds) in measured.items()
                if bound_ms is not None and seconds is not None
            }
        )

    def missed(self) -> dict[Objective, bool]:
        """All bounds, of a request that got no whole answer."""
        bounds: dict[Objective, float | None] = {
            "ttft": self.ttft_ms,
            "tpot": self.tpot_ms,
            "e2e": self.e2e_ms,
        }
        return _with_all({name: False for name, bound in bounds.items() if bound is not None})


def _with_all(met: dict[Objective, bool]) -> dict[Objective, bool]:
    return {**met, "all": all(met.values())} if met else {}
