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
from csps.loadgen.simulator.requests import Arrival, IterationEnds, Outcome
from csps.loadgen.simulator.timeline import Timeline
from csps.protocols.gang_members import GangRole
from csps.services.scheduling.commands import (
    AnyCommand,
    Cancel,
    Fail,
    Keep,
    MoveKv,
    Refuse,
    Release,
    Reserve,
    ResetGang,
    Restart,
    Ride,
    RunStep,
    SetGroup,
)
from csps.services.scheduling.events import (
    AnyEvent,
    Cancelled,
    Finished,
    FirstToken,
    Heard,
    Submitted,
    Wake,
)
from csps.services.scheduling.ids import RequestId

HEARD_NS = 1_000_000_000
"""Executors report signs of life about once a second."""
IDLE_WAKES = 100_000
"""So many in a row without any other event mean that nothing will ever happen."""


class Deciding(Protocol):
    """`services.scheduling.scheduler.Scheduler`."""

    def handle(
        self, events: Sequence[AnyEvent], now_ns: int
    ) -> tuple[Sequence[AnyCommand], int | None]:
        """Events in, commands out."""
        ...


class Observer(Protocol):
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
class Run:
    """What a simulation has found."""

    outcomes: tuple[Outcome, ...]
    """In order of arrival."""
    decoded: int
    """Tokens drawn by iterations; all others were drawn by prefills."""
    end_ns: int
    turns: int
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
        scheduler: Deciding,
        cluster: ClusterModel,
        arrivals: Sequence[Arrival],
        *,
        faults: Sequence[GangFault] = (),
        abandoned: Sequence[Abandoned] = (),
        observer: Observer | None = None,
    ) -> None:
        self._scheduler, self._observer = scheduler, observer
        self._notice_ns, self._front_ns = cluster.notice_ns, cluster.front_ns
        self._timeline = Timeline()
        self._outcomes = [
            Outcome(request=number, arrival=it) for number, it in enumerate(arrivals, 1)
        ]
        self._open = len(self._outcomes)
        self._told: list[AnyEvent] = []
        self._wake_ns: int | None = None
        self._heard_ns = 0
        self._idle_wakes = 0
        self._turns = 0
        self.gangs = SimulatedGangs(self._timeline, cluster, self)
        self._carriers: dict[type, Callable[..., None]] = {
            Reserve: self._reserve,
            RunStep: self.gangs.run_step,
            SetGroup: self.gangs.join,
            Ride: self.gangs.ride,
            MoveKv: self.gangs.move,
            Keep: self.gangs.keep,
            Release: self.gangs.release,
            Cancel: self.gangs.cancel,
            Restart: lambda command: self.gangs.give_up(command.sequence),
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
        self.tell(
            Submitted(
                request=outcome.request,
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
            self.tell(Cancelled(request=request))
            self.gangs.end_request(request)

    # --- the loop ------------------------------------------------------------------------------

    def run(self) -> Run:
        """Go on until every request has ended and nothing is under way any more.

        Raises:
            RuntimeError: requests wait, and nothing will ever happen.
        """
        while not self._timeline.empty and (self._open or self.gangs.busy or self._told):
            now_ns = self._timeline.step()
            if self._told:
                self._turn(now_ns)
        if self._open:
            raise RuntimeError(f"{self._open} requests wait for something that never comes")
        return Run(
            outcomes=tuple(self._outcomes),
            decoded=sum(log.tokens() for log in self.gangs.logs),
            end_ns=self._timeline.now_ns,
            turns=self._turns,
        )

    def _turn(self, now_ns: int) -> None:
        self._watch_idleness()
        if now_ns - self._heard_ns >= HEARD_NS and (instances := self.gangs.instances):
            self._heard_ns = now_ns
            self._told.insert(0, Heard(instances=instances))
        events, self._told = self._told, []
        commands, wake_ns = self._scheduler.handle(events, now_ns)
        self._turns += 1
        if self._observer is not None:
            self._observer(now_ns, events, commands)
        self._set_alarm(wake_ns, now_ns)
        if not self._notice_ns:
            self._carry_out(commands)
        elif commands:
            self._timeline.at(now_ns + self._notice_ns, lambda: self._carry_out(commands))
        if self._told:
            self._timeline.at(now_ns, lambda: None)

    def _watch_idleness(self) -> None:
        idle = all(isinstance(event, Wake) for event in self._told)
        self._idle_wakes = self._idle_wakes + 1 if idle else 0
        if self._idle_wakes > IDLE_WAKES:
            raise RuntimeError(f"{self._open} requests wait, and the scheduler only wakes up")

    def _set_alarm(self, wake_ns: int | None, now_ns: int) -> None:
        if wake_ns == self._wake_ns:
            return
        self._wake_ns = wake_ns
        if wake_ns is not None:
            assert wake_ns > now_ns, f"the scheduler wants to be woken at {wake_ns}, it is {now_ns}"
            self._timeline.at(wake_ns, self._wake)

    def _wake(self) -> None:
        if self._timeline.now_ns == self._wake_ns:
            self._wake_ns = None
            self.tell(Wake())

    def _carry_out(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            self._carriers[type(command)](command)

    # --- commands ------------------------------------------------------------------------------

    def _reserve(self, command: Reserve) -> None:
        outcome = self.outcome(command.request)
        if outcome.ended_ns < 0:
            outcome.sequences += 1
            outcome.cached = command.cached
            self.gangs.reserve(
                command, before=outcome.drawn, left=outcome.arrival.output_tokens - outcome.drawn
            )
        else:
            self.gangs.not_reserved(command)

    def _refuse(self, command: Refuse | Fail) -> None:
        outcome = self.outcome(command.request)
        if outcome.ended_ns < 0:
            self._end(outcome, command.error.code)

    # --- what the gangs tell (GangListener) ----------------------------------------------------

    def tell(self, event: AnyEvent) -> None:
        self._told.append(event)

    def tell_later(self, event: AnyEvent) -> None:
        if not self._notice_ns:
            return self.tell(event)
        return self._timeline.at(self._timeline.now_ns + self._notice_ns, lambda: self.tell(event))

    def started(self, request: RequestId) -> None:
        outcome = self.outcome(request)
        if outcome.started_ns < 0:
            outcome.started_ns = self._timeline.now_ns

    def prefilled(self, sequence: int, request: RequestId) -> None:
        outcome = self.outcome(request)
        outcome.drawn += 1
        outcome.stamps.append(self._timeline.now_ns)
        if outcome.first_token_ns < 0:
            outcome.first_token_ns = self._timeline.now_ns
        if outcome.drawn == outcome.arrival.output_tokens:
            self.finished(sequence, request)
        else:
            self.tell(FirstToken(sequence=sequence))

    def decoded(self, request: RequestId, ends: IterationEnds) -> None:
        outcome = self.outcome(request)
        outcome.drawn += ends.stop - ends.start
        outcome.stamps.append(ends)

    def finished(self, sequence: int, request: RequestId) -> None:
        outcome = self.outcome(request)
        self._end(outcome, "")
        self.gangs.give_up(sequence)
        self.tell(Finished(sequence=sequence, drawn=outcome.drawn))

    # --- requests ------------------------------------------------------------------------------

    def outcome(self, request: RequestId) -> Outcome:
        """What has become of a request so far."""
        return self._outcomes[request - 1]

    def _end(self, outcome: Outcome, error: str) -> None:
        assert outcome.ended_ns < 0, f"request {outcome.request} ends twice"
        outcome.ended_ns, outcome.error = self._timeline.now_ns, error
        self._open -= 1
