"""What serving teaches about times: of options, and of what a step's time leaves out of TTFT."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from csps.services.scheduling.cost import Allowed, Bucket

HALF_LIFE = 8
"""Steps after which a measurement counts half."""
WITHIN = 0.03
"""Predictions that were this near are left alone."""
WINDOW = 128
"""First tokens that the overhead is taken of."""
FEWEST = 8
QUANTILE = 0.95


class OptionDrift:
    """Measured times of options over predicted ones, until the predictions are corrected."""

    def __init__(self) -> None:
        self._log_ratios: dict[tuple[Bucket, str], float] = {}

    def observe(self, bucket: Bucket, strategy: str, ratio: float) -> None:
        """A step took `ratio` times as long as was predicted."""
        key, new = (bucket, strategy), math.log(max(ratio, 1e-3))
        weight = 1 - 0.5 ** (1 / HALF_LIFE)
        known = self._log_ratios.get(key)
        self._log_ratios[key] = new if known is None else known + weight * (new - known)

    def corrected(
        self, buckets: Mapping[Bucket, tuple[Allowed, ...]]
    ) -> Mapping[Bucket, tuple[Allowed, ...]]:
        """Buckets that predict what was measured."""
        found = dict(buckets)
        for (bucket, strategy), log_ratio in self._log_ratios.items():
            if bucket in found and abs(log_ratio) > WITHIN:
                found[bucket] = tuple(
                    it._replace(permille=max(1, round(it.permille * math.exp(log_ratio))))
                    if it.strategy == strategy
                    else it
                    for it in found[bucket]
                )
        self._log_ratios.clear()
        return found


class Overhead:
    """By how much first tokens come later than predicted, for all but the slowest."""

    def __init__(self) -> None:
        self._late_ns: deque[int] = deque(maxlen=WINDOW)

    def observe(self, late_ns: int) -> None:
        """A first token came so much later than its step was to end, or earlier."""
        self._late_ns.append(late_ns)

    @property
    def in_ns(self) -> int:
        """Not less than nothing, and nothing before a few have come."""
        if len(self._late_ns) < FEWEST:
            return 0
        in_order = sorted(self._late_ns)
        return max(0, in_order[int(QUANTILE * (len(in_order) - 1))])
