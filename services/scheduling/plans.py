"""Carrying out what the policy has decided."""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec

from csps.services.scheduling import commands
from csps.services.scheduling.commands import Piece, Reserve, RunStep
from csps.services.scheduling.decisions import (
    Blocked,
    Decision,
    Move,
    Passed,
    PlannedStep,
    Ride,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import InstanceId, RequestId
from csps.services.scheduling.limits import DeadlineSettings
from csps.services.scheduling.plan_checks import PlanChecks
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.prefix.reused import Reused, reused_by_plan, reused_by_ride
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Pair, Sequence, Step, Use
from csps.services.scheduling.step_shares import Histories, histories_of, left_by, slots_of
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
        prefix: PrefixIndex,
    ) -> None:
        self._turn, self._gangs, self._requests, self._prefix = turn, gangs, requests, prefix
        self._sequences, self._steps, self._deadlines = sequences, steps, deadlines

    def apply(self, decisions: Many[Decision]) -> None:
        """Carry out all decisions of a round, after all were found to be sound."""
        plans = [it for it in decisions if type(it) is StartPlan]
        rides = [it for it in decisions if type(it) is Ride]
        checks = PlanChecks(self._gangs, self._requests, self._prefix)
        moves = [it for it in decisions if type(it) is Move]
        moving = checks.check_moves(
            [(self._sequences.by_id[it.sequence], it.placement) for it in moves]
        )
        needs = checks.check(plans, rides)
        blocked = [it.request for it in decisions if type(it) is Blocked]
        self._requests.note_blocked(blocked)
        for it in decisions:
            if type(it) is Passed:
                self._requests.live[it.request].passed_rounds += 1
        wakes = [it.at_ns for it in decisions if type(it) is WakeAt]
        self._turn.wake_ns = min(wakes, default=None)
        for move, needed in zip(moves, moving, strict=True):
            if self._prefix.make_room(needed):
                self._sequences.move(self._sequences.by_id[move.sequence], move.placement)
        starts: list[StartPlan | Ride] = [*plans, *rides]
        for decision, needed in zip(starts, needs, strict=True):
            if not self._begin(decision, needed, checks):
                break  # decided again, as all behind it, when what it waits for is empty

    def _begin(
        self, decision: StartPlan | Ride, needed: dict[InstanceId, int], checks: PlanChecks
    ) -> bool:
        """Carry a decision out, if all slots that it needs are empty; else have them emptied."""
        live, prefix = self._requests.live, self._prefix
        if isinstance(decision, StartPlan):
            pair = checks.pair(decision)
            reused = reused_by_plan(decision, pair, live, prefix)
            gang = pair.prefill
        else:
            reused = reused_by_ride(decision, live, prefix)
            gang = self._gangs.instances[decision.placement.master].gang
        uses = {it: prefix.use(live[it], gang, cached.tokens) for it, cached in reused.items()}
        if not prefix.make_room(needed):
            for use in uses.values():
                prefix.leave(use)
            return False
        if isinstance(decision, StartPlan):
            self._start(decision, pair, reused, uses)
        else:
            self._ride(decision, reused, uses)
        return True

    def _start(
        self, plan: StartPlan, pair: Pair, reused: Reused, uses: dict[RequestId, Use]
    ) -> None:
        begun = {request: cached.shares for request, cached in reused.items()}
        sequences: dict[RequestId, Sequence] = {}
        for placement in plan.decode:
            request = self._requests.live[placement.request]
            cached = reused[request.id].tokens if request.id in reused else 0
            if request.output_tokens == 1 and not pair.in_place:
                # Nothing is decoded behind an only token, so that its KV need not go anywhere.
                placement = msgspec.structs.replace(placement, shares=(), answer=())
            sequence = self._sequences.start(request, pair, placement, uses.get(request.id), cached)
            self._requests.take(request, sequence)
            sequences[request.id] = sequence
            self._reserve(sequence)
        if not pair.in_place and any(it.stays for it in sequences.values()):
            for number, shares in left_by(plan, begun).items():
                sequences[number].left = shares if sequences[number].stays else ()
        steps = []
        found = histories_of(plan, begun, in_place=pair.in_place)
        for planned, histories in zip(plan.steps, found, strict=True):
            slots = {} if pair.in_place else slots_of(planned, histories)
            steps.append(self._launch(planned, sequences, histories, slots))
        if len(steps) > 1 or any(it.left for it in sequences.values()):
            for step in steps:
                step.plan = tuple(steps)

    def _ride(self, ride: Ride, reused: Reused, uses: dict[RequestId, Use]) -> None:
        request = self._requests.live[ride.placement.request]
        cached = reused[request.id].tokens if request.id in reused else 0
        sequence = self._sequences.ride(request, ride.placement, uses.get(request.id), cached)
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
                cached=sequence.cached,
                stays=sequence.stays and sequence.in_place,
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
                        Piece(
                            sequence.id, it.start, it.length, it.rows, it.keep, bool(sequence.left)
                        )
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
