"""Launched steps: who is still computing, and until when as predicted."""

from __future__ import annotations

from collections.abc import Iterator

from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.holdups import hold_up
from csps.services.scheduling.ids import InstanceId, StepId
from csps.services.scheduling.ledger import Ledger
from csps.services.scheduling.state import Gang, Instance, Sequence, Step
from csps.services.scheduling.turn import Turn


class Steps:
    """Outstanding steps in the order of their launch, which is that of the ranks."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.ledger = Ledger()
        self.by_id: dict[StepId, Step] = {}
        self.held: dict[StepId, Step] = {}
        """Those that the ranks have not heard of."""

    def launch(self, step: Step, instances: list[Instance], slots: dict[InstanceId, int]) -> int:
        """Take the step's slots. Returns when it ends, as predicted."""
        self.ledger.reserve(step.id, slots)
        self.by_id[step.id] = step
        for sequence in step.sequences:
            sequence.computing += 1
        begin_ns = max([self._turn.now_ns, *[it.free_at_ns for it in instances]])
        if not step.urgent:
            oldest = step.sequences[0].request
            since_ns = oldest.waiting_since_ns
            step.hold_up = hold_up(
                oldest.held_before, since_ns, instances, begin_ns, step.predicted_ns
            )
        for instance in instances:
            if step.urgent:
                self._overtake(step, instance)
            else:
                step.behind += instance.long_steps > 0
                instance.long_steps += 1
                instance.free_at_ns = begin_ns + step.predicted_ns
            instance.steps[step.id] = step
        step.begin_ns, step.end_ns = begin_ns, begin_ns + step.predicted_ns
        if step.urgent:  # it waits for other urgent ones at most
            return max(min(it.free_at_ns, self._turn.now_ns + it.urgent_ns) for it in instances)
        return begin_ns + step.predicted_ns

    def _overtake(self, step: Step, instance: Instance) -> None:
        """An urgent step goes first: everything that is not urgent ends so much later."""
        delayed = tuple(it for it in instance.steps.values() if not it.urgent)
        for other in delayed:
            other.delayed_ns += step.predicted_ns
        step.charged[instance.id] = delayed
        if delayed:
            instance.overtaken_ns += step.predicted_ns
            instance.held_ns += step.predicted_ns
        instance.urgent_ns += step.predicted_ns
        instance.free_at_ns = max(self._turn.now_ns, instance.free_at_ns) + step.predicted_ns

    def done(
        self, step: Step, instance: Instance, took_ns: int
    ) -> tuple[list[Sequence], list[Sequence]]:
        """An instance is through with its part.

        Returns:
            The sequences of which nothing more is computed, if it was the step's last one; and
            those that leave KV behind, if it was the last one of the step's plan.
        """
        first = _first_long(instance) is step
        del step.undone[instance.id]
        del instance.steps[step.id]
        instance.stepped_ns = self._turn.now_ns
        self._true_up(step, instance, took_ns, first=first)
        self._turn.stale = True
        if not step.plan:
            self.ledger.give_back(step.id, instance.id)
        if step.undone:
            return [], []
        del self.by_id[step.id]
        for sequence in step.sequences:
            sequence.computing -= 1
        leaving: list[Sequence] = []
        if not any(it.undone for it in step.plan):
            self._give_back_plan(step)
            leaving = [it for other in step.plan for it in other.sequences if it.left]
        computed = [it for it in step.sequences if not it.computing]
        return computed, list(dict.fromkeys(leaving))

    def _give_back_plan(self, last: Step) -> None:
        """Chunks are kept until the last one is computed, which attends to them."""
        for step in last.plan:
            for instance in last.gang.instances:
                self.ledger.give_back(step.id, instance.id)

    def _true_up(self, step: Step, instance: Instance, took_ns: int, *, first: bool) -> None:
        """Put what was measured in the place of what was predicted.

        Args:
            first: it was the first of the instance's long steps.
        """
        now_ns, error_ns = self._turn.now_ns, took_ns - step.predicted_ns
        if not step.urgent:
            instance.long_steps -= 1
            if not instance.long_steps:
                instance.overtaken_ns = 0
            ended_ns = self._ended_ns(step, took_ns)
            if first and (following := _first_long(instance)) is not None:
                _come_to_turn(following, ended_ns)
            if any(it.urgent or it.delayed_ns for it in self._of(step.gang)) or step.delayed_ns:
                # How urgent ones fall between long ones is not known: an instance counts its own.
                left_ns = sum(it.predicted_ns for it in instance.steps.values())
                instance.free_at_ns = now_ns + left_ns
            elif ended_ns != step.end_ns:
                self._predict(step.gang)
            return
        instance.urgent_ns -= step.predicted_ns
        for other in step.charged[instance.id]:
            other.delayed_ns += error_ns
        if step.charged[instance.id]:
            instance.held_ns += error_ns
        free_at_ns = instance.free_at_ns + error_ns if instance.steps else now_ns
        instance.free_at_ns = max(now_ns + instance.urgent_ns, free_at_ns)

    def _ended_ns(self, step: Step, took_ns: int) -> int:
        """When it was computed: what follows it has begun before it is done, while KV is sent."""
        now_ns = self._turn.now_ns
        if step.behind or not took_ns:  # withdrawn
            return now_ns
        return min(now_ns, step.begin_ns + took_ns)

    def _predict(self, gang: Gang) -> None:
        """When every instance will be free: steps in the order of their launch, each when all its
        instances have come to it."""
        now_ns = self._turn.now_ns
        free_ns = {it.id: now_ns for it in gang.instances}
        for step in self._of(gang):
            if step.behind:
                step.begin_ns = max([free_ns[it] for it in step.undone], default=now_ns)
            step.end_ns = max(now_ns, step.begin_ns + step.predicted_ns)
            for instance in step.undone:
                free_ns[instance] = step.end_ns
        for it in gang.instances:
            it.free_at_ns = free_ns[it.id]

    def _of(self, gang: Gang) -> Iterator[Step]:
        """The outstanding steps of a gang."""
        return (it for it in self.by_id.values() if it.gang is gang)

    def drop(self, gang: Gang) -> None:
        """The gang is gone: nothing that it computed comes."""
        self.ledger.drop(gang)
        for step in [it for it in self.by_id.values() if it.gang is gang]:
            del self.by_id[step.id]
            self.held.pop(step.id, None)
            for sequence in step.sequences:
                sequence.computing -= 1

    # --- steps that are not sent yet -------------------------------------------------------

    def hold(self, step: Step, command: RunStep) -> None:
        """A launched step's command is sent later."""
        assert not step.urgent, "held, and urgent"
        step.command = command
        self.held[step.id] = step

    def withdraw(self, step: Step) -> list[Sequence]:
        """A step that the ranks have not heard of will not be. Returns the sequences that leave KV
        behind, if it was the last one of its plan that was not done."""
        del self.by_id[step.id], self.held[step.id]
        for instance in _members(step):
            del instance.steps[step.id]
            instance.long_steps -= 1
            if not instance.long_steps:
                instance.overtaken_ns = 0
        step.command, step.undone = None, {}
        for sequence in step.sequences:
            sequence.computing -= 1
        self.ledger.drop_owner(step.id)
        if any(it.undone for it in step.plan):
            return []
        self._give_back_plan(step)
        return [it for other in step.plan for it in other.sequences if it.left]

    def move_to_end(self, step: Step) -> None:
        """A step that the ranks have not heard of goes behind all others."""
        for steps in (self.by_id, self.held, *(it.steps for it in _members(step))):
            steps[step.id] = steps.pop(step.id)

    def put_in_line(self, gang: Gang) -> None:
        """The order has changed: who is first where, and when everybody is free."""
        for step in self._of(gang):
            if step.held:
                step.behind = sum(_first_long(it) is not step for it in _members(step))
                if not step.behind:
                    step.begin_ns = self._turn.now_ns
        self._predict(gang)


def _members(step: Step) -> list[Instance]:
    """Instances that have not reported."""
    return [it for it in step.gang.instances if it.id in step.undone]


def _first_long(instance: Instance) -> Step | None:
    return next((it for it in instance.steps.values() if not it.urgent), None)


def _come_to_turn(step: Step, at_ns: int) -> None:
    """A step is the first one on another of its instances."""
    step.behind -= 1
    step.turn_ns = max(step.turn_ns, at_ns)
    if not step.behind:
        step.begin_ns = max(step.turn_ns, step.launched_ns)
