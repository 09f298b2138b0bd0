"""Steps of plans that are sent one by one: the ranks hear of each shortly before it begins.

Until then a step is the scheduler's alone, and a plan can be made again without a word to any rank.
It has its slots and its place in the line of its instances all the while. What is sent is decided
by predicted times and not by reports: a step is reported when its KV has left, and the next one
must not wait for that.
"""

from __future__ import annotations

import msgspec

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Sequence, Step
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.turn import Turn


class HeldSteps:
    """Sends them when their time comes, or drops what nobody wants any more."""

    def __init__(self, turn: Turn, steps: Steps, sequences: Sequences) -> None:
        self._turn, self._steps, self._sequences = turn, steps, sequences

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have some, in the order of their start."""
        return list(dict.fromkeys(it.sequences[0] for it in self._steps.held.values()))

    @property
    def due_ns(self) -> int | None:
        """When the next one is to be sent."""
        times = [self._send_at_ns(it) for it in self._steps.held.values()]
        return min((it for it in times if it > self._turn.now_ns), default=None)

    def look(self) -> None:
        """Send all whose time has come, after those that were launched before them on the same
        instances."""
        for step in [it for it in self._steps.held.values() if it.sequences[0].over]:
            self._drop(step)
        waiting: dict[InstanceId, None] = {}
        for step in list(self._steps.held.values()):
            due = not step.behind or self._send_at_ns(step) <= self._turn.now_ns
            if due and waiting.keys().isdisjoint(step.undone):
                self._send(step)
            else:
                waiting.update(step.undone)

    def _send_at_ns(self, step: Step) -> int:
        plan = step.sequences[0].plan
        assert plan is not None, "held without a plan"
        return step.begin_ns - plan.ahead_ns

    def _send(self, step: Step) -> None:
        command, step.command = step.command, None
        assert command is not None, "sent already"
        del self._steps.held[step.id]
        step.launched_ns = self._turn.now_ns
        self._turn.emit(msgspec.structs.replace(command, ends_ns=step.end_ns))

    def _drop(self, step: Step) -> None:
        """Its sequence is over."""
        for sequence in self._steps.withdraw(step):
            self._sequences.left(sequence)
        (sequence,) = step.sequences
        if not sequence.computing:
            self._sequences.computed(sequence)
        self._steps.put_in_line(step.gang)
        self._turn.stale = True
