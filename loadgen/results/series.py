"""How a run went over time: counts in equal steps, for plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from csps.loadgen.results.record import RequestRecord

MAX_STEPS = 600
_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)


def series(records: Sequence[RequestRecord], duration_s: float) -> dict[str, Any]:
    """Of each step: requests that arrived, finished, failed, were under way; pieces of answers.

    Under way is the mean over the step, from each request's scheduled start, so that it is what
    Little's law speaks of.
    """
    step_s = next((it for it in _STEPS_S if duration_s / it <= MAX_STEPS), _STEPS_S[-1])
    last_s = max([duration_s, *(it.finished_ns / 1e9 for it in records)])
    edges = step_s * np.arange(int(last_s / step_s) + 2)

    def counts(times_ns: Iterable[int]) -> list[int]:
        return [int(it) for it in np.histogram(np.array(list(times_ns)) / 1e9, edges)[0]]

    return {
        "step_s": step_s,
        "arrived": counts(it.scheduled_ns for it in records),
        "completed": counts(it.finished_ns for it in records if it.completed),
        "failed": counts(it.finished_ns for it in records if it.status == "failed"),
        "chunks": counts(ns for it in records for ns in it.chunk_ns),
        "running": [round(float(it), 3) for it in _running(records, edges) / step_s],
    }


def _running(records: Sequence[RequestRecord], edges: np.ndarray) -> np.ndarray:
    """Request-seconds in each step."""
    begins, ends = (
        np.sort(np.array([getattr(it, name) for it in records]) / 1e9)
        for name in ("scheduled_ns", "finished_ns")
    )
    running: np.ndarray = np.diff(_elapsed(begins, edges) - _elapsed(ends, edges))
    return running


def _elapsed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The sum over all times before an edge of how long before."""
    passed = np.searchsorted(times, edges)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    elapsed: np.ndarray = passed * edges - sums[passed]
    return elapsed
