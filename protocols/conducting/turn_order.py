"""Whose turn it is on the ranks of a gang: steps and streams that share them take turns.

Between two quanta of steps on a rank each stream there has a lease, if it has rows, and between two
leases of a stream the step on top has a quantum, if it may go on. Whatever a turn waits for is the
report of an entry that is in the log already (`protocols.conductor`).
"""

from __future__ import annotations

from csps.protocols.conducting.steps import Step, Steps
from csps.protocols.conducting.streams import LEASES, Group, Streams


class TurnOrder:
    """Looks at steps and streams, and changes nothing of them."""

    def __init__(self, ranks: int, steps: Steps, streams: Streams) -> None:
        self._steps, self._streams = steps, streams
        self._ran = [0] * ranks
        """Number of the newest `Run` that each rank has in the log."""

    def ran(self, step: Step, seq: int) -> None:
        """A step has been given a quantum, by this entry."""
        for rank in step.task.ranks:
            self._ran[rank] = seq

    def steps(self) -> list[Step]:
        """Those that may have a quantum now. No two of them share a rank."""
        return [step for step in self._steps.running() if self._may_run(step)]

    def group(self) -> tuple[Group, int] | None:
        """Of those that may have a lease now the group that has waited longest, and how many
        iterations it may have."""
        found: tuple[Group, int] | None = None
        for group in self._streams.groups:
            waited = found is None or group.served < found[0].served
            if waited and (n := self._length(group)):
                found = group, n
        return found

    def _may_run(self, step: Step) -> bool:
        """Whether a step may have a quantum: each stream on its ranks had a lease since the last
        quantum there, of whichever step."""
        if not self._goes_on(step) or len(step.outstanding) >= self._ahead(step):
            return False
        return all(
            self._ran[rank] < group.stream.served[rank]
            for rank in step.task.ranks
            for group in self._streams.live(rank)
        )

    def _goes_on(self, step: Step) -> bool:
        return not step.ending and not self._steps.interrupted(step)

    def _ahead(self, step: Step) -> int:
        """Quanta of a step that may be outstanding: two where nothing else can have its ranks
        before it is finished, so that they need not wait for its report to come and go."""
        beside = any(True for rank in step.task.ranks for _ in self._streams.live(rank))
        return 1 if beside or self._steps.interruptible(step) else 2

    def _length(self, group: Group) -> int:
        """Iterations of a lease that a group may have now; 0 for none.

        A step whose report is awaited gets the turn that it could not take yet, as long as the
        group has something to do in the meantime.
        """
        leases = group.leases
        if leases >= LEASES:
            return 0
        if self._alone(group):
            return group.long_lease()
        if leases and any(self._is_due(rank, group) for rank in group.ranks):
            return 0
        return 1

    def _alone(self, group: Group) -> bool:
        """Whether no step, and no group of another stream, wants any of a group's ranks."""
        return not any(
            self._steps.wanted[rank]
            or any(other is not group for other in self._streams.live(rank))
            for rank in group.ranks
        )

    def _is_due(self, rank: int, group: Group) -> bool:
        """Whether a step on a rank would go on, and has had no quantum since a stream's lease."""
        step = self._steps.on_top(rank)
        served = group.stream.served[rank]
        return step is not None and self._goes_on(step) and self._ran[rank] < served
