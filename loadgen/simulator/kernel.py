"""The simulator: an executor of the scheduler whose ranks and links are models.

It drives the `Scheduler` of the live router, and so every decision is the one that the router would
take. Time is integer nanoseconds on a timeline of its own: how long the scheduler itself computes
is never part of it. All that happens at one instant is one batch of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.gangs import SimulatedGangs
from csps.loadgen.simulator.requests import Arrival, IterationEnds, RequestOutcome
from csps.loadgen.simulator.timeline import EventTimeline
from csps.protocols.gang.members import GangRole
from csps.services.scheduling.events.commands import (
    AnyCommand,
    Cancel,
    Evict,
    Fail,
    MoveKv,
    Piggyback,
    Refuse,
    Reserve,
    ResetGang,
    Restart,
    Retain,
    RunStep,
    SetGroup,
)
from csps.services.scheduling.events.events import (
    AnyEvent,
    Finished,
    FirstToken,
    Heartbeat,
    RequestCancelled,
    RequestId,
    Submitted,
    Wake,
)

HEARTBEAT_PERIOD_NS = 1_000_000_000
"""Executors report signs of life about once a second."""
IDLE_WAKES = 100_000
"""So many in a row without any other event mean that nothing will ever happen."""


class SchedulerLike(Protocol):
    """`services.scheduling.scheduler.Scheduler`."""

    def handle(
        self, events: Sequence[AnyEvent], now_ns: int
    ) -> tuple[Sequence[AnyCommand], int | None]:
        """Events in, commands out."""
        ...


class RoundObserver(Protocol):
    """Sees every turn."""

    def __call__(
        self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> None:
        """After the scheduler has decided, before it is carried out."""
        ...


@dataclass(frozen=True, kw_only=True)
class GangFault:
    """A gang dies, or comes up again."""

    at_ns: int
    role: GangRole
    up: bool = False


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    """A client goes away."""

    at_ns: int
    request: RequestId


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulation has found."""

    outcomes: tuple[RequestOutcome, ...]
    """In order of arrival."""
    decoded: int
    """Tokens drawn by iterations; all others were drawn by prefills."""
    end_ns: int
    rounds: int
    """Calls of the scheduler."""


class Simulator:
    """One run.

    Args:
        scheduler: decides; fresh, since a run begins at time 0.
        cluster: the model of ranks and links.
        arrivals: in ascending order of time.
        faults: of gangs, in ascending order of time.
        abandoned: requests, numbered from 1 in order of arrival, that are cancelled.
        observer: sees every turn.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        cluster: ClusterModel,
        arrivals: Sequence[Arrival],
        *,
        faults: Sequence[GangFault] = (),
        abandoned: Sequence[Abandoned] = (),
        observer: RoundObserver | None = None,
    ) -> None:
        self._scheduler, self._observer = scheduler, observer
        self._notice_ns, self._front_ns = cluster.notice_ns, cluster.front_ns
        self._timeline = EventTimeline()
        self._outcomes = [
            RequestOutcome(request=request_id, arrival=it)
            for request_id, it in enumerate(arrivals, 1)
        ]
        self._open = len(self._outcomes)
        self._posted: list[AnyEvent] = []
        self._wake_ns: int | None = None
        self._last_heartbeat_ns = 0
        self._idle_wakes = 0
        self._rounds = 0
        self.gangs = SimulatedGangs(self._timeline, cluster, self)
        self._executors: dict[type, Callable[..., None]] = {
            Reserve: self._reserve,
            RunStep: self.gangs.run_step,
            SetGroup: self.gangs.join,
            Piggyback: self.gangs.piggyback,
            MoveKv: self.gangs.move,
            Retain: self.gangs.keep,
            Evict: self.gangs.release,
            Cancel: self.gangs.cancel,
            Restart: lambda command: self.gangs.end_sequence(command.sequence_id),
            Refuse: self._refuse,
            Fail: self._refuse,
            ResetGang: lambda command: self.gangs.reset(command.gang, command.reason),
        }
        self._plan(cluster.roles, faults, abandoned)

    def _plan(
        self,
        roles: Sequence[GangRole],
        faults: Sequence[GangFault],
        abandoned: Sequence[Abandoned],
    ) -> None:
        for role in roles:
            self._timeline.at(0, partial(self.gangs.up, role))
        for fault in faults:
            act = self.gangs.up if fault.up else self.gangs.down
            self._timeline.at(fault.at_ns, partial(act, fault.role))
        for it in abandoned:
            at_ns = it.at_ns + self._front_ns
            self._timeline.at(at_ns, partial(self._abandon, it.request))
        if self._outcomes:
            self._arrive_at(0)

    def _arrive_at(self, index: int) -> None:
        """One arrival at a time is on the timeline: a heap of all of them is a slow one."""
        at_ns = self._outcomes[index].arrival.at_ns + self._front_ns
        self._timeline.at(max(at_ns, self._timeline.now_ns), lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        outcome = self._outcomes[index]
        self.post_event(
            Submitted(
                request_id=outcome.request,
                prompt_tokens=outcome.arrival.prompt_tokens,
                output_tokens=outcome.arrival.asked_tokens,
                cls=outcome.arrival.cls,
                hashes=outcome.arrival.hashes,
            )
        )
        if index + 1 < len(self._outcomes):
            self._arrive_at(index + 1)

    def _abandon(self, request: RequestId) -> None:
        if (outcome := self.outcome(request)).ended_ns < 0:
            self._end(outcome, "Cancelled")
            self.post_event(RequestCancelled(request_id=request))
            self.gangs.end_request(request)

    # --- the loop ------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        """Go on until every request has ended and nothing is under way any more.

        Raises:
            RuntimeError: requests wait, and nothing will ever happen.
        """
        while not self._timeline.empty and (self._open or self.gangs.busy or self._posted):
            now_ns = self._timeline.step()
            if self._posted:
                self._round(now_ns)
        if self._open:
            raise RuntimeError(f"{self._open} requests wait for something that never comes")
        return SimulationResult(
            outcomes=tuple(self._outcomes),
            decoded=sum(log.tokens() for log in self.gangs.logs),
            end_ns=self._timeline.now_ns,
            rounds=self._rounds,
        )

    def _round(self, now_ns: int) -> None:
        self._watch_idleness()
        if now_ns - self._last_heartbeat_ns >= HEARTBEAT_PERIOD_NS and (
            instances := self.gangs.instances
        ):
            self._last_heartbeat_ns = now_ns
            self._posted.insert(0, Heartbeat(instances=instances))
        events, self._posted = self._posted, []
        commands, wake_ns = self._scheduler.handle(events, now_ns)
        self._rounds += 1
        if self._observer is not None:
            self._observer(now_ns, events, commands)
        self._set_wake_timer(wake_ns, now_ns)
        if not self._notice_ns:
            self._execute(commands)
        elif commands:
            self._timeline.at(now_ns + self._notice_ns, lambda: self._execute(commands))
        if self._posted:
            self._timeline.at(now_ns, lambda: None)

    def _watch_idleness(self) -> None:
        idle = all(isinstance(event, Wake) for event in self._posted)
        self._idle_wakes = self._idle_wakes + 1 if idle else 0
        if self._idle_wakes > IDLE_WAKES:
            raise RuntimeError(f"{self._open} requests wait, and the scheduler only wakes up")

    def _set_wake_timer(self, wake_ns: int | None, now_ns: int) -> None:
        if wake_ns == self._wake_ns:
            return
        self._wake_ns = wake_ns
        if wake_ns is not None:
            assert wake_ns > now_ns, f"the scheduler wants to be woken at {wake_ns}, it is {now_ns}"
            self._timeline.at(wake_ns, self._wake)

    def _wake(self) -> None:
        if self._timeline.now_ns == self._wake_ns:
            self._wake_ns = None
            self.post_event(Wake())

    def _execute(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            self._executors[type(command)](command)

    # --- commands ------------------------------------------------------------------------------

    def _reserve(self, command: Reserve) -> None:
        outcome = self.outcome(command.request_id)
        if outcome.ended_ns < 0:
            outcome.sequences += 1
            outcome.cached = command.cached
            self.gangs.reserve(
                command,
                before=outcome.generated_tokens,
                left=outcome.arrival.output_tokens - outcome.generated_tokens,
            )
        else:
            self.gangs.not_reserved(command)

    def _refuse(self, command: Refuse | Fail) -> None:
        outcome = self.outcome(command.request_id)
        if outcome.ended_ns < 0:
            self._end(outcome, command.error.code)

    # --- what the gangs tell (GangListener) ----------------------------------------------------

    def post_event(self, event: AnyEvent) -> None:
        self._posted.append(event)

    def post_rank_event(self, event: AnyEvent) -> None:
        if not self._notice_ns:
            return self.post_event(event)
        return self._timeline.at(
            self._timeline.now_ns + self._notice_ns, lambda: self.post_event(event)
        )

    def started(self, request: RequestId) -> None:
        outcome = self.outcome(request)
        if outcome.started_ns < 0:
            outcome.started_ns = self._timeline.now_ns

    def prefilled(self, sequence: int, request: RequestId) -> None:
        outcome = self.outcome(request)
        outcome.generated_tokens += 1
        outcome.stamps.append(self._timeline.now_ns)
        if outcome.first_token_ns < 0:
            outcome.first_token_ns = self._timeline.now_ns
        if outcome.generated_tokens == outcome.arrival.output_tokens:
            self.finished(sequence, request)
        else:
            self.post_event(FirstToken(sequence_id=sequence))

    def decoded(self, request: RequestId, ends: IterationEnds) -> None:
        outcome = self.outcome(request)
        outcome.generated_tokens += ends.stop - ends.start
        outcome.stamps.append(ends)

    def finished(self, sequence: int, request: RequestId) -> None:
        outcome = self.outcome(request)
        self._end(outcome, "")
        self.gangs.end_sequence(sequence)
        self.post_event(Finished(sequence_id=sequence, generated_tokens=outcome.generated_tokens))

    # --- requests ------------------------------------------------------------------------------

    def outcome(self, request: RequestId) -> RequestOutcome:
        """What has become of a request so far."""
        return self._outcomes[request - 1]

    def _end(self, outcome: RequestOutcome, error: str) -> None:
        assert outcome.ended_ns < 0, f"request {outcome.request} ends twice"
        outcome.ended_ns, outcome.error = self._timeline.now_ns, error
        self._open -= 1
