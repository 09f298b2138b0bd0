"""Promises to clients: by when a waiting request has to start, and the place that follows.

*The order.* Requests of a higher client priority come first. Within a priority, each request is due
at a time: one with an objective when it has to start to keep it (least slack first), one without
when it has waited for `QueueLimits.patience_s`. So does one whose objective can no longer be kept,
because what it takes would only make others miss theirs. Requests that are due alike keep the order
that is fair to all keys (`queue.py`).

*The bound.* Nobody is due before it comes, and nobody later than `patience_s` after it came. From
then on a request has the highest priority, too. So no request is passed by one that came more than
`patience_s` after it, whatever objectives and priorities others have: it waits as long as if it had
come so much later in the order of arrival. Only modest tenants (`queue.py`) may still pass it.

Without objectives and priorities nobody has a place, and the order is that of `queue.py` alone.

*Predictions.* The time that a prompt takes is that of exact attention on the best number of
instances of the best gang, behind what that gang has cached when the request begins to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from csps.configurator.costs.cost_table import Costs
from csps.protocols.core.errors import ConfigError, SloNotMet
from csps.services.scheduling.events.events import GangId
from csps.services.scheduling.events.limits import SECOND_NS, QueueLimits
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.state import (
    NO_PLACE,
    Cached,
    Gang,
    Instance,
    Place,
    Request,
    Round,
    order_key,
)

OVERDUE = -(1 << 62)
"""Client priority of a request that has waited for `patience_s`."""


class Ordering(NamedTuple):
    """Rule by which requests are due within a client priority."""

    due_ns: Callable[[Request, int], int | None]
    """Function that returns when a request is due now; None: when its patience is over."""
    varies: bool = False
    """True if two requests may change places although nothing happens."""


def least_slack(request: Request, now_ns: int) -> int | None:
    """Return the latest start that keeps the request's objective, while it can be kept."""
    latest_ns = request.latest_start_ns
    return None if latest_ns is None or latest_ns < now_ns else latest_ns


LEAST_SLACK = Ordering(least_slack)


class Promises:
    """Gives waiting requests their places, and predicts their first tokens.

    Args:
        cached: function that returns the longest beginning of a prompt that a gang has cached.
    """

    def __init__(
        self,
        this_round: Round,
        gangs: Gangs,
        costs: Costs,
        limits: QueueLimits,
        cached: Callable[[Request, GangId], Cached | None],
        ordering: Ordering = LEAST_SLACK,
    ) -> None:
        self._round, self._gangs, self._costs = this_round, gangs, costs
        self._patience_ns, self._cached = limits.patience_s * SECOND_NS, cached
        self._ordering = ordering
        self._changes_ns: int | None = None
        """Time at which some place changes next, although nothing happens."""

    @property
    def stale(self) -> bool:
        """True if places are no longer those of the last `place_all`."""
        changes_ns = self._changes_ns
        return changes_ns is not None and changes_ns <= self._round.now_ns

    def predict(self, request: Request) -> None:
        """Predict how long the request takes, and so the latest start that keeps its objective."""
        self.predict_times(request)
        request.latest_start_ns = None
        promise = request.promise
        if promise is None or request.generated_tokens:
            return
        dues = []
        if promise.ttft_ns is not None:
            dues.append(request.submitted_ns + promise.ttft_ns)
        if promise.e2e_ns is not None:
            answer_ns = request.output_tokens * self._iteration_ns()
            dues.append(request.submitted_ns + promise.e2e_ns - answer_ns)
        if dues:
            overhead_ns = self._costs.table.overhead_ns
            request.latest_start_ns = min(dues) - request.predicted_ns - overhead_ns

    def predict_times(self, request: Request) -> None:
        """Predict how long the request takes, behind what is cached now."""
        times = [self._times_ns(request, gang) for gang in self._prefill_gangs()]
        known = [(best, work) for best, work in times if best]
        request.predicted_ns, request.work_ns = min(known, default=(0, 0))

    def _times_ns(self, request: Request, gang: Gang) -> tuple[int, int]:
        """Return the predicted time of the prompt on a gang, and on one instance of it; zeros if
        its latency is unknown."""
        cached = self._cached(request, gang.id)
        return self.prompt_ns(request.prompt_tokens, cached.tokens if cached else 0, gang)

    def prompt_ns(self, tokens: int, past: int, gang: Gang) -> tuple[int, int]:
        """Return the predicted time of a prompt behind its first `past` tokens on the best group of
        a gang, and on one instance of it; zeros if its latency is unknown."""
        size, by_size = 1, []
        while size <= len(gang.instances):
            with suppress(ConfigError):  # groups of this size were not measured
                latency = self._costs.exact(size, gang.tp)
                by_size.append(latency.predict_ns(tokens - past, past))
            size *= 2
        return (min(by_size), by_size[0]) if by_size else (0, 0)

    def _instances(self) -> list[Instance]:
        return [instance for gang in self._prefill_gangs() for instance in gang.instances]

    def _prefill_gangs(self) -> list[Gang]:
        return list({pair.prefill.id: pair.prefill for pair in self._gangs.pairs}.values())

    def _iteration_ns(self) -> int:
        """Return the least measured time between two tokens; 0 before the first answer."""
        times = [pair.decode.iteration_ns for pair in self._gangs.pairs]
        return min((time_ns for time_ns in times if time_ns), default=0)

    # --- places ---

    def place(self, request: Request) -> Place:
        """Return the place of a request now, as if nobody without an objective waited."""
        now_ns = self._round.now_ns
        overdue_ns = request.submitted_ns + self._patience_ns
        if overdue_ns <= now_ns:
            return OVERDUE, overdue_ns
        self._note_change(request, overdue_ns)
        due_ns = self._ordering.due_ns(request, now_ns)
        if due_ns is None:
            # What has begun to answer goes on before anybody new.
            due_ns = request.submitted_ns if request.generated_tokens else overdue_ns
        return request.client_priority, min(max(due_ns, request.submitted_ns), overdue_ns)

    def place_all(self, fair: Sequence[Request]) -> None:
        """Give all waiting requests their places.

        Args:
            fair: the requests in the order that is fair to all keys, which those without an
                objective keep among themselves.
        """
        now_ns = self._round.now_ns
        self._changes_ns = None
        latest: dict[tuple[bool, int], int] = {}
        for request in reversed(fair):
            priority, due_ns = self.place(request)
            if self._ordering.due_ns(request, now_ns) is None:
                alike = request.modest, priority
                due_ns = latest[alike] = min(due_ns, latest.get(alike, due_ns))
            request.place = priority, due_ns

    def _note_change(self, request: Request, overdue_ns: int) -> None:
        """Note when the place of a request changes next."""
        now_ns, latest_ns = self._round.now_ns, request.latest_start_ns
        changes_ns = overdue_ns
        if self._ordering.varies:
            changes_ns = now_ns + 1
        elif latest_ns is not None and now_ns <= latest_ns < overdue_ns:
            changes_ns = latest_ns + 1
        if self._changes_ns is None or changes_ns < self._changes_ns:
            self._changes_ns = changes_ns

    def place_none(self, waiting: Iterable[Request]) -> None:
        """Take all places away: nobody has an objective or a priority."""
        self._changes_ns = None
        for request in waiting:
            request.place = NO_PLACE

    # --- predictions ---

    def wait_ns(self, request: Request, waiting: Iterable[Request]) -> int:
        """Predict for how long a request waits: for what runs, and for those before it.

        High-priority prompts wait for each other only, because they preempt.
        """
        key, high = order_key(request), request.priority == "high"
        ahead_ns = sum(
            self._work_ns(other)
            for other in waiting
            if other is not request
            if not high or other.priority == "high"
            if order_key(other) < key
        )
        return self._shared_ns(ahead_ns, high=high)

    def waits_ns(self, waiting: Sequence[Request]) -> list[int]:
        """Return `wait_ns` of many requests, which are in order."""
        high_ns = all_ns = 0
        waits = []
        for request in waiting:
            high = request.priority == "high"
            waits.append(self._shared_ns(high_ns if high else all_ns, high=high))
            all_ns += self._work_ns(request)
            high_ns += self._work_ns(request) if high else 0
        return waits

    def _work_ns(self, request: Request) -> int:
        """Return the predicted time of a prompt on one instance; those without an objective are
        predicted only when somebody asks."""
        if not request.work_ns:
            self.predict(request)
        return request.work_ns

    def _shared_ns(self, ahead_ns: int, *, high: bool) -> int:
        """Return the time for work on all instances together, and for what runs there."""
        instances = self._instances()
        if not instances:
            return 0
        now_ns = self._round.now_ns
        if high:
            running_ns = min(instance.high_priority_ns for instance in instances)
        else:
            left_ns = sum(max(0, instance.free_at_ns - now_ns) for instance in instances)
            running_ns = left_ns // len(instances)
        return running_ns + ahead_ns // len(instances)

    def broken(self, request: Request, waiting: Iterable[Request]) -> SloNotMet | None:
        """Return the error of a request that wants to be refused rather than served late, if its
        objective is predicted to be missed."""
        promise = request.promise
        if promise is None or not promise.refuse or request.generated_tokens:
            return None
        now_ns = self._round.now_ns
        if request.latest_start_ns is not None:
            starts_ns = now_ns + self.wait_ns(request, waiting)
            if starts_ns > request.latest_start_ns:
                takes_ns = starts_ns - request.submitted_ns + request.predicted_ns
                late_ns = starts_ns - request.latest_start_ns
                return SloNotMet("ttft", takes_ns / 1e6, retry_after_s=late_ns / 1e9)
        iteration_ns = self._iteration_ns()
        if promise.tpot_ns is not None and iteration_ns > promise.tpot_ns:
            return SloNotMet("tpot", iteration_ns / 1e6, retry_after_s=1.0)
        return None
