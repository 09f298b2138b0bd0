"""Launched steps with their predicted times, and steps that are not sent yet.

Ranks learn of the steps of some plans only shortly before each begins. An unsent step is known to
the scheduler alone, and its plan can be made again without a message to any rank. It has its slots
and its place in the queues of its instances all the same. Predicted times decide when a step is
sent, not reports: a step is reported when its KV has left, and the next one must not wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile

import msgspec

from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import InstanceId, StepId
from csps.services.scheduling.events.limits import preemption_delay
from csps.services.scheduling.state.ledger import Ledger
from csps.services.scheduling.state.state import Gang, Instance, Round, Sequence, Step


class Steps:
    """Outstanding steps in the order of their launch, which is the ranks' order."""

    def __init__(self, this_round: Round) -> None:
        self._round = this_round
        self.ledger = Ledger()
        self.by_id: dict[StepId, Step] = {}
        self.unsent: dict[StepId, Step] = {}
        """Steps that the ranks do not know yet."""

    def launch(self, step: Step, instances: list[Instance], slots: dict[InstanceId, int]) -> int:
        """Reserve the step's slots and queue it; return its predicted end."""
        self.ledger.reserve(step.id, slots)
        self.by_id[step.id] = step
        for sequence in step.sequences:
            sequence.computing += 1
        begin_ns = max([self._round.now_ns, *[instance.free_at_ns for instance in instances]])
        if not step.high_priority:
            oldest = step.sequences[0].request
            since_ns = oldest.waiting_since_ns
            step.preemption_delay = preemption_delay(
                oldest.delays_before, since_ns, instances, begin_ns, step.predicted_ns
            )
        for instance in instances:
            if step.high_priority:
                self._preempt(step, instance)
            else:
                step.behind += instance.low_priority_steps > 0
                instance.low_priority_steps += 1
                instance.free_at_ns = begin_ns + step.predicted_ns
            instance.steps[step.id] = step
        step.begin_ns, step.end_ns = begin_ns, begin_ns + step.predicted_ns
        if step.high_priority:  # it waits for other high-priority steps at most
            return max(
                min(instance.free_at_ns, self._round.now_ns + instance.high_priority_ns)
                for instance in instances
            )
        return begin_ns + step.predicted_ns

    def _preempt(self, step: Step, instance: Instance) -> None:
        """Let a high-priority step go first: all low-priority ones end so much later."""
        delayed = tuple(other for other in instance.steps.values() if not other.high_priority)
        for other in delayed:
            other.delayed_ns += step.predicted_ns
        step.charged[instance.id] = delayed
        if delayed:
            instance.preempted_ns += step.predicted_ns
            instance.preemption_delay_ns += step.predicted_ns
        instance.high_priority_ns += step.predicted_ns
        instance.free_at_ns = max(self._round.now_ns, instance.free_at_ns) + step.predicted_ns

    def done(
        self, step: Step, instance: Instance, took_ns: int
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Note that an instance is done with its part.

        Returns:
            Sequences that no step computes any more, if this was the last instance of the step; and
            sequences that leave KV to retain, if it was the last one of the step's plan.
        """
        first = _first_low_priority(instance) is step
        for waiting in (step, *_waiting_for(step, instance)):
            self._advance(waiting)
        del step.undone[instance.id]
        del instance.steps[step.id]
        instance.stepped_ns = self._round.now_ns
        self._true_up(step, instance, took_ns, first=first)
        self._round.stale = True
        if not step.plan_steps:
            self.ledger.free(step.id, instance.id)
        if step.undone:
            return [], []
        del self.by_id[step.id]
        for sequence in step.sequences:
            sequence.computing -= 1
        retaining: list[Sequence] = []
        if not any(plan_step.undone for plan_step in step.plan_steps):
            self._free_plan(step)
            retaining = [
                sequence
                for other in step.plan_steps
                for sequence in other.sequences
                if sequence.retained_slices
            ]
        computed = [sequence for sequence in step.sequences if not sequence.computing]
        return computed, list(dict.fromkeys(retaining))

    def advanced(self, step_id: StepId) -> None:
        """Note that an instance advanced in a step; ignore one that is done."""
        if (step := self.by_id.get(step_id)) is not None:
            self._advance(step)

    def _advance(self, step: Step) -> None:
        step.advanced_ns, step.delayed_before_ns = self._round.now_ns, step.delayed_ns

    def _free_plan(self, last: Step) -> None:
        """Free the slots of all chunks. They stay until the last one, which attends to them, is
        computed."""
        for step in last.plan_steps:
            for instance in last.gang.instances:
                self.ledger.free(step.id, instance.id)

    def _true_up(self, step: Step, instance: Instance, took_ns: int, *, first: bool) -> None:
        """Replace predicted times by measured ones.

        Args:
            first: whether it was the first of the instance's low-priority steps.
        """
        now_ns, error_ns = self._round.now_ns, took_ns - step.predicted_ns
        if not step.high_priority:
            instance.low_priority_steps -= 1
            if not instance.low_priority_steps:
                instance.preempted_ns = 0
            ended_ns = self._ended_ns(step, took_ns)
            if first and (following := _first_low_priority(instance)) is not None:
                _become_first(following, ended_ns)
            if (
                any(other.high_priority or other.delayed_ns for other in self._of(step.gang))
                or step.delayed_ns
            ):
                # Nobody knows where high-priority steps fall between low-priority ones, so that
                # each instance adds up its own steps.
                left_ns = sum(other.predicted_ns for other in instance.steps.values())
                instance.free_at_ns = now_ns + left_ns
            elif ended_ns != step.end_ns:
                self._predict(step.gang)
            return
        instance.high_priority_ns -= step.predicted_ns
        for other in step.charged[instance.id]:
            other.delayed_ns += error_ns
        if step.charged[instance.id]:
            instance.preemption_delay_ns += error_ns
        free_at_ns = instance.free_at_ns + error_ns if instance.steps else now_ns
        instance.free_at_ns = max(now_ns + instance.high_priority_ns, free_at_ns)

    def _ended_ns(self, step: Step, took_ns: int) -> int:
        """Return when the step was computed: the next one begins before it is done, while its KV is
        sent."""
        now_ns = self._round.now_ns
        if step.behind or not took_ns:  # cancelled
            return now_ns
        return min(now_ns, step.begin_ns + took_ns)

    def _predict(self, gang: Gang) -> None:
        """Predict when every instance will be free: steps in the order of their launch, each when
        all its instances have come to it."""
        now_ns = self._round.now_ns
        free_ns = {instance.id: now_ns for instance in gang.instances}
        for step in self._of(gang):
            if step.behind:
                step.begin_ns = max([free_ns[member] for member in step.undone], default=now_ns)
            step.end_ns = max(now_ns, step.begin_ns + step.predicted_ns)
            for member in step.undone:
                free_ns[member] = step.end_ns
        for instance in gang.instances:
            instance.free_at_ns = free_ns[instance.id]

    def _of(self, gang: Gang) -> Iterator[Step]:
        """Yield the outstanding steps of a gang."""
        return (step for step in self.by_id.values() if step.gang is gang)

    def drop(self, gang: Gang) -> None:
        """Drop the steps of a gang that is gone."""
        self.ledger.drop(gang)
        for step in [step for step in self.by_id.values() if step.gang is gang]:
            del self.by_id[step.id]
            self.unsent.pop(step.id, None)
            for sequence in step.sequences:
                sequence.computing -= 1

    # --- unsent steps ---

    def defer(self, step: Step, command: RunStep) -> None:
        """Keep the command of a launched step to send it later."""
        assert not step.high_priority, f"step {step.id} has high priority and cannot be deferred"
        step.command = command
        self.unsent[step.id] = step

    def cancel_unsent(self, step: Step) -> list[Sequence]:
        """Cancel an unsent step; return the sequences that leave KV to retain, if it was the last
        one of its plan that was not done."""
        del self.by_id[step.id], self.unsent[step.id]
        for instance in _members(step):
            del instance.steps[step.id]
            instance.low_priority_steps -= 1
            if not instance.low_priority_steps:
                instance.preempted_ns = 0
        step.command, step.undone = None, {}
        for sequence in step.sequences:
            sequence.computing -= 1
        self.ledger.free_all(step.id)
        if any(plan_step.undone for plan_step in step.plan_steps):
            return []
        self._free_plan(step)
        return [
            sequence
            for other in step.plan_steps
            for sequence in other.sequences
            if sequence.retained_slices
        ]

    def move_to_end(self, step: Step) -> None:
        """Move an unsent step behind all others."""
        for steps in (self.by_id, self.unsent, *(member.steps for member in _members(step))):
            steps[step.id] = steps.pop(step.id)

    def requeue(self, gang: Gang) -> None:
        """Work out anew which unsent steps are first where, and when instances are free."""
        for step in self._of(gang):
            if step.unsent:
                step.behind = sum(
                    _first_low_priority(member) is not step for member in _members(step)
                )
                if not step.behind:
                    step.begin_ns = self._round.now_ns
        self._predict(gang)


def _members(step: Step) -> list[Instance]:
    """Return the instances that have not reported."""
    return [instance for instance in step.gang.instances if instance.id in step.undone]


def _waiting_for(step: Step, instance: Instance) -> list[Step]:
    """Return the steps of an instance that begin there after this one: those launched later, and
    none of high priority after one of low."""
    later = dropwhile(lambda other: other is not step, instance.steps.values())
    return [
        other
        for other in later
        if other is not step and (step.high_priority or not other.high_priority)
    ]


def _first_low_priority(instance: Instance) -> Step | None:
    return next((step for step in instance.steps.values() if not step.high_priority), None)


def _become_first(step: Step, at_ns: int) -> None:
    """Note that a step is first on one more of its instances."""
    step.behind -= 1
    step.first_ns = max(step.first_ns, at_ns)
    if not step.behind:
        step.begin_ns = max(step.first_ns, step.launched_ns)


class UnsentSteps:
    """Sends unsent steps when their time comes, or drops them if their sequence is over."""

    def __init__(self, this_round: Round, steps: Steps, sequences: Sequences) -> None:
        self._round, self._steps, self._sequences = this_round, steps, sequences

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences with unsent steps, in the order of their start."""
        return list(dict.fromkeys(step.sequences[0] for step in self._steps.unsent.values()))

    @property
    def due_ns(self) -> int | None:
        """Time at which to send the next one."""
        times = [self._send_at_ns(step) for step in self._steps.unsent.values()]
        return min((time_ns for time_ns in times if time_ns > self._round.now_ns), default=None)

    def send_due(self) -> None:
        """Send all steps whose time has come, after those launched before them on the same
        instances."""
        for step in [step for step in self._steps.unsent.values() if step.sequences[0].over]:
            self._drop(step)
        waiting: dict[InstanceId, None] = {}
        for step in list(self._steps.unsent.values()):
            due = not step.behind or self._send_at_ns(step) <= self._round.now_ns
            if due and waiting.keys().isdisjoint(step.undone):
                self._send(step)
            else:
                waiting.update(step.undone)

    def _send_at_ns(self, step: Step) -> int:
        plan = step.sequences[0].plan
        assert plan is not None, f"step {step.id} is unsent but has no plan"
        return step.begin_ns - plan.ahead_ns

    def _send(self, step: Step) -> None:
        command, step.command = step.command, None
        assert command is not None, f"step {step.id} was sent already"
        del self._steps.unsent[step.id]
        step.launched_ns = self._round.now_ns
        self._round.emit(msgspec.structs.replace(command, ends_ns=step.end_ns))

    def _drop(self, step: Step) -> None:
        """Cancel a step whose sequence is over."""
        for sequence in self._steps.cancel_unsent(step):
            self._sequences.retain_prefilled(sequence)
        (sequence,) = step.sequences
        if not sequence.computing:
            self._sequences.computed(sequence)
        self._steps.requeue(step.gang)
        self._round.stale = True
