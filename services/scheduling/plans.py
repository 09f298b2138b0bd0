"""Carrying out what the policy has decided."""

from __future__ import annotations

from collections.abc import Sequence as Many

from csps.services.scheduling import commands
from csps.services.scheduling.commands import Piece, Reserve, RunStep
from csps.services.scheduling.decisions import (
    Blocked,
    Decision,
    PlannedStep,
    Ride,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import InstanceId, RequestId
from csps.services.scheduling.limits import DeadlineSettings
from csps.services.scheduling.plan_checks import PlanChecks
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Sequence, Step
from csps.services.scheduling.step_shares import Histories, histories_of, slots_of
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.turn import Turn


class Plans:
    """Turns decisions into reservations, sequences and steps."""

    def __init__(
        self,
        *,
        turn: Turn,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        deadlines: DeadlineSettings,
    ) -> None:
        self._turn, self._gangs, self._requests = turn, gangs, requests
        self._sequences, self._steps, self._deadlines = sequences, steps, deadlines

    def apply(self, decisions: Many[Decision]) -> None:
        """Carry out all decisions of a round, after all were found to be sound."""
        plans = [it for it in decisions if type(it) is StartPlan]
        rides = [it for it in decisions if type(it) is Ride]
        checks = PlanChecks(self._gangs, self._requests)
        checks.check(plans, rides)
        blocked = [it.request for it in decisions if type(it) is Blocked]
        self._requests.note_blocked(blocked)
        wakes = [it.at_ns for it in decisions if type(it) is WakeAt]
        self._turn.wake_ns = min(wakes, default=None)
        for plan in plans:
            self._start(plan, checks)
        for ride in rides:
            self._ride(ride)

    def _start(self, plan: StartPlan, checks: PlanChecks) -> None:
        pair = checks.pair(plan)
        sequences: dict[RequestId, Sequence] = {}
        for placement in plan.decode:
            request = self._requests.live[placement.request]
            sequence = self._sequences.start(request, pair, placement)
            self._requests.take(request, sequence)
            sequences[request.id] = sequence
            self._reserve(sequence)
        steps = []
        for planned, histories in zip(
            plan.steps, histories_of(plan, in_place=pair.in_place), strict=True
        ):
            slots = {} if pair.in_place else slots_of(planned, histories)
            steps.append(self._launch(planned, sequences, histories, slots))
        if len(steps) > 1:
            for step in steps:
                step.plan = tuple(steps)

    def _ride(self, ride: Ride) -> None:
        request = self._requests.live[ride.placement.request]
        sequence = self._sequences.ride(request, ride.placement)
        self._requests.take(request, sequence)
        self._reserve(sequence)
        self._turn.emit(
            commands.Ride(gang=sequence.decode.id, sequence=sequence.id, budget=ride.budget)
        )

    def _reserve(self, sequence: Sequence) -> None:
        request, limits = sequence.request, self._deadlines
        wait_ns = limits.reserve_ns + limits.reserve_token_ns * request.prompt_tokens
        self._turn.emit(
            Reserve(
                request=request.id,
                sequence=sequence.id,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                shares=sequence.shares,
                master=sequence.master.id,
                deadline_ns=self._turn.now_ns + wait_ns,
                rides=sequence.rides,
                answer=sequence.answer,
            )
        )

    def _launch(
        self,
        planned: PlannedStep,
        sequences: dict[RequestId, Sequence],
        histories: Histories,
        slots: dict[InstanceId, int],
    ) -> Step:
        computed = [sequences[it.request] for it in planned.pieces]
        instances = [self._gangs.instances[it] for it in planned.group]
        step = Step(
            id=self._gangs.next_id("step"),
            gang=instances[0].gang,
            sequences=tuple(computed),
            urgent=planned.urgent,
            predicted_ns=planned.predicted_ns,
            launched_ns=self._turn.now_ns,
            undone=dict.fromkeys(planned.group),
        )
        ends_ns = self._steps.launch(step, instances, slots)
        self._turn.emit(
            RunStep(
                step=step.id,
                group=planned.group,
                bounds=planned.bounds,
                pieces=tuple(
                    [
                        Piece(sequence.id, it.start, it.length, it.rows, it.keep)
                        for sequence, it in zip(computed, planned.pieces, strict=True)
                    ]
                ),
                history=histories,
                strategy=planned.strategy,
                cls=computed[0].request.cls,
                urgent=planned.urgent,
                ends_ns=ends_ns,
            )
        )
        return step
