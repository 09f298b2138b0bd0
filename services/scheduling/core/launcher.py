"""Launcher: turns a policy's decisions into reservations, sequences and steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

import msgspec

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import JoinBatch, ReserveKv
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.scheduling.core.plan_checks import (
    CheckedPiggyback,
    CheckedPlan,
    CheckedReplan,
    PlanChecks,
    Reused,
)
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.core.steps import Steps
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Bypassed,
    Decision,
    MovePlan,
    PiggybackPlan,
    PlannedChunk,
    PlannedStep,
    Replan,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.deciding.step_layout import Histories, stored_by
from csps.services.scheduling.events.commands import Reserve, RunStep, ToGang
from csps.services.scheduling.events.events import InstanceId, RequestId
from csps.services.scheduling.events.limits import SchedulerDeadlines
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import Gang, PrefixRef, Round, Sequence, Step, StepPlan

_log = logging.getLogger(__name__)

PrefixRefs = dict[RequestId, PrefixRef]
"""References to retained KV, by the request that reuses it."""


class Launcher:
    """Carries decisions out."""

    def __init__(
        self,
        *,
        this_round: Round,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        deadlines: SchedulerDeadlines,
        prefix: PrefixCache,
    ) -> None:
        self._round, self._gangs, self._requests, self._prefix = this_round, gangs, requests, prefix
        self._sequences, self._steps, self._deadlines = sequences, steps, deadlines

    def apply(self, decisions: Many[Decision]) -> None:
        """Carry out all decisions of a round, after all were found to be sound."""
        plans = [decision for decision in decisions if type(decision) is StartPlan]
        piggybacks = [
            decision
            for decision in decisions
            if type(decision) is PiggybackPlan
            and not self._requests.give_up_front(decision.placement.request_id)
        ]
        checks = PlanChecks(self._gangs, self._requests, self._prefix)
        moves = [decision for decision in decisions if type(decision) is MovePlan]
        moving = checks.check_moves(
            [(self._sequences.by_id[move.sequence_id], move.placement) for move in moves]
        )
        replans = checks.check_replans(
            [
                (self._sequences.by_id[decision.sequence_id], decision)
                for decision in decisions
                if type(decision) is Replan
            ]
        )
        checked = checks.check(plans, piggybacks)
        blocked = [decision.request_id for decision in decisions if type(decision) is Blocked]
        self._requests.note_blocked(blocked)
        for decision in decisions:
            if type(decision) is Bypassed:
                self._requests.live[decision.request_id].bypassed_rounds += 1
        evicting = [not self._move(*move) for move in zip(moves, moving, strict=True)]
        for replan in replans:
            self._replan(replan)
        # Eviction may take a prefix that a plan reuses: decide again afterwards. A plan that has to
        # wait for slots, and all behind it, are decided again when these are empty.
        applied = not any(evicting) and all(map(self._begin, checked))
        self._round.wake_ns = self._next_wake_ns(decisions, applied=applied)

    def _next_wake_ns(self, decisions: Many[Decision], *, applied: bool) -> int | None:
        """Return when the policy is to decide again even if nothing changes.

        At once means in the next nanosecond, since executors await a time to come, and only if all
        of this round was applied: otherwise the policy would decide the same, again and again,
        until slots are empty. They then let it decide anyway.
        """
        now_ns = self._round.now_ns
        times = [decision.at_ns for decision in decisions if type(decision) is WakeAt]
        return min(
            (max(at_ns, now_ns + 1) for at_ns in times if applied or at_ns > now_ns), default=None
        )

    def _move(self, move: MovePlan, needed: dict[InstanceId, int]) -> bool:
        """Move KV if all slots that it needs are empty, else evict; return whether it was moved."""
        empty = self._prefix.make_room(needed)
        if empty:
            self._sequences.move(self._sequences.by_id[move.sequence_id], move.placement)
        return empty

    def _begin(self, checked: CheckedPlan | CheckedPiggyback) -> bool:
        """Start a plan if all its slots are empty, else evict; return whether it started."""
        decode_refs: PrefixRefs = {}
        if isinstance(checked, CheckedPlan):
            prefill_refs = self._ref(checked.reused, checked.pair.prefill)
            decode_refs = self._ref(checked.decode_reused, checked.pair.decode)
        else:
            prefill_refs = self._ref(checked.reused, checked.gang)
        # The references come first: eviction must not take what the plan reuses.
        if not self._prefix.make_room(checked.needs):
            for ref in (*prefill_refs.values(), *decode_refs.values()):
                self._prefix.unref(ref)
            return False
        if isinstance(checked, CheckedPlan):
            self._start(checked, prefill_refs, decode_refs)
        else:
            self._piggyback(checked, prefill_refs)
        return True

    def _ref(self, reused: Reused, gang: Gang) -> PrefixRefs:
        live, ref = self._requests.startable, self._prefix.ref
        return {
            request_id: ref(live[request_id], gang, cached.tokens)
            for request_id, cached in reused.items()
        }

    def _start(
        self, checked: CheckedPlan, prefill_refs: PrefixRefs, decode_refs: PrefixRefs
    ) -> None:
        plan, pair, reused = checked.plan, checked.pair, checked.reused
        sequences: dict[RequestId, Sequence] = {}
        for placement, needed in zip(plan.decode, checked.decode, strict=True):
            request = self._requests.startable[placement.request_id]
            cached = reused[request.id].tokens if request.id in reused else 0
            if request.output_tokens == 1 and not pair.in_place:
                # An only token is sampled by the step: nothing is decoded and no KV transferred.
                placement, needed = msgspec.structs.replace(placement, slices=(), answer=()), {}
            prefill_ref, decode_ref = prefill_refs.get(request.id), decode_refs.get(request.id)
            sequence = self._sequences.start(
                request, pair, placement, needed, prefill_ref, cached, decode_ref
            )
            if request.front:
                self._requests.take_front(request, sequence)
            else:
                self._requests.take(request, sequence)
            sequences[request.id] = sequence
            self._reserve(sequence)
        retaining = {
            request_id: sequence
            for request_id, sequence in sequences.items()
            if not pair.in_place and self._prefix.may_retain(sequence.request, sequence.cached)
        }
        if retaining:
            begun = {request_id: cached.slices for request_id, cached in reused.items()}
            stored = stored_by(plan, begun)
            for request_id, sequence in retaining.items():
                sequence.retained_slices = stored[request_id]
        one_by_one = plan.ahead_ns is not None
        steps = [
            self._launch(planned, sequences, histories, slots, unsent=one_by_one)
            for planned, histories, slots in zip(
                plan.steps, checked.histories, checked.steps, strict=True
            )
        ]
        if len(steps) > 1 or any(sequence.retained_slices for sequence in sequences.values()):
            for step in steps:
                step.plan_steps = tuple(steps)
        if plan.ahead_ns is not None:
            (sequence,) = sequences.values()
            sequence.plan = StepPlan(
                version=0,
                made_ns=self._round.now_ns,
                ends_ns=steps[-1].end_ns,
                ahead_ns=plan.ahead_ns,
                steps=tuple(steps),
            )

    def _replan(self, checked: CheckedReplan) -> None:
        """Replace the unsent steps of a sequence. A replan never waits: if slots are not empty yet,
        the old steps stay."""
        sequence = checked.sequence
        plan = sequence.plan
        assert plan is not None, "checked"
        if checked.steps and self._has_room(checked.needs):
            self._replace(sequence, plan, checked)
        plan.version += 1
        plan.made_ns, plan.ends_ns = self._round.now_ns, plan.steps[-1].end_ns

    def _has_room(self, needs: dict[InstanceId, int]) -> bool:
        instances = self._gangs.instances
        return all(count <= instances[instance].empty_slots for instance, count in needs.items())

    def _replace(self, sequence: Sequence, plan: StepPlan, checked: CheckedReplan) -> None:
        old, queue = plan.unsent, list(self._steps.unsent.values())
        behind = queue[queue.index(old[-1]) + 1 :]
        new = [
            self._launch(planned, {sequence.request.id: sequence}, histories, slots, unsent=True)
            for planned, histories, slots in zip(
                checked.replan.steps, checked.histories, checked.steps, strict=True
            )
        ]
        plan.steps = (*(step for step in plan.steps if not step.unsent), *new)
        several = len(plan.steps) > 1 or bool(sequence.retained_slices)
        for step in (*plan.steps, *old):  # the old ones too, or their cancel would free slots
            step.plan_steps = plan.steps if several else ()
        for step in old:
            self._steps.cancel_unsent(step)
        for step in behind:
            self._steps.move_to_end(step)
        self._steps.requeue(sequence.prefill)
        sequence.retained_slices = checked.retained_slices

    def _piggyback(self, checked: CheckedPiggyback, prefill_refs: PrefixRefs) -> None:
        plan, reused = checked.piggyback, checked.reused
        request = self._requests.live[plan.placement.request_id]
        cached = reused[request.id].tokens if request.id in reused else 0
        prefill_ref, needed = prefill_refs.get(request.id), checked.needs
        sequence = self._sequences.start_piggybacked(
            request, plan.placement, needed, prefill_ref, cached
        )
        self._requests.take(request, sequence)
        self._reserve(sequence)
        message = JoinBatch(sequence_id=sequence.id, budget=plan.budget)
        self._round.emit(ToGang(gang=sequence.decode.id, message=message))

    def _reserve(self, sequence: Sequence) -> None:
        request, limits = sequence.request, self._deadlines
        _log.debug(
            "request %d starts as sequence %d: prefill gang %d, decode gang %d, %d tokens cached",
            request.id,
            sequence.id,
            sequence.prefill.id,
            sequence.decode.id,
            sequence.cached,
        )
        wait_ns = limits.reserve_ns + limits.reserve_token_ns * request.prompt_tokens
        self._round.emit(
            Reserve(
                request_id=request.id,
                message=ReserveKv(
                    sequence_id=sequence.id,
                    slices=sequence.slices,
                    master=sequence.master.id,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    answer=sequence.answer,
                    retain=sequence.retain,
                ),
                deadline_ns=self._round.now_ns + wait_ns,
                piggybacked=sequence.piggybacked,
                cached=sequence.cached,
            )
        )

    def _launch(
        self,
        planned: PlannedStep,
        sequences: dict[RequestId, Sequence],
        histories: Histories,
        slots: dict[InstanceId, int],
        *,
        unsent: bool,
    ) -> Step:
        """Give a step its slots and its place in the queue.

        Args:
            unsent: send the command later (`UnsentSteps`).
        """
        computed = [sequences[chunk.request_id] for chunk in planned.chunks]
        instances = [self._gangs.instances[instance] for instance in planned.group]
        step = Step(
            id=self._gangs.next_id("step"),
            gang=instances[0].gang,
            sequences=tuple(computed),
            high_priority=planned.high_priority,
            predicted_ns=planned.predicted_ns,
            launched_ns=self._round.now_ns,
            undone=dict.fromkeys(planned.group),
        )
        ends_ns = self._steps.launch(step, instances, slots)
        command = RunStep(
            step=PrefillStep(
                step_id=step.id,
                group=planned.group,
                bounds=planned.bounds,
                chunks=tuple(map(_chunk, computed, planned.chunks, histories)),
                strategy=planned.strategy,
                high_priority=planned.high_priority,
            ),
            cls=computed[0].request.cls,
            ends_ns=ends_ns,
        )
        if unsent:
            self._steps.defer(step, command)
        else:
            self._round.emit(command)
        return step


def _chunk(sequence: Sequence, planned: PlannedChunk, history: tuple[KvSlice, ...]) -> PrefillChunk:
    """Return a chunk as ranks get it.

    A sequence without slices decodes nothing, so no KV is sent; but KV without a destination would
    be retained where it was computed. That of a front is.
    """
    request = sequence.request
    nowhere = () if request.front else (KvSlice(sequence.master.id, 0, request.prompt_tokens),)
    return PrefillChunk(
        sequence_id=sequence.id,
        start=planned.start,
        length=planned.length,
        rows=planned.rows,
        history=history,
        placement=planned.placement,
        destinations=sequence.slices or nowhere,
        near_to=sequence.master.id if sequence.decode.window and sequence.slices else None,
        retain=bool(sequence.retained_slices),
        last=planned.start + planned.length == request.prompt_tokens and not request.front,
        decoded=request.output_tokens > 1,
        first_index=sequence.generated_before,
    )
