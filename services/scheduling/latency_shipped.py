"""Latencies for servers that have not been profiled.

Measured with the included model, two prefill and two decode ranks on two cores that other work
shared, and within a fifth or so of what was measured (`benchmarks/results/profile-2026-11-22.md`):
a rough shape to begin with.
"""

from __future__ import annotations

from csps.services.scheduling.latency import (
    DecodeCost,
    DecodeLine,
    LatencyKey,
    LatencyTable,
    LinkCost,
    StepCost,
)

_STEPS = {
    1: (6.385e-3, 1.56e-5, 2.311e-8, 9.888e-9),
    2: (1.746e-2, 8.158e-6, 1.624e-8, 7.974e-9),
}
"""(a, b, c, d) in seconds by instances."""

_DECODE = {1: (1.54e-3, 4.278e-7, 4.116e-4), 2: (7.817e-3, 7.427e-7, 4.951e-4)}
"""(a, b, c) in seconds by instances; no second regime up to 64 requests."""

_INSIDE = (3.4e-5, 2.576e-10)
"""Latency and seconds a byte between two ranks of the machine."""


def _decode(a: float, b: float, c: float) -> DecodeCost:
    line = DecodeLine.of_seconds(a, b, c)
    return DecodeCost(small=line, large=line, tipping_batch=64)


SHIPPED = LatencyTable(
    name="needle on two cores, shipped",
    exact="ulysses",
    steps=tuple(
        (LatencyKey(strategy="ulysses", sp=sp), StepCost.of_seconds(*fit))
        for sp, fit in _STEPS.items()
    ),
    decode=tuple(
        (LatencyKey(strategy="decode", sp=sp), _decode(*fit)) for sp, fit in _DECODE.items()
    ),
    links=(("inside", LinkCost.of_seconds(*_INSIDE)),),
)
