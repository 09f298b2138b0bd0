"""Requests from admission to their end, the queues of waiting ones, and admission."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter

from csps.protocols.core.errors import CspsError, DeadlineExceeded, QueueFull
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.deciding.decisions import CapacityCheck, Policy
from csps.services.scheduling.events.commands import Fail, Refuse
from csps.services.scheduling.events.events import RequestId, Submitted, WireError
from csps.services.scheduling.events.limits import (
    SECOND_NS,
    QueueLimits,
    Timer,
    Timers,
    delay_counters,
)
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.state import Priority, Request, Round, Sequence, wire_error

_request_id = attrgetter("id")


class Queue:
    """Waiting requests by priority, each queue in order of admission.

    A request that comes back after a fault takes its old place, before all that came after it.
    """

    def __init__(self) -> None:
        # Lists, because most requests arrive at the end and leave near the front, and moving the
        # rest of ten thousand pointers takes two microseconds. A list with marks for those that
        # left would make every round skip them.
        self.by_priority: dict[Priority, list[Request]] = {"high": [], "low": []}
        """Sorted queues; others read them."""

    def __len__(self) -> int:
        return sum(map(len, self.by_priority.values()))

    def __contains__(self, request: Request) -> bool:
        queue = self.by_priority[request.priority]
        at = bisect_left(queue, request.id, key=_request_id)
        return at < len(queue) and queue[at] is request

    def everyone(self) -> Iterator[Request]:
        """Yield all requests, queue after queue; the queues must not change meanwhile."""
        for queue in self.by_priority.values():
            yield from queue

    def push(self, request: Request) -> None:
        """Add a request to the queue of its priority."""
        queue = self.by_priority[request.priority]
        if not queue or queue[-1].id < request.id:
            queue.append(request)
        else:
            queue.insert(bisect_left(queue, request.id, key=_request_id), request)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is in its queue."""
        queue = self.by_priority[request.priority]
        at = bisect_left(queue, request.id, key=_request_id)
        if at < len(queue) and queue[at] is request:
            del queue[at]


DRAIN_RETRY_AFTER_S = 10.0


class Admission:
    """Counts waiting requests and estimates how fast they start."""

    RECENT = 32
    """Starts from which the pace is estimated."""

    def __init__(self, this_round: Round, limits: QueueLimits, capacity: CapacityCheck) -> None:
        self._round, self._limits, self._capacity = this_round, limits, capacity
        self._starts: deque[int] = deque(maxlen=self.RECENT)
        self.waiting = 0
        """Requests that have not started, those that pause before another attempt included."""
        self.waiting_tokens = 0
        """Their tokens, prompts and answers together."""
        self.draining = False

    def refusal(self, prompt_tokens: int, output_tokens: int) -> CspsError | None:
        """Return the error with which such a request is refused now, or None."""
        rejection = self._capacity.rejection(prompt_tokens, output_tokens)
        return rejection or self.refusal_unread(prompt_tokens + output_tokens)

    def refusal_unread(self, tokens: int = 0, *, ahead: int = 0) -> QueueFull | None:
        """Return the error with which a request is refused of which only the tokens are known, or
        None.

        An empty queue takes everyone: whether a request fits at all is another question.

        Args:
            ahead: requests that will be submitted before it.
        """
        limits = self._limits
        if self.draining:
            return QueueFull("the server is shutting down", retry_after_s=DRAIN_RETRY_AFTER_S)
        if self.waiting + ahead >= limits.max_waiting:
            reason = f"{self.waiting + ahead} requests are waiting"
        elif self.waiting and self.waiting_tokens + tokens > limits.max_waiting_tokens:
            reason = f"{self.waiting_tokens} tokens are waiting"
        else:
            return None
        return QueueFull(reason, retry_after_s=self._retry_after_s())

    def enter(self, request: Request) -> None:
        """Count a request that begins to wait."""
        self.waiting += 1
        self.waiting_tokens += request.prompt_tokens + request.output_tokens

    def leave(self, request: Request, *, started: bool) -> None:
        """Count a request that starts or ends."""
        self.waiting -= 1
        self.waiting_tokens -= request.prompt_tokens + request.output_tokens
        if started:
            self._starts.append(self._round.now_ns)

    def _retry_after_s(self) -> float:
        """Return when half of the queue will be gone at its recent pace: 1 to 60 s, in
        milliseconds."""
        if len(self._starts) < 2:
            return 1.0
        pace_ns = (self._round.now_ns - self._starts[0]) // len(self._starts)
        wait_ns = pace_ns * self.waiting // 2
        return min(60 * SECOND_NS, max(SECOND_NS, wait_ns)) // 1_000_000 / 1000


LOAD_WINDOW_NS = 30 * SECOND_NS


class Requests:
    """All requests that have not ended, and the queues of waiting ones."""

    def __init__(
        self,
        *,
        this_round: Round,
        timers: Timers,
        gangs: Gangs,
        sequences: Sequences,
        policy: Policy,
        limits: QueueLimits,
        reuses: bool,
    ) -> None:
        self._reuses = reuses
        self._round, self._timers, self._gangs = this_round, timers, gangs
        self._sequences, self._policy = sequences, policy
        self._timers_of: dict[RequestId, list[Timer]] = {}
        self._arrivals: deque[int] = deque()
        self._blocked: dict[RequestId, Request] = {}
        self._blocked_since_ns: int | None = None
        self.capacity = CapacityCheck(policy)
        self.admission = Admission(this_round, limits, self.capacity)
        self.queue = Queue()
        self.live: dict[RequestId, Request] = {}

    @property
    def rate_30s(self) -> int:
        """Requests submitted in the last 30 s."""
        while self._arrivals and self._arrivals[0] <= self._round.now_ns - LOAD_WINDOW_NS:
            self._arrivals.popleft()
        return len(self._arrivals)

    # --- coming in ---

    def submit(self, event: Submitted) -> None:
        """Admit a request, or refuse it."""
        assert event.request_id not in self.live, f"request {event.request_id} came twice"
        now_ns = self._round.now_ns
        self._arrivals.append(now_ns)
        error = self.admission.refusal(event.prompt_tokens, event.output_tokens)
        if error is not None:
            self._round.emit(Refuse(request_id=event.request_id, error=wire_error(error)))
            return
        request = Request(
            id=event.request_id,
            cls=event.cls,
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            deadline_ns=event.deadline_ns,
            submitted_ns=now_ns,
            waiting_since_ns=now_ns,
            hashes=event.hashes if self._reuses else (),
        )
        self.live[request.id] = request
        self._begin_to_wait(request)
        self.push(request)
        if event.deadline_ns is not None:
            self.later(request, event.deadline_ns, self._expire)

    def push(self, request: Request) -> None:
        """Put an admitted request into its queue; fail it if it no longer fits the gangs."""
        rejection = self.capacity.rejection(request.prompt_tokens, request.output_tokens)
        if rejection is not None:
            self.fail(request, wire_error(rejection))
            return
        request.priority = self._policy.priority(request.prompt_tokens, self._gangs.pairs)
        self.queue.push(request)
        self._round.stale = True

    def take(self, request: Request, sequence: Sequence) -> None:
        """Note that the request has started."""
        self.queue.remove(request)
        self.admission.leave(request, started=True)
        request.waiting, request.sequence = False, sequence
        request.attempts += 1
        request.blocked_ns = None
        self._blocked.pop(request.id, None)

    def wait_again(self, request: Request) -> None:
        """Count the request as waiting again; it is not in its queue yet."""
        request.waiting, request.sequence = True, None
        request.waiting_since_ns = self._round.now_ns
        self._begin_to_wait(request)

    def _begin_to_wait(self, request: Request) -> None:
        self.admission.enter(request)
        request.delays_before = delay_counters(self._gangs.instances.values())

    def requeue_all(self) -> None:
        """Sort all waiting requests again after gangs have come: fail those that are too large for
        them, and ask for priorities again, because a short prompt that fits no single instance has
        low priority."""
        self.capacity.use(self._gangs.pairs)
        for request in list(self.queue.everyone()):
            self.queue.remove(request)
            self.push(request)

    # --- who is blocked ---

    def blocked_ns(self, request: Request) -> int:
        """Return since when requests that pass this one count against the preemption budget.

        A request waits for what has passed those before it, too. So its time began when the queue
        became blocked, if it was waiting by then.
        """
        if request.blocked_ns is not None:
            return request.blocked_ns
        now_ns = self._round.now_ns
        since_ns = self._blocked_since_ns
        return max(request.waiting_since_ns, now_ns if since_ns is None else since_ns)

    def note_blocked(self, blocked: Iterable[RequestId]) -> None:
        """Note that these requests, and no others, were found to be blocked."""
        requests = [self.live[request_id] for request_id in blocked]
        for request in requests:
            request.blocked_ns = self.blocked_ns(request)
            self._blocked[request.id] = request
        since_ns = self._blocked_since_ns
        if not requests:
            self._blocked_since_ns = None
        elif since_ns is None:
            self._blocked_since_ns = self._round.now_ns

    @property
    def blocked(self) -> list[Request]:
        """Waiting requests that were found to be blocked once, in order of admission."""
        return sorted(self._blocked.values(), key=attrgetter("id"))

    # --- ends ---

    def later(self, request: Request, at_ns: int, action: Callable[[Request], None]) -> None:
        """Run an action on the request at a time, unless it has ended."""
        timer = self._timers.at(at_ns, partial(action, request))
        self._timers_of.setdefault(request.id, []).append(timer)

    def _expire(self, request: Request) -> None:
        assert request.deadline_ns is not None
        seconds = (request.deadline_ns - request.submitted_ns) / SECOND_NS
        self.fail(request, wire_error(DeadlineExceeded("the request", seconds)))

    def fail(self, request: Request, error: WireError) -> None:
        """End the request without its whole answer."""
        self.end(request)
        self._round.emit(Fail(request_id=request.id, error=error))

    def end(self, request: Request) -> None:
        """End the request in whichever way; nothing of it may stay behind here."""
        del self.live[request.id]
        self._blocked.pop(request.id, None)
        for timer in self._timers_of.pop(request.id, ()):
            self._timers.cancel(timer)
        if request.sequence is not None:
            self._sequences.abandon(request.sequence)
            request.sequence = None
        if request.waiting:
            self.queue.remove(request)
            self.admission.leave(request, started=False)
            self._round.stale = True
