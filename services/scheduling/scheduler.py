"""The scheduler: a state machine without I/O and without a clock.

::

    Submitted ─▶ waiting ─▶ prefilling ─▶ landing ─▶ decoding ─▶ Finished
                   ▲  │  StartPlan:   FirstToken   SetGroup when all   │ Cancelled, deadline
                   │  ▼  Reserve,                  shares Landed       │
                   │ Refuse RunStep                                    ▼
                   └──────────── Restart after a fault ◀── or Fail, when it may not be tried again

An executor (router, simulator, test) hands over what has happened in one turn of its loop and
carries out the commands that come back. The policy is asked once at the end of a turn, and not at
all when nothing has changed that it decides on. Integers only, and nothing is iterated whose order
depends on hashes: the same batches give the same commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from csps.protocols.errors import GangLost, ProtocolError
from csps.services.scheduling import events as ev
from csps.services.scheduling.commands import AnyCommand
from csps.services.scheduling.cost import Costs
from csps.services.scheduling.decisions import Policy
from csps.services.scheduling.events import AnyEvent, WireError
from csps.services.scheduling.fit import Fit
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.integrity import check_books
from csps.services.scheduling.limits import SECOND_NS, DeadlineSettings, QueueLimits
from csps.services.scheduling.plans import Plans
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.retries import Retries
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.silence import Silence
from csps.services.scheduling.state import Instance, Line, Pair, Request
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.timers import Timers
from csps.services.scheduling.turn import Turn, wire_error
from csps.services.scheduling.view import RequestView


class Outcome(NamedTuple):
    """What is to be done after a turn."""

    commands: list[AnyCommand]
    """In this order."""
    wake_at_ns: int | None
    """When to hand over a `Wake`, if nothing else happens before."""


class Counts(NamedTuple):
    """For metrics."""

    running: int
    waiting: int
    prefill_kv: float
    """Fraction of the KV slots of gangs that may prefill that are taken; 0 without such a gang."""
    decode_kv: float


class Scheduler:
    """Takes requests through their states, from `Submitted` to the last token.

    Args:
        policy: decides what starts where.
        costs: predictions, shared with the executor that fills in cold buckets.
        limits: of the line.
        deadlines: for everything that is waited for.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        *,
        limits: QueueLimits | None = None,
        deadlines: DeadlineSettings | None = None,
    ) -> None:
        limits, deadlines = limits or QueueLimits(), deadlines or DeadlineSettings()
        self._policy, self._costs, self._deadlines = policy, costs, deadlines
        self._turn, self._timers = Turn(), Timers()
        self._gangs = Gangs(self._turn)
        self._steps = Steps(self._turn)
        self._sequences = Sequences(self._turn, self._timers, self._gangs)
        self._requests = Requests(
            turn=self._turn,
            timers=self._timers,
            gangs=self._gangs,
            sequences=self._sequences,
            policy=policy,
            limits=limits,
        )
        self._retries = Retries(self._turn, self._requests, self._sequences, limits, deadlines)
        self._plans = Plans(
            turn=self._turn,
            gangs=self._gangs,
            requests=self._requests,
            sequences=self._sequences,
            steps=self._steps,
            deadlines=deadlines,
        )
        self._silence = Silence(self._gangs, self._steps, deadlines)
        self._watch_ns: int | None = None
        self._view = _View(self._turn, self._gangs, self._requests, costs)
        self._handlers = self._table()

    # --- the executor's side ---

    def handle(self, events: Iterable[AnyEvent], now_ns: int) -> Outcome:
        """Take in what has happened since the last turn, and decide.

        Args:
            events: in the order in which they happened.
            now_ns: of any clock that does not run backwards.
        """
        turn = self._turn
        turn.now_ns = max(turn.now_ns, now_ns)
        turn.commands = []
        self._sequences.closed_now.clear()
        self._gangs.note_time()
        for event in events:
            self._handlers[type(event)](event)
        self._timers.run_due(turn.now_ns)
        self._watch()
        self._sequences.join()
        self._ask_again()
        self._decide()
        self._watch_next()
        return Outcome(turn.commands, self._wake_at_ns())

    def refusal(self, prompt_tokens: int, output_tokens: int, cls: str) -> WireError | None:
        """Why such a request would be refused now; asks nothing of the state but its answer."""
        error = self._requests.admission.refusal(prompt_tokens, output_tokens)
        return None if error is None else wire_error(error)

    def refusal_unread(self) -> WireError | None:
        """Why a request would be refused of which nothing is known yet: its body need not be
        read."""
        error = self._requests.admission.refusal_unread()
        return None if error is None else wire_error(error)

    @property
    def fit(self) -> Fit:
        """What fits the present gangs, or those that were there last."""
        return self._requests.fit

    @property
    def ready(self) -> bool:
        """There are gangs to serve with. Requests are accepted all the same while there are not."""
        return bool(self._gangs.pairs)

    @property
    def counts(self) -> Counts:
        """How much there is of everything."""
        waiting = self._requests.admission.waiting
        gangs = list(self._gangs.by_id.values())
        return Counts(
            running=len(self._requests.live) - waiting,
            waiting=waiting,
            prefill_kv=_usage(it for gang in gangs if gang.may_prefill for it in gang.instances),
            decode_kv=_usage(it for gang in gangs if gang.may_decode for it in gang.instances),
        )

    def check_integrity(self) -> None:
        """Assert that no slot, step, sequence or request was lost track of."""
        check_books(self._gangs, self._requests, self._sequences, self._steps)

    # --- events ---

    def _table(self) -> dict[type, Callable[..., None]]:
        return {
            ev.Submitted: self._requests.submit,
            ev.Committed: self._committed,
            ev.Cancelled: self._cancelled,
            ev.FirstToken: self._first_token,
            ev.Landed: self._landed,
            ev.Freed: self._freed,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.Progress: self._progress,
            ev.StepDone: self._step_done,
            ev.GangUp: self._gang_up,
            ev.GangDown: self._gang_down,
            ev.LinkUp: self._link_up,
            ev.LinkDown: self._link_down,
            ev.Heard: self._heard,
            ev.Calibrated: self._calibrated,
            ev.Wake: self._wake,
            ev.Drain: self._drain,
        }

    def _committed(self, event: ev.Committed) -> None:
        if (request := self._requests.live.get(event.request)) is not None:
            request.committed = True

    def _cancelled(self, event: ev.Cancelled) -> None:
        if (request := self._requests.live.get(event.request)) is not None:
            self._requests.end(request)

    def _first_token(self, event: ev.FirstToken) -> None:
        sequence = self._sequences.serving(event.sequence)
        if sequence is None:
            if (closed := self._sequences.closed_now.get(event.sequence)) is not None:
                self._retries.delivered(closed.id, closed.drawn_before + 1)
            return
        self._sequences.first_token(sequence)
        if sequence.unlanded:
            late_ns = self._turn.now_ns + self._retries.landing_deadline_ns(sequence)
            late = partial(self._retries.landing_is_late, sequence)
            sequence.landing_timer = self._timers.at(late_ns, late)

    def _landed(self, event: ev.Landed) -> None:
        self._hear(event.instance)
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            wrong = self._sequences.landed(sequence, event.instance, event.tokens)
            self._retries.landed(sequence, wrong)

    def _freed(self, event: ev.Freed) -> None:
        self._hear(event.instance)
        if (sequence := self._sequences.by_id.get(event.sequence)) is not None:
            self._sequences.freed(sequence, event.instance)

    def _finished(self, event: ev.Finished) -> None:
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            self._sequences.finish(sequence, event.drawn)
            self._requests.end(sequence.request)
        else:
            self._retries.finished_late(event.sequence)

    def _failed(self, event: ev.Failed) -> None:
        self._retries.delivered(event.sequence, event.drawn)
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            self._retries.failed(sequence, event.error, retryable=event.retryable)

    def _progress(self, event: ev.Progress) -> None:
        for number, drawn in event.drawn:
            self._retries.delivered(number, drawn)

    def _step_done(self, event: ev.StepDone) -> None:
        self._hear(event.instance)
        step = self._steps.by_id.get(event.step)
        if step is None or event.instance not in step.undone:
            return
        instance = self._gangs.instances[event.instance]
        for sequence in self._steps.done(step, instance, event.took_ns):
            if not sequence.over and sequence.first_token_ns is None:
                # The rank that draws says so before it reports, so no token is on its way.
                error = ProtocolError("a prefill step ended without its first token")
                self._retries.broken(sequence, error)

    def _gang_up(self, event: ev.GangUp) -> None:
        gang = self._gangs.up(event)
        self._steps.ledger.add(gang)
        self._sequences.ledger.add(gang)
        self._paired()

    def _gang_down(self, event: ev.GangDown) -> None:
        if (gang := self._gangs.by_id.get(event.gang)) is None:
            return
        self._gangs.down(gang)
        self._steps.drop(gang)
        self._retries.gang_lost(gang, event.reason)

    def _link_up(self, event: ev.LinkUp) -> None:
        self._gangs.link(event.prefill, event.decode)
        self._paired()

    def _link_down(self, event: ev.LinkDown) -> None:
        self._gangs.unlink(event.prefill, event.decode)
        self._retries.link_lost(event.prefill, event.decode, event.reason)

    def _paired(self) -> None:
        """Requests came before the gangs, or have waited for larger ones than these."""
        if self._gangs.pairs:
            self._requests.sort_again()

    def _heard(self, event: ev.Heard) -> None:
        for instance in event.instances:
            self._hear(instance)

    def _hear(self, instance: int) -> None:
        if (it := self._gangs.instances.get(instance)) is not None:
            it.heard_ns = self._turn.now_ns

    def _calibrated(self, event: ev.Calibrated) -> None:
        self._costs.use(event.digest)
        self._turn.stale = True

    def _wake(self, event: ev.Wake) -> None:
        """Every turn looks at the time."""

    def _drain(self, event: ev.Drain) -> None:
        self._requests.admission.draining = True

    # --- time ---

    def _watch(self) -> None:
        """Look at who is silent and at who waits for gangs in vain, once in a while."""
        if self._watch_ns is not None and self._turn.now_ns >= self._watch_ns:
            self._watch_ns = None
            self._silence.check(self._turn.now_ns)
            self._fail_for_want_of_gangs()

    def _watch_next(self) -> None:
        """Somebody may owe something since this turn, or nobody does any more."""
        waits_for_gangs = not self._gangs.pairs and self._requests.admission.waiting
        if not (waits_for_gangs or self._silence.watched):
            self._watch_ns = None
        elif self._watch_ns is None:
            self._watch_ns = self._turn.now_ns + self._deadlines.watch_ns

    def _fail_for_want_of_gangs(self) -> None:
        unready_ns, limit_ns = self._gangs.unready_ns, self._deadlines.gang_recovery_ns
        if unready_ns is None:
            return
        reason = f"no gangs to serve the request for {limit_ns / SECOND_NS:g} s"
        error = wire_error(GangLost(reason))
        for request in list(self._requests.live.values()):
            since_ns = max(unready_ns, request.waiting_since_ns)
            if request.waiting and self._turn.now_ns - since_ns > limit_ns:
                self._requests.fail(request, error)

    def _wake_at_ns(self) -> int | None:
        times = (self._timers.next_ns, self._watch_ns, self._turn.wake_ns)
        return min((it for it in times if it is not None), default=None)

    # --- deciding ---

    def _ask_again(self) -> None:
        """The policy's time may have come: once, even if there is nothing to decide on now."""
        turn = self._turn
        if turn.wake_ns is not None and turn.wake_ns <= turn.now_ns:
            turn.stale, turn.wake_ns = True, None

    def _decide(self) -> None:
        if not self._turn.stale or not self._gangs.pairs or not len(self._requests.queue):
            return
        self._plans.apply(self._policy.decide(self._view))
        self._turn.stale = False


class _View:
    """The live state as `view.View`."""

    def __init__(self, turn: Turn, gangs: Gangs, requests: Requests, costs: Costs) -> None:
        self._turn, self._gangs, self._requests = turn, gangs, requests
        self.cost = costs

    @property
    def now_ns(self) -> int:
        return self._turn.now_ns

    @property
    def pairs(self) -> Sequence[Pair]:
        return self._gangs.pairs

    def waiting(self, line: Line) -> Sequence[Request]:
        return self._requests.queue.line(line)

    @property
    def blocked(self) -> Sequence[Request]:
        return self._requests.blocked

    def blocked_ns(self, request: RequestView) -> int:
        return self._requests.blocked_ns(self._requests.live[request.id])

    def rate_30s(self) -> int:
        return self._requests.rate_30s


def _usage(instances: Iterable[Instance]) -> float:
    used = capacity = 0
    for it in instances:
        used += it.used
        capacity += it.capacity
    return used / capacity if capacity else 0.0
