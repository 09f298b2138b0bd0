"""Requests from admission to their end, and admission."""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

import msgspec

from csps.protocols.core.errors import (
    ContextLengthExceeded,
    CspsError,
    DeadlineExceeded,
    QueueFull,
    RateLimited,
    SloNotMet,
)
from csps.services.scheduling.core.promises import Promises
from csps.services.scheduling.core.queue import (
    GENERATED_WEIGHT,
    Queue,
    RecentTokens,
    prompt_weight,
)
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.deciding.decisions import CapacityCheck, Policy
from csps.services.scheduling.events.commands import Fail, Refuse
from csps.services.scheduling.events.events import RequestId, Submitted, TenantId, WireError
from csps.services.scheduling.events.limits import (
    SECOND_NS,
    QueueLimits,
    Timer,
    Timers,
    delay_counters,
)
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.state import Request, Round, Sequence, order_key, wire_error

DRAIN_RETRY_AFTER_S = 10.0
OWN_PART = 8
"""One in so many places of the queue is there for each tenant, however many others wait: one that
sends little is not refused because of one that fills the queue."""


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
        self._waiting: dict[TenantId, int] = {}
        """Waiting requests of each tenant that has some."""
        self._slots: dict[TenantId, int] = {}
        """Slots that the requests of each tenant need, from admission to their end."""
        self.draining = False

    def refusal(
        self, prompt_tokens: int, output_tokens: int, tenant: TenantId, kv_permille: int
    ) -> CspsError | None:
        """Return the error with which such a request is refused now, or None."""
        return (
            self._capacity.rejection(prompt_tokens, output_tokens)
            or self._beyond_share(prompt_tokens, output_tokens, tenant, kv_permille)
            or self.refusal_unread(tenant, prompt_tokens + output_tokens)
        )

    def _beyond_share(
        self, prompt_tokens: int, output_tokens: int, tenant: TenantId, kv_permille: int
    ) -> CspsError | None:
        """Return the error if the request would exceed its tenant's share of KV slots."""
        most = self._capacity.decode_slots * kv_permille // 1000
        if kv_permille == 1000 or not self._capacity.known:
            return None
        tokens = prompt_tokens + output_tokens
        if tokens > most:
            return ContextLengthExceeded(
                prompt_tokens=prompt_tokens, output_tokens=output_tokens, limit=most
            )
        taken = self._slots.get(tenant, 0)
        if taken + tokens > most:
            return RateLimited(
                f"Rate limit reached for this API key on KV slots: its requests may need {most} "
                f"together, {taken} are taken, and this one needs {tokens}.",
                retry_after_s=self._retry_after_s(),
            )
        return None

    def refusal_unread(
        self, tenant: TenantId, tokens: int = 0, *, ahead: int = 0
    ) -> QueueFull | None:
        """Return the error with which a request is refused of which only the tokens are known, or
        None.

        An empty queue takes everyone: whether a request fits at all is another question.

        Args:
            ahead: requests that will be submitted before it.
        """
        limits = self._limits
        if self.draining:
            return QueueFull("the server is shutting down", retry_after_s=DRAIN_RETRY_AFTER_S)
        requests, request_tokens = limits.max_waiting, limits.max_waiting_tokens
        own = self._waiting.get(tenant, 0)
        if own < max(1, requests // OWN_PART) and own < self.waiting:
            requests += max(1, requests // OWN_PART)
            request_tokens += max(1, request_tokens // OWN_PART)
        if self.waiting + ahead >= requests:
            reason = f"{self.waiting + ahead} requests are waiting"
        elif self.waiting and self.waiting_tokens + tokens > request_tokens:
            reason = f"{self.waiting_tokens} tokens are waiting"
        else:
            return None
        return QueueFull(reason, retry_after_s=self._retry_after_s())

    def admit(self, request: Request) -> None:
        """Count the slots of an admitted request for its tenant."""
        self._slots[request.tenant] = self._slots.get(request.tenant, 0) + _tokens(request)

    def end(self, request: Request) -> None:
        """Count a request that has ended, however it did."""
        self._slots[request.tenant] -= _tokens(request)

    def enter(self, request: Request) -> None:
        """Count a request that begins to wait."""
        self.waiting += 1
        self.waiting_tokens += _tokens(request)
        self._waiting[request.tenant] = self._waiting.get(request.tenant, 0) + 1

    def leave(self, request: Request, *, started: bool) -> None:
        """Count a request that starts or ends."""
        self.waiting -= 1
        self.waiting_tokens -= _tokens(request)
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
        if started:
            self._starts.append(self._round.now_ns)

    def check_slots(self, live: Collection[Request]) -> None:
        """Assert that each tenant's slots and place in the queue are those of its live requests."""
        waiting: dict[TenantId, int] = {}
        for request in live:
            if request.waiting:
                waiting[request.tenant] = waiting.get(request.tenant, 0) + 1
        assert self._waiting == waiting, "waiting requests of tenants"
        sums: dict[TenantId, int] = {}
        for request in live:
            sums[request.tenant] = sums.get(request.tenant, 0) + _tokens(request)
        found = {tenant: slots for tenant, slots in self._slots.items() if slots}
        assert found == sums, "KV slots of tenants"

    def _retry_after_s(self) -> float:
        """Return when half of the queue will be gone at its recent pace: 1 to 60 s, in
        milliseconds."""
        if len(self._starts) < 2:
            return 1.0
        pace_ns = (self._round.now_ns - self._starts[0]) // len(self._starts)
        wait_ns = pace_ns * self.waiting // 2
        return min(60 * SECOND_NS, max(SECOND_NS, wait_ns)) // 1_000_000 / 1000


def _tokens(request: Request) -> int:
    """Return the tokens of prompt and answer, which stay the same while it is generated."""
    return request.prompt_tokens + request.output_tokens


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
        promises: Promises,
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
        self.promises = promises
        self.queue = Queue(promises)
        self.recent = RecentTokens(this_round)
        self.live: dict[RequestId, Request] = {}
        self.fronts: dict[RequestId, Request] = {}
        """Beginnings of prompts that wait to be computed while files of the rest are read, by
        request."""
        self.startable = ChainMap(self.fronts, self.live)
        """Requests that a policy may plan, by id. A front that waits stands for its request."""
        self._computed_fronts: dict[RequestId, Sequence] = {}
        """Sequences of fronts that have started, by request."""

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
        error = self.admission.refusal(
            event.prompt_tokens, event.output_tokens, event.tenant, event.kv_permille
        )
        if error is not None:
            self._round.emit(Refuse(request_id=event.request_id, error=wire_error(error)))
            return
        request = Request(
            id=event.request_id,
            tenant=event.tenant,
            kv_permille=event.kv_permille,
            cls=event.cls,
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            deadline_ns=event.deadline_ns,
            submitted_ns=now_ns,
            waiting_since_ns=now_ns,
            hashes=event.hashes if self._reuses else (),
            client_priority=event.priority,
            promise=event.promise,
        )
        if (broken := self._broken_at_once(request)) is not None:
            self._round.emit(Refuse(request_id=request.id, error=wire_error(broken)))
            return
        self.live[request.id] = request
        self.admission.admit(request)
        self._begin_to_wait(request)
        self.push(request)
        if event.deadline_ns is not None:
            self.later(request, event.deadline_ns, self._expire)

    def _broken_at_once(self, request: Request) -> SloNotMet | None:
        """Return the error if the request would rather be refused than served as late as this."""
        if request.promise is None or not request.promise.refuse:
            return None
        request.priority = self._policy.priority(request.prompt_tokens, self._gangs.pairs)
        self.promises.predict(request)
        request.place = self.promises.place(request)
        return self.promises.broken(request, self.queue.everyone())

    def push(self, request: Request) -> None:
        """Put an admitted request into its queue; fail it if it no longer fits the gangs."""
        rejection = self.capacity.rejection(request.prompt_tokens, request.output_tokens)
        if rejection is not None:
            self.fail(request, wire_error(rejection))
            return
        request.priority = self._policy.priority(request.prompt_tokens, self._gangs.pairs)
        if request.promise is not None:
            self._predict(request)
        self.queue.push(request)
        self._round.stale = True

    def _predict(self, request: Request) -> None:
        """Predict the latest start that keeps the request's objective, and look again then."""
        self.promises.predict(request)
        latest_ns = request.latest_start_ns
        if latest_ns is not None:
            self.later(request, max(latest_ns, self._round.now_ns) + 1, self._late)

    def _late(self, request: Request) -> None:
        """Reconsider the order when an objective can no longer be kept; end the request if its
        client wants that."""
        if not request.waiting:
            return
        if (broken := self.promises.broken(request, ())) is not None:
            self.fail(request, wire_error(broken))
        self._round.stale = True

    def take(self, request: Request, sequence: Sequence) -> None:
        """Note that the request has started."""
        self.queue.remove(request)
        self._leave_queue(request)
        self._serve(request, prompt_weight(request))
        self.admission.leave(request, started=True)
        request.waiting, request.sequence = False, sequence
        request.attempts += 1
        self._note_unblocked(request)
        self._computed_fronts.pop(request.id, None)

    def may_be_front(self, request: Request, tokens: int) -> bool:
        """Return whether so short a prompt would wait in the same queue as its request."""
        return self._policy.priority(tokens, self._gangs.pairs) == request.priority

    def begin_front(self, request: Request, tokens: int, block_tokens: int) -> Request:
        """Let the first tokens of a waiting request be computed, in its place in the queue.

        Args:
            tokens: whole blocks of `block_tokens`.
        """
        assert self.may_be_front(request, tokens), "a front would wait in another queue"
        front = msgspec.structs.replace(
            request,
            prompt_tokens=tokens,
            output_tokens=1,
            hashes=request.hashes[: tokens // block_tokens],
            cached_by_gang={},
            front=True,
        )
        self.fronts[request.id] = front
        return front

    def give_up_front(self, request_id: RequestId) -> bool:
        """Drop a front that has not started; return whether there was one. Iterations compute none:
        they would sample its end."""
        return self.fronts.pop(request_id, None) is not None

    def take_front(self, front: Request, sequence: Sequence) -> None:
        """Note that a front has started: its request goes on waiting."""
        assert not sequence.slices, "a front is decoded"
        del self.fronts[front.id]
        front.waiting, front.sequence = False, sequence
        self._computed_fronts[front.id] = sequence
        request, tokens = self.live[front.id], front.prompt_tokens
        self._serve(request, tokens)
        self.recent.leave(request.tenant, tokens)
        request.front_tokens = tokens
        self._note_unblocked(request)

    def _leave_queue(self, request: Request) -> None:
        self.queue.leave(request.tenant)
        self.recent.leave(request.tenant, prompt_weight(request))

    def wait_again(self, request: Request) -> None:
        """Count the request as waiting again; it is not in its queue yet."""
        request.waiting, request.sequence = True, None
        request.waiting_since_ns = self._round.now_ns
        self._begin_to_wait(request)

    def _serve(self, request: Request, tokens: int) -> None:
        """Count weighted tokens for the request's tenant."""
        self.recent.serve(request.tenant, tokens)
        if self.queue.serve(request.tenant, tokens):
            self._round.stale = True

    def _begin_to_wait(self, request: Request) -> None:
        request.modest = self.recent.begin(request.tenant, prompt_weight(request))
        self.queue.begin(request.tenant)
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

    def _note_unblocked(self, request: Request) -> None:
        request.blocked_ns = None
        self._blocked.pop(request.id, None)

    @property
    def blocked(self) -> list[Request]:
        """Waiting requests that were found to be blocked once, in order."""
        return sorted(self._blocked.values(), key=order_key)

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
        self.fronts.pop(request.id, None)
        self.admission.end(request)
        self._blocked.pop(request.id, None)
        if (front := self._computed_fronts.pop(request.id, None)) is not None:
            self._sequences.close(front)
        for timer in self._timers_of.pop(request.id, ()):
            self._timers.cancel(timer)
        if request.sequence is not None:
            self._sequences.abandon(request.sequence)
            request.sequence = None
        if request.waiting:
            self.queue.remove(request)
            self._leave_queue(request)
            self.admission.leave(request, started=False)
            self._round.stale = True
        self._serve(request, GENERATED_WEIGHT * request.generated_tokens)
