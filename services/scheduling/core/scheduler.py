"""The scheduler: a state machine without I/O and without a clock.

::

    Submitted ─▶ waiting ─▶ prefilling ─▶ receiving ─▶ decoding ─▶ Finished
                   ▲  │  StartPlan:   FirstToken    SetGroup after    │ cancelled,
                   │  ▼  Reserve,                   all KvReceived    ▼ deadline
                   │ Refuse RunStep
                   └──────────── Restart after a fault ◀── or Fail, when attempts are used up

A piggybacked request (`decisions.PiggybackPlan`) is prefilled and decoded by the same iterations:
Reserve and Piggyback, then FirstToken when its prompt is computed. Its KV is not transferred.

An executor (router, simulator, test) hands over the events of one round and carries out the
commands that come back. The policy decides once at the end of a round, and only if something has
changed that it decides on. All numbers are integers and no iteration order depends on hashes, so
that the same batches give the same commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from csps.configurator.costs.cost_table import Costs
from csps.protocols.core.errors import ProtocolError
from csps.services.scheduling.core.faults import LivenessMonitor, LivenessTimeouts, Retries
from csps.services.scheduling.core.invariants import check_invariants
from csps.services.scheduling.core.launcher import Launcher
from csps.services.scheduling.core.promises import LEAST_SLACK, Ordering, Promises
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.restores import Restores
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.core.steps import Steps, UnsentSteps
from csps.services.scheduling.deciding.decisions import CapacityCheck, Policy, SchedulerView
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.commands import AnyCommand
from csps.services.scheduling.events.events import AnyEvent, TenantId, WireError
from csps.services.scheduling.events.limits import (
    QueueLimits,
    ReuseSettings,
    SchedulerDeadlines,
    Timers,
)
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import (
    Gang,
    Instance,
    Request,
    Round,
    Sequence,
    order_key,
    wire_error,
)


class RoundResult(NamedTuple):
    """Commands and next wake time of a round."""

    commands: list[AnyCommand]
    """Commands in order."""
    wake_at_ns: int | None
    """Time at which to hand over a `Wake`, if nothing else happens before."""


class SchedulerCounts(NamedTuple):
    """Counts for metrics."""

    running: int
    waiting: int
    prefill_kv: float
    """Fraction of taken KV slots of the gangs that may prefill, without slots of retained KV that
    nobody reads; 0 without such a gang."""
    decode_kv: float
    window_kv: float
    """Fraction of taken slots of the layers with a window that have slots of their own; 0 without
    such layers."""


class SchedulerLook(NamedTuple):
    """State of the scheduler between two rounds."""

    gangs: list[Gang]
    sequences: Iterable[Sequence]
    """Sequences that serve a request."""
    queue: list[tuple[Request, int]]
    """Waiting requests in order, and for how long each is predicted to wait, in nanoseconds."""
    running: int
    waiting: int


class Scheduler:
    """Takes requests from `Submitted` to the last token.

    Args:
        policy: decides what starts where.
        costs: predictions, shared with the executor, which fills in cache misses.
        limits: of the queue.
        deadlines: of all waits.
        reuse: of the prefix cache.
        ordering: rule by which requests are due; the simulator compares others.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        *,
        limits: QueueLimits | None = None,
        deadlines: SchedulerDeadlines | None = None,
        reuse: ReuseSettings | None = None,
        ordering: Ordering = LEAST_SLACK,
    ) -> None:
        limits, deadlines = limits or QueueLimits(), deadlines or SchedulerDeadlines()
        self._policy, self._costs = policy, costs
        self._round = this_round = Round()
        self._timers = timers = Timers()
        self._gangs = gangs = Gangs(this_round)
        self._steps = steps = Steps(this_round)
        reuse = reuse or ReuseSettings()
        self._prefix = prefix = PrefixCache(this_round, gangs, reuse)
        self._sequences = sequences = Sequences(this_round, timers, gangs, prefix)
        promises = Promises(this_round, gangs, costs, limits, prefix.longest, ordering)
        self._requests = requests = Requests(
            this_round=this_round,
            timers=timers,
            gangs=gangs,
            sequences=sequences,
            policy=policy,
            limits=limits,
            reuses=reuse.enabled,
            promises=promises,
        )
        self._restores = restores = Restores(this_round, timers, gangs, requests, promises, prefix)
        retries = Retries(this_round, requests, sequences, limits, deadlines)
        self._launcher = Launcher(
            this_round=this_round,
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            deadlines=deadlines,
            prefix=prefix,
        )
        self._unsent = UnsentSteps(this_round, steps, sequences)
        timeouts = LivenessTimeouts(gangs, steps, sequences, prefix, deadlines)
        self._liveness = LivenessMonitor(this_round, gangs, requests, timeouts, deadlines)
        request_events = RequestEvents(
            this_round=this_round,
            timers=timers,
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            retries=retries,
            prefix=prefix,
        )
        gang_events = GangEvents(
            gangs=gangs,
            requests=requests,
            sequences=sequences,
            steps=steps,
            retries=retries,
            prefix=prefix,
            restores=restores,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            **request_events.handlers,
            **gang_events.handlers,
            ev.Saved: restores.saved,
            ev.Restored: restores.restored,
            ev.CostTableUpdated: self._cost_table_updated,
            ev.Wake: self._wake,
            ev.Drain: self._drain,
        }

    # --- the executor's side ---

    def handle(self, events: Iterable[AnyEvent], now_ns: int) -> RoundResult:
        """Handle the events since the last round, and decide.

        Args:
            events: in the order in which they happened.
            now_ns: of any clock that does not run backwards.
        """
        this_round = self._round
        this_round.begin(now_ns)
        self._sequences.closed_now.clear()
        self._gangs.note_time()
        for event in events:
            self._handlers[type(event)](event)
        self._timers.run_due(this_round.now_ns)
        self._liveness.check()
        self._sequences.join()
        self._restores.end_fronts()
        self._unsent.send_due()
        self._check_wake()
        self._decide()
        self._unsent.send_due()
        self._liveness.schedule_check()
        return RoundResult(this_round.commands, self._wake_at_ns())

    def refusal(
        self, prompt_tokens: int, output_tokens: int, tenant: TenantId = 0, kv_permille: int = 1000
    ) -> WireError | None:
        """Return the rejection for such a request, or None. Does not change the state.

        Args:
            kv_permille: share of KV slots of the tenant (`Submitted`).
        """
        error = self._requests.admission.refusal(prompt_tokens, output_tokens, tenant, kv_permille)
        return None if error is None else wire_error(error)

    def refusal_unread(self, tenant: TenantId = 0, *, ahead: int = 0) -> WireError | None:
        """Return the rejection for a request whose body was not read yet, or None.

        Args:
            ahead: requests that are being read, and will be submitted before it.
        """
        error = self._requests.admission.refusal_unread(tenant, ahead=ahead)
        return None if error is None else wire_error(error)

    @property
    def capacity(self) -> CapacityCheck:
        """Check of what fits the present gangs, or the last ones if there are none."""
        return self._requests.capacity

    @property
    def policy_name(self) -> str:
        """Name in the settings."""
        return self._policy.name

    @property
    def whole_prompts(self) -> bool:
        """True if the policy has prompts computed as sparse attention needs it."""
        return self._policy.whole_prompts

    @property
    def restores_kv(self) -> bool:
        """True if KV survives its gang in files."""
        return bool(self._prefix.settings.files_bytes)

    @property
    def restores_decode_kv(self) -> bool:
        """True if that of a decode gang does, too."""
        return self.restores_kv and bool(self._prefix.settings.decode_rest_tokens)

    @property
    def ready(self) -> bool:
        """True if there are gangs to serve with. Requests are admitted without them, too."""
        return bool(self._gangs.pairs)

    @property
    def counts(self) -> SchedulerCounts:
        """Running and waiting requests, and KV usage."""
        waiting = self._requests.admission.waiting
        gangs = list(self._gangs.by_id.values())
        return SchedulerCounts(
            running=len(self._requests.live) - waiting,
            waiting=waiting,
            prefill_kv=_usage(
                instance for gang in gangs if gang.may_prefill for instance in gang.instances
            ),
            decode_kv=_usage(
                instance for gang in gangs if gang.may_decode for instance in gang.instances
            ),
            window_kv=_window_usage(instance for gang in gangs for instance in gang.instances),
        )

    def look(self, most_waiting: int) -> SchedulerLook:
        """Return what is going on, for people who look; the objects must not be changed.

        Args:
            most_waiting: limit of the waiting requests.
        """
        requests = self._requests
        waiting = sorted(requests.queue.everyone(), key=order_key)
        waits_ns = requests.promises.waits_ns(waiting)
        counts = requests.admission.waiting
        return SchedulerLook(
            gangs=list(self._gangs.by_id.values()),
            sequences=(request.sequence for request in requests.live.values() if request.sequence),
            queue=list(zip(waiting, waits_ns, strict=True))[:most_waiting],
            running=len(requests.live) - counts,
            waiting=counts,
        )

    def check_invariants(self) -> None:
        """Assert that no slot, step, sequence or request was lost."""
        check_invariants(
            self._gangs,
            self._requests,
            self._sequences,
            self._steps,
            self._prefix,
            self._restores,
        )

    # --- rounds ---

    def _cost_table_updated(self, event: ev.CostTableUpdated) -> None:
        self._costs.use(event.digest)
        self._round.stale = True

    def _wake(self, event: ev.Wake) -> None:
        """Do nothing: every round looks at the time."""

    def _drain(self, event: ev.Drain) -> None:
        self._requests.admission.draining = True

    def _wake_at_ns(self) -> int | None:
        this_round = self._round
        times = (
            self._timers.next_ns,
            self._liveness.next_ns,
            this_round.wake_ns,
            self._unsent.due_ns,
        )
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    def _check_wake(self) -> None:
        """Let the policy decide again if its time has come: once, even if nothing waits now."""
        this_round = self._round
        if this_round.wake_ns is not None and this_round.wake_ns <= this_round.now_ns:
            this_round.stale, this_round.wake_ns = True, None

    def _decide(self) -> None:
        waiting = len(self._requests.queue) or self._steps.unsent
        undecided = waiting or self._policy.regroups
        if not (self._round.stale and self._gangs.pairs and undecided):
            return
        self._restores.begin()
        held = self._requests.queue.held
        self._launcher.apply(self._policy.decide(self._view()))
        self._round.stale = False
        if held - self._requests.queue.held:  # what has just started lets others start
            self._round.wake_ns = self._round.now_ns + 1

    def _view(self) -> SchedulerView:
        requests = self._requests
        return SchedulerView(
            now_ns=self._round.now_ns,
            cost=self._costs,
            pairs=self._gangs.pairs,
            queues=self._restores.startable(requests.queue.startable),
            planned=self._unsent.sequences,
            blocked=self._restores.blocked(),
            blocked_ns=requests.blocked_ns,
            cached=self._prefix.longest,
            rate_30s=requests.rate_30s,
            shared=requests.recent.shared,
        )


def _usage(instances: Iterable[Instance]) -> float:
    used = capacity = 0
    for instance in instances:
        used += instance.capacity - instance.free_slots
        capacity += instance.capacity
    return used / capacity if capacity else 0.0


def _window_usage(instances: Iterable[Instance]) -> float:
    used = slots = 0
    for instance in instances:
        used += instance.window_used
        slots += instance.window_slots
    return used / slots if slots else 0.0


class RequestEvents:
    """Handlers of events about requests, sequences and steps. They ignore events about what is
    over, because these may have been under way when the end was decided."""

    def __init__(
        self,
        *,
        this_round: Round,
        timers: Timers,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        retries: Retries,
        prefix: PrefixCache,
    ) -> None:
        self._round, self._timers, self._gangs = this_round, timers, gangs
        self._requests, self._sequences = requests, sequences
        self._steps, self._retries, self._prefix = steps, retries, prefix
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            ev.Submitted: requests.submit,
            ev.RequestCancelled: self._cancelled,
            ev.FirstToken: self._first_token,
            ev.KvReceived: self._received,
            ev.Moved: self._moved,
            ev.Freed: self._freed,
            ev.Retained: self._retained,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.Progress: self._progress,
            ev.StepDone: self._step_done,
        }

    def _cancelled(self, event: ev.RequestCancelled) -> None:
        if (request := self._requests.live.get(event.request_id)) is not None:
            if request.sequence is not None:
                self._sequences.abandon(request.sequence, event.generated_tokens, event.hashes)
            request.note_generated(event.generated_tokens)
            self._requests.end(request)

    def _first_token(self, event: ev.FirstToken) -> None:
        sequence = self._sequences.serving(event.sequence_id)
        if sequence is None:
            if (closed := self._sequences.closed_now.get(event.sequence_id)) is not None:
                self._retries.delivered(closed.id, closed.generated_before + 1)
            return
        self._sequences.first_token(sequence)
        if sequence.piggybacked and self._requests.recent.shared:
            self._round.stale = True  # policies bound the prompts that are not computed
        if sequence.unreceived:
            late_ns = self._round.now_ns + self._retries.transfer_deadline_ns(sequence)
            late = partial(self._retries.transfer_is_late, sequence)
            sequence.transfer_timer = self._timers.at(late_ns, late)

    def _received(self, event: ev.KvReceived) -> None:
        if (sequence := self._sequences.serving(event.sequence_id)) is not None:
            problem = self._sequences.received(sequence, event.instance, event.tokens)
            if problem is not None:
                self._retries.broken(sequence, ProtocolError(problem))

    def _moved(self, event: ev.Moved) -> None:
        if (sequence := self._sequences.by_id.get(event.sequence_id)) is not None:
            self._sequences.moved(sequence)

    def _freed(self, event: ev.Freed) -> None:
        self._gangs.note_heartbeat(event.instance)
        self._sequences.free_window(event.sequence_id, event.instance)
        if (sequence := self._sequences.by_id.get(event.sequence_id)) is not None:
            self._sequences.freed(sequence, event.instance)

    def _retained(self, event: ev.Retained) -> None:
        self._gangs.note_heartbeat(event.instance)
        self._sequences.free_window(event.sequence_id, event.instance)
        self._prefix.retained(event)

    def _finished(self, event: ev.Finished) -> None:
        if (sequence := self._sequences.serving(event.sequence_id)) is not None:
            self._sequences.finish(sequence, event.generated_tokens, event.hashes)
            sequence.request.note_generated(event.generated_tokens)
            self._requests.end(sequence.request)
        else:
            self._retries.finished_late(event.sequence_id, event.generated_tokens)

    def _failed(self, event: ev.Failed) -> None:
        self._retries.delivered(event.sequence_id, event.generated_tokens)
        if (sequence := self._sequences.serving(event.sequence_id)) is not None:
            self._retries.failed(sequence, event.error, retryable=event.retryable)

    def _progress(self, event: ev.Progress) -> None:
        for sequence_id, generated_tokens in event.generated_tokens:
            self._retries.delivered(sequence_id, generated_tokens)

    def _step_done(self, event: ev.StepDone) -> None:
        step = self._steps.by_id.get(event.step_id)
        if step is None or event.instance not in step.undone:
            return
        instance = self._gangs.instances[event.instance]
        computed, retaining = self._steps.done(step, instance, event.took_ns)
        for sequence in retaining:
            self._sequences.retain_prefilled(sequence)
        for sequence in computed:
            self._sequences.computed(sequence)
            awaited = not (sequence.over or sequence.request.front)
            if awaited and sequence.first_token_ns is None:
                # The rank that samples sends the token before it reports, so none is under way.
                error = ProtocolError(
                    f"step {step.id} ended without the first token of sequence {sequence.id}"
                )
                self._retries.broken(sequence, error)


class GangEvents:
    """Handlers of events about gangs and the links between them."""

    def __init__(
        self,
        *,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        retries: Retries,
        prefix: PrefixCache,
        restores: Restores,
    ) -> None:
        self._gangs, self._requests, self._prefix = gangs, requests, prefix
        self._restores = restores
        self._sequences, self._steps, self._retries = sequences, steps, retries
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            ev.GangUp: self._gang_up,
            ev.GangDown: self._gang_down,
            ev.LinkUp: self._link_up,
            ev.LinkDown: self._link_down,
            ev.Heartbeat: self._heartbeat,
            ev.Standby: self._standby,
        }

    def _gang_up(self, event: ev.GangUp) -> None:
        gang = self._gangs.up(event)
        self._steps.ledger.add(gang)
        self._sequences.ledger.add(gang)
        self._prefix.add(gang)
        self._restores.add(gang)
        self._paired()

    def _gang_down(self, event: ev.GangDown) -> None:
        if (gang := self._gangs.by_id.get(event.gang)) is None:
            return
        self._gangs.down(gang)
        self._steps.drop(gang)
        self._prefix.drop(gang)
        self._restores.drop(gang)
        self._retries.gang_lost(gang, event.reason)

    def _link_up(self, event: ev.LinkUp) -> None:
        self._gangs.link(event.prefill, event.decode)
        self._paired()

    def _link_down(self, event: ev.LinkDown) -> None:
        self._gangs.unlink(event.prefill, event.decode)
        self._retries.link_lost(event.prefill, event.decode, event.reason)

    def _paired(self) -> None:
        """Sort waiting requests again: they came before the gangs, or waited for larger ones."""
        if self._gangs.pairs:
            self._requests.requeue_all()

    def _standby(self, event: ev.Standby) -> None:
        self._gangs.stand_by(event.waits)

    def _heartbeat(self, event: ev.Heartbeat) -> None:
        for instance in event.instances:
            self._gangs.note_heartbeat(instance)
        for step_id in event.steps:
            self._steps.advanced(step_id)
