"""The life of a request.

::

    submit ─▶ admitted ─▶ queued ─▶ reserving ─▶ prefill ─▶ landing ─▶ decoding ─▶ finished
               (plan)       ▲        (slots)   (first token)  (KV)                │ cancelled
                            └───────────── gang lost, nothing streamed ◀──────────┘ failed

Everything happens on one event loop. Tokens cost a look-up and an append; there is no task a token
and none a request, except while a plan or a reservation is awaited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from csps.configurator.csa_limits import check_csa
from csps.protocols.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    FaultError,
    GangLost,
    QueueFull,
    RequestError,
)
from csps.protocols.gang_client import GangClient
from csps.protocols.gang_members import GangRole
from csps.protocols.messages import FinishReason, PrefillDone, TokenDrawn
from csps.protocols.plans import PlanRequest
from csps.services.admission import Admission, QueueLimits
from csps.services.cluster import Cluster, KvLink
from csps.services.execution import Execution, ExecutionDeadlines
from csps.services.observer import NoObserver, Observer
from csps.services.planning import Planner, plan_or_exact, plan_request
from csps.services.request_spans import record_spans
from csps.services.running import Generation, Running
from csps.services.scheduling.capacity import Capacity
from csps.services.scheduling.policy import JobDecision, Policy
from csps.services.scheduling.state import WaitingRequest
from csps.services.scheduling.waiting_queue import WaitingQueue

_log = logging.getLogger(__name__)

MAX_LONE_LOSSES = 2
"""A request that has been alone in so many gangs when they died may be what killed them."""


@dataclass(frozen=True, kw_only=True)
class DispatchDeadlines:
    """Seconds."""

    plan_s: float = 0.25
    """For the configurator's advice; without it the request runs exact."""
    gang_recovery_s: float = 60.0
    """A request waits so long for a lost gang to be replaced."""
    retry_pause_s: float = 0.25
    """Before an attempt that failed is followed by another one."""
    watch_s: float = 1.0
    """Between two looks at the deadlines that have no timer of their own."""
    execution: ExecutionDeadlines = field(default_factory=ExecutionDeadlines)


class Dispatcher:
    """Takes requests through their states, from `submit` to the last token.

    Parameters
    ----------
    cluster
        The gangs. The dispatcher starts and closes it, and is its listener.
    policy
        Decides what starts where.
    planner
        Asked once for every request.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        policy: Policy,
        planner: Planner,
        limits: QueueLimits | None = None,
        observer: Observer | None = None,
        deadlines: DispatchDeadlines | None = None,
    ) -> None:
        self._cluster, self._policy, self._planner = cluster, policy, planner
        self._limits = limits or QueueLimits()
        self._observer = observer or NoObserver()
        self._deadlines = deadlines or DispatchDeadlines()
        self._admission = Admission(self._limits)
        self._execution = Execution(self, self._deadlines.execution)
        self._waiting = WaitingQueue()
        self._live: dict[int, Running] = {}
        self._planning: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}
        self._numbers = itertools.count(1)
        self._round_due = False
        self._unready_since = time.monotonic()
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self.capacity: Capacity | None = None
        """Of the gangs that were linked last; None before the first time."""
        cluster.listen(self)

    # --- the owner's side ---

    async def start(self) -> None:
        """Start following the cluster. Requests may be submitted at once; they wait for it."""
        self._unready_since = time.monotonic()
        self._watch = asyncio.create_task(self._watch_deadlines(), name="watch deadlines")
        await self._cluster.start()

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, end the rest, hang up."""
        self._closing = True
        self._cluster.drain()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("%d requests did not finish within %g s", len(self._live), drain_s)
        for running in list(self._live.values()):
            self._fail(running, Cancelled("the server is shutting down"))
        if self._watch is not None:
            self._watch.cancel()
        await self._execution.close()
        await self._cluster.close()

    def check_health(self) -> None:
        """Raise what a scheduling round or the watch has failed with."""
        if (fault := self._fault or self._execution.fault) is not None:
            raise fault

    @property
    def ready(self) -> bool:
        """Both gangs are there. Requests are accepted all the same while they are not."""
        return self._cluster.link is not None

    @property
    def trouble(self) -> str:
        """Why not `ready`, in words that clients may read."""
        return self._cluster.phase

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return self._admission.waiting

    @property
    def running(self) -> int:
        """Requests with one."""
        return len(self._live) - self.waiting

    def kv_usage(self, role: GangRole) -> float:
        """Fraction of the gang's KV slots that are taken; 0 while there is no gang."""
        execution = self._execution
        load = execution.prefill_load if role == "prefill" else execution.decode_load
        return sum(load.ledger.used) / sum(load.ledger.capacities) if load is not None else 0.0

    def check_integrity(self) -> None:
        """Assert that no slot and no request was lost track of."""
        self._execution.check_integrity()
        assert {it.number for it in self._waiting.requests} <= set(self._live), "waiting, not live"

    # --- the HTTP layer's side ---

    def check_room(self) -> None:
        """Refuse a request of which nothing is known yet: its body need not be read.

        Raises
        ------
        QueueFull
            Too many are waiting, or the server is shutting down.
        """
        try:
            self._check_room(0)
        except QueueFull as error:
            self._observer.refused(error)
            raise

    def submit(self, generation: Generation) -> Running:
        """Admit a request; its tokens come by iterating over what is returned.

        Raises
        ------
        ContextLengthExceeded
            It could never run here.
        InvalidRequest
            It asks for sparse attention that it could never have here.
        QueueFull
            Too many are waiting, or the server is shutting down.
        """
        request = plan_request(generation, self._cluster.gang("prefill"))
        try:
            self._check(generation)
            # Here as well as in the configurator, whose silence costs a request only its advice.
            check_csa(request)
        except RequestError as error:
            self._observer.refused(error)
            raise
        running = Running(generation, number=next(self._numbers), on_cancel=self._cancel)
        number = running.number
        self._live[number] = running
        self._idle.clear()
        self._admission.enter(number, _tokens(generation))
        self._observer.submitted(running)
        self._planning[number] = asyncio.create_task(self._plan(running, request))
        if generation.deadline_s is not None:
            self._later(running, generation.deadline_s, self._expire)
        return running

    def _later(self, running: Running, seconds: float, action: Callable[[Running], None]) -> None:
        """Do something to the request then, unless it has ended."""
        timer = asyncio.get_running_loop().call_later(seconds, action, running)
        self._timers.setdefault(running.number, []).append(timer)

    def _check(self, generation: Generation) -> None:
        self._check_capacity(generation)
        self._check_room(_tokens(generation))

    def _check_capacity(self, generation: Generation) -> None:
        if self.capacity is not None:
            self.capacity.check(generation.prompt.size, generation.sampling.max_tokens)

    def _check_room(self, tokens: int) -> None:
        if self._closing:
            raise QueueFull("the server is shutting down", retry_after_s=10.0)
        self._admission.check(tokens)

    # --- planned and queued ---

    async def _plan(self, running: Running, request: PlanRequest) -> None:
        try:
            deadline_s = self._deadlines.plan_s
            running.plan = await plan_or_exact(self._planner, request, deadline_s=deadline_s)
        except RequestError as error:
            del self._planning[running.number]  # this task, which must not be cancelled
            self._fail(running, error)
            return
        finally:
            self._planning.pop(running.number, None)
        running.marks.planned = time.monotonic()
        running.timings.plan_s = running.marks.planned - running.marks.submitted
        self._enqueue(running)

    def _enqueue(self, running: Running) -> None:
        generation, plan = running.generation, running.plan
        assert plan is not None, "only what is planned is queued"
        # While it was planned, or paused before another attempt, gangs may have come that are too
        # small for it. In line it would hold up all that come after it, for good.
        if self._refused(running):
            return
        running.begin_attempt()
        self._admission.enter(running.number, _tokens(generation))
        self._waiting.push(
            WaitingRequest(
                number=running.number,
                prompt_tokens=generation.prompt.size,
                output_tokens=generation.sampling.max_tokens,
                strategy=plan.strategy,
                csa=plan.csa,
            )
        )
        self.room_made()

    def room_made(self) -> None:
        """Have the policy decide, once for everything that happens in this turn of the loop."""
        if not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._round_due = False
        if not len(self._waiting):
            return
        if (state := self._execution.picture(self._waiting.requests)) is None:
            return
        try:
            for decision in self._policy.decide(state):
                self._start(decision)
        except Exception as exc:
            _log.exception("the scheduling round failed")
            self._fault = exc

    def _start(self, decision: JobDecision) -> None:
        numbers = [member.number for member in decision.members]
        members = [self._live[number] for number in numbers]
        self._waiting.take(numbers)
        for running in members:
            running.state = "reserving"
            running.timings.attempts += 1
            self._admission.leave(running.number, started=True)
        self._execution.start(decision, members)

    # --- what carrying out leads to (ExecutionListener) ---

    def launched(self, running: Running) -> None:
        running.state = "prefill"
        marks = running.marks
        marks.launched = time.monotonic()
        running.timings.queue_s = marks.launched - (marks.queued or marks.launched)
        self._observer.started(running)

    def drawn(self, running: Running, token: TokenDrawn) -> None:
        now, marks, timings = time.monotonic(), running.marks, running.timings
        timings.tokens += 1
        last, marks.last_token = marks.last_token, now
        if last is None:
            running.first_token_at(now)
            self._observer.first_token(running)
        else:
            self._observer.token(running, now - last)
        running.deliver(token)
        if token.finish_reason is not None:
            self._finish(running, token.finish_reason)

    def handed_over(self, running: Running) -> None:
        running.state = "decoding"
        running.handed_over_at(time.monotonic())

    def prefilled(self, running: Running, figures: Sequence[PrefillDone]) -> None:
        running.timings.add_figures(figures)

    def attempt_failed(self, running: Running, error: Exception) -> None:
        """Start over if nobody can notice, else fail."""
        again = (
            isinstance(error, FaultError)
            and not running.streamed
            and running.timings.attempts < self._limits.max_attempts
            and running.lone_losses < MAX_LONE_LOSSES
        )
        if again:
            _log.info("request %s starts over: %s", running.generation.request_id, error)
            self._observer.retried(running, error)
            # What broke the attempt may be the first sign of a dying gang, and a second attempt
            # on it would be wasted; the loss of a gang is known already when it is the reason.
            pause_s = 0.0 if isinstance(error, GangLost) else self._deadlines.retry_pause_s
            self._later(running, pause_s, self._enqueue)
        else:
            self._fail(running, error)

    # --- the ends ---

    def _cancel(self, running: Running) -> None:
        self._execution.withdraw(running)
        self._finish(running, running.finish_reason or "cancelled")

    def _expire(self, running: Running) -> None:
        assert running.generation.deadline_s is not None
        self._fail(running, DeadlineExceeded("the request", running.generation.deadline_s))

    def _finish(self, running: Running, reason: FinishReason) -> None:
        running.finish(reason)
        self._leave(running)
        self._observer.finished(running, reason)

    def _fail(self, running: Running, error: Exception) -> None:
        self._execution.withdraw(running)
        running.fail(error)
        self._leave(running)
        self._observer.failed(running, error)

    def _leave(self, running: Running) -> None:
        """The request has ended, in whichever way: nothing of it may stay behind here."""
        number = running.number
        del self._live[number]
        if (task := self._planning.pop(number, None)) is not None:
            task.cancel()
        for timer in self._timers.pop(number, ()):
            timer.cancel()
        self._waiting.discard(number)
        self._admission.leave(number, started=False)
        running.close_timings(time.monotonic())
        record_spans(running)
        if not self._live:
            self._idle.set()

    # --- the cluster (ClusterListener) ---

    def gang_up(self, gang: GangClient) -> None:
        """Nothing can be started before the link is up."""

    def link_up(self, link: KvLink) -> None:
        self._execution.link_up(link)
        prefill, decode = link.prefill, link.decode
        self.capacity = Capacity(
            prefill=prefill.capacities,
            decode=decode.capacities,
            max_positions=min(
                it.max_positions for it in (*prefill.descriptions, *decode.descriptions)
            ),
        )
        # What came before the gangs, or what has waited for gangs larger than these.
        for waiting in self._waiting.requests:
            self._refused(self._live[waiting.number])
        self._observer.cluster_ready(link.epoch)
        self.room_made()

    def _refused(self, running: Running) -> bool:
        """Fail a request that the gangs could not run with nothing else to do."""
        try:
            self._check_capacity(running.generation)
        except ContextLengthExceeded as error:
            self._fail(running, error)
            return True
        return False

    def link_down(self, link: KvLink, reason: str) -> None:
        self._unready_since = time.monotonic()
        if not (link.prefill.lost.done() or link.decode.lost.done()):
            self._execution.link_down(link, reason)

    def gang_down(self, gang: GangClient, reason: str) -> None:
        self._unready_since = time.monotonic()
        self._observer.gang_lost(gang.role, gang.gang_id)
        computed = [it for it in self._live.values() if it.state == "prefill"]
        if gang.role == "prefill" and len(computed) == 1:
            computed[0].lone_losses += 1
        self._execution.gang_down(gang, reason)

    def notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        self._execution.notified(rank, method, payload)

    # --- deadlines ---

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(self._deadlines.watch_s)
            try:
                self._check_deadlines(time.monotonic())
            except Exception as exc:
                _log.exception("watching the deadlines failed")
                self._fault = exc

    def _check_deadlines(self, now: float) -> None:
        for role, reason in list(self._execution.check_deadlines(now)):
            self._cluster.reset(role, reason)
        if self.ready:
            return
        limit_s = self._deadlines.gang_recovery_s
        for waiting in self._waiting.requests:
            running = self._live[waiting.number]
            if now - max(self._unready_since, running.marks.queued or now) > limit_s:
                reason = f"no gangs to serve the request for {limit_s:g} s: {self._cluster.trouble}"
                self._fail(running, GangLost(reason))


def _tokens(generation: Generation) -> int:
    """All KV that a request may need."""
    return int(generation.prompt.size) + generation.sampling.max_tokens
