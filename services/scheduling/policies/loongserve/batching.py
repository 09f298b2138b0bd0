"""Which requests are prefilled together, and on how many instances (LoongServe §5.3).

Dynamic programming over requests in descending order of length and instances in descending order of
unused slots. With R[j+1..i] the requests after the j-th up to the i-th, and E[l+1..k] likewise
(Eq. 5, whose printed bounds never reach f[0][.])::

    f[i][k] = min over 0 <= j < i, 0 <= l < k with D(R[j+1..i]) <= V(E[l+1..k])
              of f[j][l] + T(R[j+1..i], E[l+1..k]),   f[0][0] = 0,   answer min over k of f[n][k]

D counts tokens, V unused slots. T is the sum of the latencies of the requests of a batch, each of
which takes the whole iteration; or, *normalised*, of these divided by the requests' lengths, which
is what the paper measures.

The paper orders instances by ascending slots; descending misses the best order in 30 of 400 random
cases, ascending in 292. Its Eq. 6, by which the search could be pruned to O((n + m)^2), is no
theorem: bounds from it were worse than necessary in one of seven random cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from csps.services.scheduling.policies.loongserve.prefill_model import PrefillModel

Objective = Literal["normalised", "sum"]
MOST_WORK = 1 << 20
"""n^2 m^2 of a round: a few milliseconds."""
MOST_REQUESTS, MOST_INSTANCES = 256, 32
"""What a round batches at most, for the same reason."""


class Batch(NamedTuple):
    """Requests [first, stop) on instances [begin, end) of the given order."""

    first: int
    stop: int
    begin: int
    end: int


class Batching(NamedTuple):
    """All batches of a round."""

    batches: tuple[Batch, ...]
    cost: float
    """Of the objective."""


def most_requests(instances: int) -> int:
    """Requests that a round may batch on so many instances; it is bounded in time."""
    return min(MOST_REQUESTS, max(1, int(MOST_WORK**0.5) // instances))


def plain(
    lengths: Sequence[int],
    slots: Sequence[int],
    model: PrefillModel,
    objective: Objective = "normalised",
) -> Batching | None:
    """The best batching in these orders, in O(n^2 m^2).

    Args:
        lengths: of the requests, descending.
        slots: unused ones of the instances, descending.
        model: times.
        objective: what is minimised.

    Returns:
        The batching, or None if the requests do not fit all instances together.
    """
    n, m = len(lengths), len(slots)
    table = _Costs(lengths, slots, model, objective)
    best_kn = np.full((m + 1, n + 1), np.inf)
    best_kn[0, 0] = 0.0
    split_knz = np.zeros((m + 1, n + 1, 2), dtype=np.int64)
    columns_n = np.arange(n + 1)
    for k in range(1, m + 1):
        for begin in range(k):
            tried_ji = best_kn[begin][:, None] + table.of_instances(begin, k)
            firsts_i = np.argmin(tried_ji, axis=0)
            least_i = tried_ji[firsts_i, columns_n]
            better_i = least_i < best_kn[k]
            best_kn[k, better_i] = least_i[better_i]
            split_knz[k, better_i, 0] = firsts_i[better_i]
            split_knz[k, better_i, 1] = begin
    ends_k = best_kn[1:, n]
    if not np.isfinite(ends_k).any():
        return None
    return _traced(split_knz, int(np.argmin(ends_k)) + 1, n, float(ends_k.min()))


def pruned(
    lengths: Sequence[int],
    slots: Sequence[int],
    model: PrefillModel,
    objective: Objective = "normalised",
) -> Batching | None:
    """The batching that is found within Eq. 6's lower bounds on where the last batch is cut.

    What it costs more than `plain` is its `regret`.
    """
    n, m = len(lengths), len(slots)
    table = _Costs(lengths, slots, model, objective)
    costs = {(begin, k): table.of_instances(begin, k) for k in range(m + 1) for begin in range(k)}
    best_kn = np.full((m + 1, n + 1), np.inf)
    best_kn[0, 0] = 0.0
    split_knz = np.zeros((m + 1, n + 1, 2), dtype=np.int64)
    for i in range(1, n + 1):
        for k in range(1, m + 1):
            for j in range(int(split_knz[k - 1, i, 0]), i):
                for begin in range(min(int(split_knz[k, i - 1, 1]), k - 1), k):
                    tried = best_kn[begin, j] + costs[begin, k][j, i]
                    if tried < best_kn[k, i]:
                        best_kn[k, i], split_knz[k, i] = tried, (j, begin)
    ends_k = best_kn[1:, n]
    if not np.isfinite(ends_k).any():
        return _together(table, n, m)
    return _traced(split_knz, int(np.argmin(ends_k)) + 1, n, float(ends_k.min()))


def _traced(split_knz: NDArray[np.int64], k: int, n: int, cost: float) -> Batching:
    """The batches of the first n requests on the first k instances, from where each was cut."""
    batches = []
    while n:
        first, begin = map(int, split_knz[k, n])
        batches.append(Batch(first, n, begin, k))
        n, k = first, begin
    return Batching(tuple(reversed(batches)), cost)


def regret(found: Batching, best: Batching) -> float:
    """By which share of the best cost a batching is worse."""
    return found.cost / best.cost - 1


def _together(table: _Costs, n: int, m: int) -> Batching | None:
    cost = float(table.of_instances(0, m)[0, n])
    return Batching((Batch(0, n, 0, m),), cost) if np.isfinite(cost) else None


class _Costs:
    """T(R[j+1..i], E[l+1..k]) for all j and i."""

    def __init__(
        self,
        lengths: Sequence[int],
        slots: Sequence[int],
        model: PrefillModel,
        objective: Objective,
    ) -> None:
        self._model = model
        weights = [1.0 if objective == "sum" else 1 / length for length in lengths]
        self._tokens_ji = _between([float(it) for it in lengths])
        self._squares_ji = _between([float(it * it) for it in lengths])
        self._weights_ji = _between(weights)
        self._slots = [0]
        for count in slots:
            self._slots.append(self._slots[-1] + count)
        self._of_dop: dict[int, NDArray[np.float64]] = {}

    def of_instances(self, begin: int, end: int) -> NDArray[np.float64]:
        """(n + 1, n + 1), [j, i]; infinite where the requests do not fit, or are none."""
        dop = end - begin
        if dop not in self._of_dop:
            line = self._model.line(dop)
            times_ji = (line.alpha + line.beta * self._tokens_ji) + line.gamma * self._squares_ji
            self._of_dop[dop] = times_ji * self._weights_ji
        room = self._slots[end] - self._slots[begin]
        possible_ji = (self._tokens_ji > 0) & (self._tokens_ji <= room)
        costs_ji: NDArray[np.float64] = np.where(possible_ji, self._of_dop[dop], np.inf)
        return costs_ji


def _between(values: Sequence[float]) -> NDArray[np.float64]:
    """[j, i]: the sum of the values after the j-th up to the i-th, where j < i."""
    sums = [0.0]
    for value in values:  # in this order on every machine, which numpy's sums do not promise
        sums.append(sums[-1] + value)
    sums_n = np.array(sums)
    between_ji: NDArray[np.float64] = sums_n[None, :] - sums_n[:, None]
    return between_ji
