"""The bounds that are answered ahead of requests, and learned from."""

from __future__ import annotations

from collections.abc import Iterator

from csps.protocols.plans import Objective, ObjectiveKind

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Bounds on the loss."""
TIMES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
"""Bounds on TTFT, of what exact attention takes that is not cut."""


def objectives(kind: ObjectiveKind, exact_seconds: float) -> Iterator[Objective]:
    """One for each bucket.

    Args:
        exact_seconds: what the prompt takes with exact SP-NTP, not cut.
    """
    if kind == "ttft":
        yield from (Objective(kind=kind, max_accuracy_loss=bound) for bound in LOSSES)
        return
    for share in TIMES:
        most_ms = 1000 * exact_seconds * share
        yield Objective(kind=kind, max_accuracy_loss=LOSSES[-1], max_ttft_ms=most_ms)
