"""Launched steps: who is still computing, and until when as predicted."""

from __future__ import annotations

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

    def launch(self, step: Step, instances: list[Instance], slots: dict[InstanceId, int]) -> int:
        """Take the step's slots. Returns when it ends, as predicted."""
        self.ledger.reserve(step.id, slots)
        self.by_id[step.id] = step
        for sequence in step.sequences:
            sequence.computing += 1
        begin_ns = max([self._turn.now_ns, *(it.free_at_ns for it in instances)])
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
                instance.long_steps += 1
                instance.free_at_ns = begin_ns + step.predicted_ns
            instance.steps[step.id] = step
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
        del step.undone[instance.id]
        del instance.steps[step.id]
        self._true_up(step, instance, took_ns)
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

    def _true_up(self, step: Step, instance: Instance, took_ns: int) -> None:
        """Put what was measured in the place of what was predicted."""
        now_ns, error_ns = self._turn.now_ns, took_ns - step.predicted_ns
        if not step.urgent:
            instance.long_steps -= 1
            if not instance.long_steps:
                instance.overtaken_ns = 0
            left_ns = sum(it.predicted_ns for it in instance.steps.values())
            instance.free_at_ns = now_ns + left_ns
            return
        instance.urgent_ns -= step.predicted_ns
        for other in step.charged[instance.id]:
            other.delayed_ns += error_ns
        if step.charged[instance.id]:
            instance.held_ns += error_ns
        free_at_ns = instance.free_at_ns + error_ns if instance.steps else now_ns
        instance.free_at_ns = max(now_ns + instance.urgent_ns, free_at_ns)

    def drop(self, gang: Gang) -> None:
        """The gang is gone: nothing that it computed comes."""
        self.ledger.drop(gang)
        for step in [it for it in self.by_id.values() if it.gang is gang]:
            del self.by_id[step.id]
            for sequence in step.sequences:
                sequence.computing -= 1
