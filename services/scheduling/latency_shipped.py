"""Latencies for servers that have not been profiled.

Measured with the included model on two cores, two prefill and two decode ranks
(`benchmarks/results/profile-2026-11-22.md`): the right shape for any small server, another size.
"""

from __future__ import annotations

from csps.services.scheduling.latency import (
    DecodeCost,
    DecodeLine,
    GroupShape,
    LatencyTable,
    LinkCost,
    StepCost,
)

_STEPS = {
    1: (6.199e-3, 2.013e-5, 2.994e-8, 9.933e-9),
    2: (1.574e-2, 1.783e-5, 2.142e-8, 9.796e-9),
}
"""(a, b, c, d) in seconds by instances."""

_DECODE = {1: (2.083e-3, 6.168e-7, 4.982e-4), 2: (8.244e-3, 1.31e-6, 5.532e-4)}
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
        (GroupShape(strategy="ulysses", sp=sp), StepCost.of_seconds(*fit))
        for sp, fit in _STEPS.items()
    ),
    decode=tuple(
        (GroupShape(strategy="decode", sp=sp), _decode(*fit)) for sp, fit in _DECODE.items()
    ),
    links=(("inside", LinkCost.of_seconds(*_INSIDE)),),
)
