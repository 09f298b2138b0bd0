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
    Replan,
    Ride,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import InstanceId, RequestId
from csps.services.scheduling.limits import DeadlineSettings
from csps.services.scheduling.plan_checks import (
    CheckedPlan,
    CheckedReplan,
    CheckedRide,
    PlanChecks,
)
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.prefix.reused import Reused
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Gang, Plan, Sequence, Step, Use
from csps.services.scheduling.step_shares import Histories, left_by
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.turn import Turn

Uses = dict[RequestId, Use]
"""Of kept KV, by the request that begins with it."""


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
        replans = checks.check_replans(
            [(self._sequences.by_id[it.sequence], it) for it in decisions if type(it) is Replan]
        )
        checked = checks.check(plans, rides)
        blocked = [it.request for it in decisions if type(it) is Blocked]
        self._requests.note_blocked(blocked)
        for it in decisions:
            if type(it) is Passed:
                self._requests.live[it.request].passed_rounds += 1
        wakes = [it.at_ns for it in decisions if type(it) is WakeAt]
        self._turn.wake_ns = min(wakes, default=None)
        evicting = [not self._move(*it) for it in zip(moves, moving, strict=True)]
        for replan in replans:
            self._replan(replan)
        if any(evicting):
            return  # perhaps what a plan goes on from: decided again when that is gone
        for start in checked:
            if not self._begin(start):
                break  # decided again, as all behind it, when what it waits for is empty

    def _move(self, move: Move, needed: dict[InstanceId, int]) -> bool:
        """Have KV moved, if all slots that it needs are empty; else have them emptied."""
        empty = self._prefix.make_room(needed)
        if empty:
            self._sequences.move(self._sequences.by_id[move.sequence], move.placement)
        return empty

    def _begin(self, checked: CheckedPlan | CheckedRide) -> bool:
        """Carry a decision out, if all slots that it needs are empty; else have them emptied."""
        holds: Uses = {}
        if isinstance(checked, CheckedPlan):
            uses = self._use(checked.reused, checked.pair.prefill)
            holds = self._use(checked.held, checked.pair.decode)
        else:
            uses = self._use(checked.reused, checked.gang)
        if not self._prefix.make_room(checked.needs):
            for use in (*uses.values(), *holds.values()):
                self._prefix.leave(use)
            return False
        if isinstance(checked, CheckedPlan):
            self._start(checked, uses, holds)
        else:
            self._ride(checked, uses)
        return True

    def _use(self, reused: Reused, gang: Gang) -> Uses:
        live, use = self._requests.live, self._prefix.use
        return {it: use(live[it], gang, cached.tokens) for it, cached in reused.items()}

    def _start(self, checked: CheckedPlan, uses: Uses, holds: Uses) -> None:
        plan, pair, reused = checked.plan, checked.pair, checked.reused
        sequences: dict[RequestId, Sequence] = {}
        for placement, needed in zip(plan.decode, checked.decode, strict=True):
            request = self._requests.live[placement.request]
            cached = reused[request.id].tokens if request.id in reused else 0
            if request.output_tokens == 1 and not pair.in_place:
                # Nothing is decoded behind an only token, so that its KV need not go anywhere.
                placement, needed = msgspec.structs.replace(placement, shares=(), answer=()), {}
            use, held = uses.get(request.id), holds.get(request.id)
            sequence = self._sequences.start(request, pair, placement, needed, use, cached, held)
            self._requests.take(request, sequence)
            sequences[request.id] = sequence
            self._reserve(sequence)
        staying = {
            number: it
            for number, it in sequences.items()
            if not pair.in_place and self._prefix.may_stay(it.request, it.cached)
        }
        if staying:
            begun = {number: cached.shares for number, cached in reused.items()}
            left = left_by(plan, begun)
            for number, sequence in staying.items():
                sequence.left = left[number]
        one_by_one = plan.ahead_ns is not None
        steps = [
            self._launch(planned, sequences, histories, slots, held=one_by_one)
            for planned, histories, slots in zip(
                plan.steps, checked.histories, checked.steps, strict=True
            )
        ]
        if len(steps) > 1 or any(it.left for it in sequences.values()):
            for step in steps:
                step.plan = tuple(steps)
        if plan.ahead_ns is not None:
            (sequence,) = sequences.values()
            sequence.plan = Plan(
                version=0,
                made_ns=self._turn.now_ns,
                ends_ns=steps[-1].end_ns,
                ahead_ns=plan.ahead_ns,
                steps=tuple(steps),
            )

    def _replan(self, checked: CheckedReplan) -> None:
        """Put other steps in the place of those that no rank has heard of. It never waits: if slots
        are not empty yet, the old ones stay."""
        sequence = checked.sequence
        plan = sequence.plan
        assert plan is not None, "checked"
        if checked.steps and self._has_room(checked.needs):
            self._replace(sequence, plan, checked)
        plan.version += 1
        plan.made_ns, plan.ends_ns = self._turn.now_ns, plan.steps[-1].end_ns

    def _has_room(self, needs: dict[InstanceId, int]) -> bool:
        instances = self._gangs.instances
        return all(count <= instances[it].empty_slots for it, count in needs.items())

    def _replace(self, sequence: Sequence, plan: Plan, checked: CheckedReplan) -> None:
        old, line = plan.held, list(self._steps.held.values())
        behind = line[line.index(old[-1]) + 1 :]
        new = [
            self._launch(planned, {sequence.request.id: sequence}, histories, slots, held=True)
            for planned, histories, slots in zip(
                checked.replan.steps, checked.histories, checked.steps, strict=True
            )
        ]
        plan.steps = (*(it for it in plan.steps if not it.held), *new)
        several = len(plan.steps) > 1 or bool(sequence.left)
        for step in (*plan.steps, *old):  # the old ones too: nothing is given back for their sake
            step.plan = plan.steps if several else ()
        for step in old:
            self._steps.withdraw(step)
        for step in behind:
            self._steps.move_to_end(step)
        self._steps.put_in_line(sequence.prefill)
        sequence.left = checked.left

    def _ride(self, checked: CheckedRide, uses: Uses) -> None:
        ride, reused = checked.ride, checked.reused
        request = self._requests.live[ride.placement.request]
        cached = reused[request.id].tokens if request.id in reused else 0
        use, needed = uses.get(request.id), checked.needs
        sequence = self._sequences.ride(request, ride.placement, needed, use, cached)
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
                stays=sequence.stays,
            )
        )

    def _launch(
        self,
        planned: PlannedStep,
        sequences: dict[RequestId, Sequence],
        histories: Histories,
        slots: dict[InstanceId, int],
        *,
        held: bool,
    ) -> Step:
        """Give a step its slots and its place in the line.

        Args:
            held: the ranks hear of it later (`HeldSteps`).
        """
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
        command = RunStep(
            step=step.id,
            group=planned.group,
            bounds=planned.bounds,
            pieces=tuple(
                [
                    Piece(sequence.id, it.start, it.length, it.rows, it.keep, bool(sequence.left))
                    for sequence, it in zip(computed, planned.pieces, strict=True)
                ]
            ),
            history=histories,
            strategy=planned.strategy,
            cls=computed[0].request.cls,
            urgent=planned.urgent,
            ends_ns=ends_ns,
        )
        if held:
            self._steps.hold(step, command)
        else:
            self._turn.emit(command)
        return step
