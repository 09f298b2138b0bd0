"""LoongServe chooses the requests to prefill next (§5.1, App. A) and their batches (§5.3).

`Dispatcher` takes requests first come, first served, as long as slots suffice and the iteration
stays below the point where prefill becomes compute-bound. It preempts decode groups only if the
requests gain more than the groups lose (Eqs. 1-2).

`plain` is dynamic programming over requests by descending length and instances by descending free
slots. With R[j+1..i] the requests after the j-th up to the i-th, and E[l+1..k] likewise (Eq. 5,
whose printed bounds never reach f[0][.])::

    f[i][k] = min over 0 <= j < i, 0 <= l < k with D(R[j+1..i]) <= V(E[l+1..k])
              of f[j][l] + T(R[j+1..i], E[l+1..k]),   f[0][0] = 0,   answer min over k of f[n][k]

D counts tokens and V free slots. T is the sum of the latencies of a batch's requests, each of which
takes the whole iteration; *normalised*, each latency is divided by the request's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Elastic,
    PendingPrompt,
    PrefillModel,
    saved_ns,
    wait_ns,
)


class Dispatched(NamedTuple):
    """The requests to prefill next (R_p), and the decode groups that may be preempted for them."""

    prompts: tuple[PendingPrompt, ...]
    preempted: tuple[DecodeGroup, ...]
    """Decode groups that are preempted in the worst case."""
    again_in_ns: int | None = None
    """Time after which to dispatch again, even without another event."""


class Dispatcher:
    """The choice of requests in one round.

    Args:
        model: predicted times.
        future_slots: slots of the gang that are not reserved for the longest possible answers.
        average_decode_ns: AvgLat_d, the average decode time of finished requests.
        most: most requests of a round.
        max_num_ooe: most rounds in which a request may be passed.
    """

    def __init__(
        self,
        model: PrefillModel,
        *,
        future_slots: int,
        average_decode_ns: int,
        most: int,
        max_num_ooe: int,
    ) -> None:
        self._model, self._most, self._max_num_ooe = model, most, max_num_ooe
        self._average_decode_ns = average_decode_ns
        self._future = future_slots

    def dispatch(
        self,
        pending: Iterable[PendingPrompt],
        idle: Sequence[Elastic],
        batches: Sequence[DecodeGroup],
    ) -> Dispatched:
        """Choose among the pending requests.

        Args:
            pending: requests in order.
            idle: instances without KV of decoding sequences.
            batches: decode groups that may be preempted.
        """
        queue = list(pending)
        taken: tuple[PendingPrompt, ...] = ()
        dop, unused = len(idle), sum(instance.unused for instance in idle)
        if dop:
            taken = self._more(queue, (), unused, dop)
        roomiest = sorted(batches, key=lambda batch: (-batch.unused, batch.instances[0].order))
        preempted: list[DecodeGroup] = []
        again: list[int] = []
        for batch in roomiest:
            left = [request for request in queue if request not in taken]
            more, in_ns = self._instead(left, taken, unused, dop, batch)
            again.append(in_ns)
            if more:
                taken, dop = (*taken, *more), dop + len(batch.instances)
                unused += batch.unused
                preempted.append(batch)
        if not taken and (together := _fewest_batches(queue, unused, roomiest)):
            taken, in_ns = self._instead(queue, (), unused, dop, _as_one(together))
            again.append(in_ns)
            preempted = together if taken else []
        return Dispatched(taken, tuple(preempted), min(filter(None, again), default=None))

    def cost(self, prompts: Sequence[PendingPrompt], dop: int, batch: DecodeGroup) -> float:
        """Return the loss of a decode group by a prefill iteration, per token (Eq. 1)."""
        # The final length of an answer is unknown, so its tokens so far count.
        time_ns = self._model.ns([prompt.tokens for prompt in prompts], dop)
        loss = 0.0
        for request in batch.requests:
            loss += time_ns / request.generated_tokens
        return loss

    def gain(self, prompts: Sequence[PendingPrompt], batch: DecodeGroup) -> float:
        """Return the gain of requests that do not wait for a decode group, per token (Eq. 2)."""
        gained = 0.0
        for prompt in prompts:
            saved = saved_ns(prompt.waited_ns, batch.requests, self._average_decode_ns)
            gained += saved / prompt.tokens
        return gained

    def _instead(
        self,
        left: Sequence[PendingPrompt],
        taken: Sequence[PendingPrompt],
        unused: int,
        dop: int,
        batch: DecodeGroup,
    ) -> tuple[tuple[PendingPrompt, ...], int]:
        """Return the further requests that preempting a decode group pays for, and 0.

        Without such requests, return none and the time in ns after which to try again.
        """
        room, wider = unused + batch.unused - _tokens(taken), dop + len(batch.instances)
        more = self._more(left, taken, room, wider)
        if not more:
            return (), 0
        gain, cost = self.gain(more, batch), self.cost((*taken, *more), wider, batch)
        if gain > cost:
            return more, 0
        # The requests gain by waiting once the group decodes for longer than estimated. The group
        # loses less as its answers grow: try again each time they are a quarter longer.
        wait = wait_ns(batch.requests, self._average_decode_ns)
        missing = cost if wait else cost - gain
        gained_ns = wait + math.ceil(missing / sum([1 / prompt.tokens for prompt in more]))
        time_ns = round(self._model.ns([prompt.tokens for prompt in (*taken, *more)], wider))
        grown_ns = max(time_ns, min(request.executed_ns for request in batch.requests) // 4)
        return (), 1 + min(gained_ns, grown_ns)

    def _more(
        self, queue: Sequence[PendingPrompt], before: Sequence[PendingPrompt], unused: int, dop: int
    ) -> tuple[PendingPrompt, ...]:
        """Return further requests beside `before`, up to the tipping point.

        These are the oldest with enough slots, until one that may not be passed again.
        """
        taken: list[PendingPrompt] = []
        tokens = _tokens(before)
        squares = sum(prompt.tokens**2 for prompt in before)
        future = self._future - sum(prompt.future for prompt in before)
        eq7, tipping_ns = self._model.eq7(dop), self._model.tipping_ns(dop)
        for prompt in queue:
            if len(before) + len(taken) >= self._most:
                break
            if prompt.tokens > unused or prompt.future > future:
                if prompt.bypassed_rounds >= self._max_num_ooe:
                    break
                continue
            tokens, squares = tokens + prompt.tokens, squares + prompt.tokens**2
            if (before or taken) and eq7.ns(tokens, squares) > tipping_ns:
                break
            taken.append(prompt)
            unused -= prompt.tokens
            future -= prompt.future
        return tuple(taken)


def _tokens(prompts: Sequence[PendingPrompt]) -> int:
    return sum(prompt.tokens for prompt in prompts)


def _fewest_batches(
    queue: Sequence[PendingPrompt], unused: int, roomiest: Sequence[DecodeGroup]
) -> list[DecodeGroup]:
    """Return the fewest groups that together have slots for the oldest request.

    None if a single one is enough, or if all are not.
    """
    missing = queue[0].tokens - unused if queue else 0
    chosen: list[DecodeGroup] = []
    for batch in roomiest:
        if missing <= 0:
            break
        missing -= batch.unused
        chosen.append(batch)
    return chosen if missing <= 0 and len(chosen) > 1 else []


def _as_one(batches: Sequence[DecodeGroup]) -> DecodeGroup:
    return DecodeGroup(
        instances=tuple(instance for batch in batches for instance in batch.instances),
        requests=tuple(request for batch in batches for request in batch.requests),
        context=sum(batch.context for batch in batches),
    )


Objective = Literal["normalised", "sum"]
MOST_WORK = 1 << 20
"""Largest n^2 m^2 of a round, for a few milliseconds."""
MOST_REQUESTS, MOST_INSTANCES = 256, 32
"""Most requests and instances of a round, for the same reason."""


class RequestBatch(NamedTuple):
    """Requests [first, stop) on instances [begin, end) of the given order."""

    first: int
    stop: int
    begin: int
    end: int


class Batching(NamedTuple):
    """All batches of a round."""

    batches: tuple[RequestBatch, ...]
    cost: float
    """Value of the objective."""


def most_requests(instances: int) -> int:
    """Return the most requests that a round batches, which bounds its time."""
    return min(MOST_REQUESTS, max(1, int(MOST_WORK**0.5) // instances))


def plain(
    lengths: Sequence[int],
    slots: Sequence[int],
    model: PrefillModel,
    objective: Objective = "normalised",
) -> Batching | None:
    """Return the best batching in these orders, in O(n^2 m^2).

    Args:
        lengths: lengths of the requests, descending.
        slots: free slots of the instances, descending.
        model: predicted times.
        objective: quantity to minimize.

    Returns:
        The batching, or None if the requests exceed all instances together.
    """
    # The paper orders instances by ascending slots. Descending misses the best order in 30 of 400
    # random cases, ascending in 292.
    n, m = len(lengths), len(slots)
    table = _Costs(lengths, slots, model, objective)
    best_kn = np.full((m + 1, n + 1), np.inf)
    best_kn[0, 0] = 0.0
    split_knz = np.zeros((m + 1, n + 1, 2), dtype=np.int64)
    columns_n = np.arange(n + 1)
    open_begins = [0]  # the other ones leave no request for the instances behind them
    for k in range(1, m + 1):
        for begin in open_begins:
            tried_ji = best_kn[begin][:, None] + table.of_instances(begin, k)
            firsts_i = np.argmin(tried_ji, axis=0)
            least_i = tried_ji[firsts_i, columns_n]
            better_i = least_i < best_kn[k]
            best_kn[k, better_i] = least_i[better_i]
            split_knz[k, better_i, 0] = firsts_i[better_i]
            split_knz[k, better_i, 1] = begin
        if np.isfinite(best_kn[k, :n]).any():
            open_begins.append(k)
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
    """Return the batching within Eq. 6's lower bounds on the cut of the last batch.

    Eq. 6 prunes the search to O((n + m)^2), but does not always hold: its bounds were wrong in one
    of seven random cases (`plain` is exact).
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
        return _one_batch(table, n, m)
    return _traced(split_knz, int(np.argmin(ends_k)) + 1, n, float(ends_k.min()))


def _traced(split_knz: NDArray[np.int64], k: int, n: int, cost: float) -> Batching:
    """Return the batches of the first n requests on the first k instances, from their cuts."""
    batches = []
    while n:
        first, begin = map(int, split_knz[k, n])
        batches.append(RequestBatch(first, n, begin, k))
        n, k = first, begin
    return Batching(tuple(reversed(batches)), cost)


def _one_batch(table: _Costs, n: int, m: int) -> Batching | None:
    cost = float(table.of_instances(0, m)[0, n])
    return Batching((RequestBatch(0, n, 0, m),), cost) if np.isfinite(cost) else None


class _Costs:
    """Costs T(R[j+1..i], E[l+1..k]) for all j and i."""

    def __init__(
        self,
        lengths: Sequence[int],
        slots: Sequence[int],
        model: PrefillModel,
        objective: Objective,
    ) -> None:
        self._model = model
        weights = [1.0 if objective == "sum" else 1 / length for length in lengths]
        self._tokens_ji = _between([float(length) for length in lengths])
        self._squares_ji = _between([float(length * length) for length in lengths])
        self._weights_ji = _between(weights)
        self._slots = [0]
        for count in slots:
            self._slots.append(self._slots[-1] + count)
        self._of_dop: dict[int, NDArray[np.float64]] = {}

    def of_instances(self, begin: int, end: int) -> NDArray[np.float64]:
        """Return the costs on some instances, infinite if the requests do not fit or are none.

        Shape (n + 1, n + 1), indexed [j, i].
        """
        dop = end - begin
        if dop not in self._of_dop:
            eq7 = self._model.eq7(dop)
            times_ji = (eq7.alpha + eq7.beta * self._tokens_ji) + eq7.gamma * self._squares_ji
            self._of_dop[dop] = times_ji * self._weights_ji
        room = self._slots[end] - self._slots[begin]
        possible_ji = (self._tokens_ji > 0) & (self._tokens_ji <= room)
        costs_ji: NDArray[np.float64] = np.where(possible_ji, self._of_dop[dop], np.inf)
        return costs_ji


def _between(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the sums of the values after the j-th up to the i-th, at [j, i] for j < i."""
    # numpy's sums do not promise the same order of additions on every machine.
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    sums_n = np.array(sums)
    between_ji: NDArray[np.float64] = sums_n[None, :] - sums_n[:, None]
    return between_ji
