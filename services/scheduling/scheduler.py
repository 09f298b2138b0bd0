"""The scheduler: a state machine without I/O and without a clock.

::

    Submitted ─▶ waiting ─▶ prefilling ─▶ landing ─▶ decoding ─▶ Finished
                   ▲  │  StartPlan:   FirstToken   SetGroup when all   │ Cancelled, deadline
                   │  ▼  Reserve,                  shares Landed       │
                   │ Refuse RunStep                                    ▼
                   └──────────── Restart after a fault ◀── or Fail, when it may not be tried again

A request that *rides* (`decisions.Ride`) is prefilled and decoded in one stream of iterations:
Reserve and Ride, FirstToken when its prompt is computed, and nothing of it lands.

An executor (router, simulator, test) hands over what has happened in one turn of its loop and
carries out the commands that come back. The policy is asked once at the end of a turn, and not at
all when nothing has changed that it decides on. Integers only, and nothing is iterated whose order
depends on hashes: the same batches give the same commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from csps.services.scheduling import events as ev
from csps.services.scheduling.commands import AnyCommand
from csps.services.scheduling.cost import Costs
from csps.services.scheduling.decisions import Policy
from csps.services.scheduling.events import AnyEvent, WireError
from csps.services.scheduling.fit import Fit
from csps.services.scheduling.gang_events import GangEvents
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.held_steps import HeldSteps
from csps.services.scheduling.integrity import check_books
from csps.services.scheduling.limits import DeadlineSettings, QueueLimits
from csps.services.scheduling.live_view import LiveView
from csps.services.scheduling.plans import Plans
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.prefix.settings import ReuseSettings
from csps.services.scheduling.request_events import RequestEvents
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.retries import Retries
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.silence import Silence
from csps.services.scheduling.state import Instance
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.timers import Timers
from csps.services.scheduling.turn import Turn, wire_error
from csps.services.scheduling.watch import Watch


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
    """Fraction of the KV slots of gangs that may prefill that are taken, but for KV that is kept in
    case that it is of use; 0 without such a gang."""
    decode_kv: float


class Scheduler:
    """Takes requests through their states, from `Submitted` to the last token.

    Args:
        policy: decides what starts where.
        costs: predictions, shared with the executor that fills in cold buckets.
        limits: of the line.
        deadlines: for everything that is waited for.
        reuse: of the KV of requests that are over.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        *,
        limits: QueueLimits | None = None,
        deadlines: DeadlineSettings | None = None,
        reuse: ReuseSettings | None = None,
    ) -> None:
        limits, deadlines = limits or QueueLimits(), deadlines or DeadlineSettings()
        self._policy, self._costs = policy, costs
        self._turn = turn = Turn()
        self._timers = timers = Timers()
        self._gangs = gangs = Gangs(turn)
        self._steps = steps = Steps(turn)
        reuse = reuse or ReuseSettings()
        self._prefix = prefix = PrefixIndex(turn, gangs, reuse)
        self._sequences = sequences = Sequences(turn, timers, gangs, prefix)
        self._requests = requests = Requests(
            turn=turn,
            timers=timers,
            gangs=gangs,
            sequences=sequences,
            policy=policy,
            limits=limits,
            reuses=reuse.enabled,
        )
        retries = Retries(turn, requests, sequences, limits, deadlines)
        self._plans = Plans(
            turn=turn,
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            deadlines=deadlines,
            prefix=prefix,
        )
        self._held = HeldSteps(turn, steps, sequences)
        silence = Silence(gangs, steps, deadlines)
        self._watch = Watch(turn, gangs, requests, silence, deadlines)
        self._view = LiveView(turn, gangs, requests, costs, prefix, self._held)
        of_requests = RequestEvents(
            turn=turn,
            timers=timers,
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            retries=retries,
            prefix=prefix,
        )
        of_gangs = GangEvents(
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            retries=retries,
            prefix=prefix,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            **of_requests.handlers,
            **of_gangs.handlers,
            ev.Calibrated: self._calibrated,
            ev.Wake: self._wake,
            ev.Drain: self._drain,
        }

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
        self._watch.look()
        self._sequences.join()
        self._held.look()
        self._ask_again()
        self._decide()
        self._held.look()
        self._watch.plan()
        return Outcome(turn.commands, self._wake_at_ns())

    def refusal(self, prompt_tokens: int, output_tokens: int) -> WireError | None:
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
    def policy_name(self) -> str:
        """As in the settings."""
        return self._policy.name

    @property
    def whole_prompts(self) -> bool:
        """The policy has prompts computed as sparse attention needs it."""
        return self._policy.whole_prompts

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
        check_books(self._gangs, self._requests, self._sequences, self._steps, self._prefix)

    # --- turns ---

    def _calibrated(self, event: ev.Calibrated) -> None:
        self._costs.use(event.digest)
        self._turn.stale = True

    def _wake(self, event: ev.Wake) -> None:
        """Every turn looks at the time."""

    def _drain(self, event: ev.Drain) -> None:
        self._requests.admission.draining = True

    def _wake_at_ns(self) -> int | None:
        turn = self._turn
        times = (self._timers.next_ns, self._watch.next_ns, turn.wake_ns, self._held.due_ns)
        return min((it for it in times if it is not None), default=None)

    def _ask_again(self) -> None:
        """The policy's time may have come: once, even if there is nothing to decide on now."""
        turn = self._turn
        if turn.wake_ns is not None and turn.wake_ns <= turn.now_ns:
            turn.stale, turn.wake_ns = True, None

    def _decide(self) -> None:
        waiting = len(self._requests.queue) or self._steps.held
        nothing = not waiting and not self._policy.regroups
        if not self._turn.stale or not self._gangs.pairs or nothing:
            return
        self._plans.apply(self._policy.decide(self._view))
        self._turn.stale = False


def _usage(instances: Iterable[Instance]) -> float:
    used = capacity = 0
    for it in instances:
        used += it.capacity - it.free_slots
        capacity += it.capacity
    return used / capacity if capacity else 0.0
