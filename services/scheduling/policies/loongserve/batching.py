"""Which requests are prefilled next (LoongServe §5.1, App. A).

First come, first served, as far as memory and computing allow:

- a request is taken if the instances have unused slots for its prompt, and the gang for the most
  that all its requests may ever hold: nothing is evicted, ever;
- no more are taken when the iteration would take longer than the *tipping point*, where prefill
  turns compute-bound;
- a batch that decodes is preempted for more requests only if these gain more than it loses
  (Eqs. 1-2). The oldest may need the slots of several, which then give way together or not at all.

When the oldest finds no slots, younger ones may pass it: in `max_num_ooe` rounds at most.

Which requests are prefilled together, and on how many instances (LoongServe §5.3).

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
    spared_ns,
    wait_ns,
)


class Dispatched(NamedTuple):
    """R_p and where it may go."""

    prompts: tuple[PendingPrompt, ...]
    preempted: tuple[DecodeGroup, ...]
    """Batches that may have to give way, in the worst case."""
    again_in_ns: int | None = None
    """When to look again at others, although nothing else happens."""


class Dispatcher:
    """One round.

    Args:
        model: times.
        future_slots: of the gang, that nobody was promised at the most that he may hold.
        average_decode_ns: AvgLat_d, how long finished requests were decoded.
        most: requests that a round takes.
        max_num_ooe: rounds in which a request may be passed.
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
            pending: in order of admission.
            idle: instances without KV that is decoded.
            batches: those that decode.
        """
        queue = list(pending)
        taken: tuple[PendingPrompt, ...] = ()
        dop, unused = len(idle), sum(it.unused for it in idle)
        if dop:
            taken = self._more(queue, (), unused, dop)
        roomiest = sorted(batches, key=lambda it: (-it.unused, it.instances[0].order))
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
        """What a batch loses by one prefill iteration of its instances, per token (Eq. 1). How long
        an answer will be is unknown: what was drawn so far counts."""
        time_ns = self._model.ns([prompt.tokens for prompt in prompts], dop)
        loss = 0.0
        for request in batch.requests:
            loss += time_ns / request.generated_tokens
        return loss

    def gain(self, prompts: Sequence[PendingPrompt], batch: DecodeGroup) -> float:
        """What requests gain that need not wait for a batch to end, per token (Eq. 2)."""
        gained = 0.0
        for prompt in prompts:
            spared = spared_ns(prompt.waited_ns, batch.requests, self._average_decode_ns)
            gained += spared / prompt.tokens
        return gained

    def _instead(
        self,
        left: Sequence[PendingPrompt],
        taken: Sequence[PendingPrompt],
        unused: int,
        dop: int,
        batch: DecodeGroup,
    ) -> tuple[tuple[PendingPrompt, ...], int]:
        """Who goes beside those taken if a batch gives way, and 0; or nobody, and how long until
        that is to be looked at again. By waiting they gain once the batch goes on for longer than
        was estimated; and it loses less as its answers grow: each time these are a quarter longer.
        """
        room, wider = unused + batch.unused - _tokens(taken), dop + len(batch.instances)
        more = self._more(left, taken, room, wider)
        if not more:
            return (), 0
        gain, cost = self.gain(more, batch), self.cost((*taken, *more), wider, batch)
        if gain > cost:
            return more, 0
        wait = wait_ns(batch.requests, self._average_decode_ns)
        behind = cost if wait else cost - gain
        gained_ns = wait + math.ceil(behind / sum([1 / it.tokens for it in more]))
        time_ns = round(self._model.ns([it.tokens for it in (*taken, *more)], wider))
        grown_ns = max(time_ns, min(request.executed_ns for request in batch.requests) // 4)
        return (), 1 + min(gained_ns, grown_ns)

    def _more(
        self, queue: Sequence[PendingPrompt], before: Sequence[PendingPrompt], unused: int, dop: int
    ) -> tuple[PendingPrompt, ...]:
        """Requests that can go beside `before`: the oldest for which there are slots, until one
        that may be passed no more, or the tipping point."""
        taken: list[PendingPrompt] = []
        tokens = _tokens(before)
        squares = sum(it.tokens**2 for it in before)
        future = self._future - sum(it.future for it in before)
        line_of, tipping_ns = self._model.eq7(dop), self._model.tipping_ns(dop)
        for prompt in queue:
            if len(before) + len(taken) >= self._most:
                break
            if prompt.tokens > unused or prompt.future > future:
                if prompt.bypassed_rounds >= self._max_num_ooe:
                    break
                continue
            tokens, squares = tokens + prompt.tokens, squares + prompt.tokens**2
            if (before or taken) and line_of.ns(tokens, squares) > tipping_ns:
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
    """The fewest batches that have slots for the oldest; none if one does, or if all have not."""
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
"""n^2 m^2 of a round: a few milliseconds."""
MOST_REQUESTS, MOST_INSTANCES = 256, 32
"""What a round batches at most, for the same reason."""


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
        return _one_batch(table, n, m)
    return _traced(split_knz, int(np.argmin(ends_k)) + 1, n, float(ends_k.min()))


def _traced(split_knz: NDArray[np.int64], k: int, n: int, cost: float) -> Batching:
    """The batches of the first n requests on the first k instances, from where each was cut."""
    batches = []
    while n:
        first, begin = map(int, split_knz[k, n])
        batches.append(RequestBatch(first, n, begin, k))
        n, k = first, begin
    return Batching(tuple(reversed(batches)), cost)


def regret(found: Batching, best: Batching) -> float:
    """By which share of the best cost a batching is worse."""
    return found.cost / best.cost - 1


def _one_batch(table: _Costs, n: int, m: int) -> Batching | None:
    cost = float(table.of_instances(0, m)[0, n])
    return Batching((RequestBatch(0, n, 0, m),), cost) if np.isfinite(cost) else None


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
            line = self._model.eq7(dop)
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
