"""Requests from admission to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

from csps.protocols.errors import DeadlineExceeded
from csps.services.scheduling.admission import Admission
from csps.services.scheduling.commands import Fail, Refuse
from csps.services.scheduling.decisions import Policy
from csps.services.scheduling.events import Submitted, WireError
from csps.services.scheduling.fit import Fit
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.holdups import counters
from csps.services.scheduling.ids import RequestId
from csps.services.scheduling.limits import SECOND_NS, QueueLimits
from csps.services.scheduling.queue import Queue
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Request, Sequence
from csps.services.scheduling.timers import Timer, Timers
from csps.services.scheduling.turn import Turn, wire_error

LOAD_WINDOW_NS = 30 * SECOND_NS


class Requests:
    """All that have not ended, and the line of those that wait."""

    def __init__(
        self,
        *,
        turn: Turn,
        timers: Timers,
        gangs: Gangs,
        sequences: Sequences,
        policy: Policy,
        limits: QueueLimits,
        reuses: bool,
    ) -> None:
        self._reuses = reuses
        self._turn, self._timers, self._gangs = turn, timers, gangs
        self._sequences, self._policy = sequences, policy
        self._timers_of: dict[RequestId, list[Timer]] = {}
        self._arrivals: deque[int] = deque()
        self._blocked: dict[RequestId, Request] = {}
        self._blocked_since_ns: int | None = None
        self.fit = Fit(policy)
        self.admission = Admission(turn, limits, self.fit)
        self.queue = Queue()
        self.live: dict[RequestId, Request] = {}

    @property
    def rate_30s(self) -> int:
        """Requests submitted in the last 30 s."""
        while self._arrivals and self._arrivals[0] <= self._turn.now_ns - LOAD_WINDOW_NS:
            self._arrivals.popleft()
        return len(self._arrivals)

    # --- coming in ---

    def submit(self, event: Submitted) -> None:
        """Admit a request, or refuse it."""
        assert event.request not in self.live, f"request {event.request} came twice"
        now_ns = self._turn.now_ns
        self._arrivals.append(now_ns)
        error = self.admission.refusal(event.prompt_tokens, event.output_tokens)
        if error is not None:
            self._turn.emit(Refuse(request=event.request, error=wire_error(error)))
            return
        request = Request(
            id=event.request,
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
        """Put an admitted request in its line, unless it could never leave it."""
        misfit = self.fit.misfit(request.prompt_tokens, request.output_tokens)
        if misfit is not None:
            self.fail(request, wire_error(misfit))
            return
        request.line = self._policy.line(request.prompt_tokens, self._gangs.pairs)
        self.queue.push(request)
        self._turn.stale = True

    def take(self, request: Request, sequence: Sequence) -> None:
        """The request has found a place."""
        self.queue.remove(request)
        self.admission.leave(request, started=True)
        request.waiting, request.sequence = False, sequence
        request.attempts += 1
        request.blocked_ns = None
        self._blocked.pop(request.id, None)

    def wait_again(self, request: Request) -> None:
        """The request counts as waiting again; it is not in its line yet."""
        request.waiting, request.sequence = True, None
        request.waiting_since_ns = self._turn.now_ns
        self._begin_to_wait(request)

    def _begin_to_wait(self, request: Request) -> None:
        self.admission.enter(request)
        request.held_before = counters(self._gangs.instances.values())

    def sort_again(self) -> None:
        """Gangs have come: fail whoever waits and is too large for them, and ask again who is
        urgent, because a short prompt that fits no single instance is not."""
        self.fit.use(self._gangs.pairs)
        for request in list(self.queue.everyone()):
            self.queue.remove(request)
            self.push(request)

    # --- who is blocked ---

    def blocked_ns(self, request: Request) -> int:
        """Since when whoever passes the request is held against it.

        A request waits for what has passed those before it, too. So its time began when the line
        became blocked, if it was there already.
        """
        if request.blocked_ns is not None:
            return request.blocked_ns
        now_ns = self._turn.now_ns
        since_ns = self._blocked_since_ns
        return max(request.waiting_since_ns, now_ns if since_ns is None else since_ns)

    def note_blocked(self, blocked: Iterable[RequestId]) -> None:
        """These, and nobody else, were found to be blocked."""
        requests = [self.live[it] for it in blocked]
        for request in requests:
            request.blocked_ns = self.blocked_ns(request)
            self._blocked[request.id] = request
        since_ns = self._blocked_since_ns
        if not requests:
            self._blocked_since_ns = None
        elif since_ns is None:
            self._blocked_since_ns = self._turn.now_ns

    @property
    def blocked(self) -> list[Request]:
        """Those that wait and were found to be blocked once, in order of admission."""
        return sorted(self._blocked.values(), key=attrgetter("id"))

    # --- ends ---

    def later(self, request: Request, at_ns: int, action: Callable[[Request], None]) -> None:
        """Do something to the request then, unless it has ended."""
        timer = self._timers.at(at_ns, partial(action, request))
        self._timers_of.setdefault(request.id, []).append(timer)

    def _expire(self, request: Request) -> None:
        assert request.deadline_ns is not None
        seconds = (request.deadline_ns - request.submitted_ns) / SECOND_NS
        self.fail(request, wire_error(DeadlineExceeded("the request", seconds)))

    def fail(self, request: Request, error: WireError) -> None:
        """The request ends without its whole answer."""
        self.end(request)
        self._turn.emit(Fail(request=request.id, error=error))

    def end(self, request: Request) -> None:
        """The request is over in whichever way: nothing of it may stay behind here."""
        del self.live[request.id]
        self._blocked.pop(request.id, None)
        for timer in self._timers_of.pop(request.id, ()):
            self._timers.call_off(timer)
        if request.sequence is not None:
            self._sequences.leave(request.sequence)
            request.sequence = None
        if request.waiting:
            self.queue.remove(request)
            self.admission.leave(request, started=False)
            self._turn.stale = True
