"""How far the log lets a step come on one rank, turn by turn.

What the log begins on a rank, lets go on part by part, and may abort.

Steps that a rank was told of and has not begun: their slots are taken when they arrive.

A member acknowledges a step when its slots are taken, so that a step begins at all members or at
none and never waits inside for room. Where there is none, what a former router has left is still
on its way out. A step behind that fits does not wait for one that does not: the router has given
away no slot twice, so there will be room for both. Unless they have a sequence in common: what the
step behind brings back may be what the one before is to compute here and to give away.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from csps.protocols.sequencer.log_entries import RunQuantum

NextRun = Callable[[], tuple[int, RunQuantum] | None]
"""Does what else the log says until it says something about the step, and returns that with its
number in the log; None if the step is to stop."""


class StepAborted(Exception):
    """Nobody wants any of the step's sequences any more."""


class LogProgress:
    """Of one step. The engine thread's.

    Args:
        next_turn: called when the step has come as far as it was told to.
        apart: entered meanwhile: time and bytes of that are not the step's.
    """

    def __init__(
        self, next_run: NextRun, apart: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._next_run, self._apart = next_run, apart
        self.seq = 0
        """Number of the present turn in the log."""
        self.reached = 0
        """The last part that the step came to."""
        self.until = 0
        """The part at which it is to stand still."""
        self.cancelled: set[int] = set()
        """Sequences that nobody wants any more."""
        self._began_ns = 0

    @property
    def ns(self) -> int:
        """Since the present turn began."""
        return time.monotonic_ns() - self._began_ns

    def begin(self, seq: int, quantum: RunQuantum) -> None:
        """Go on up to a part from now on."""
        self.seq, self.until = seq, quantum.until
        self.cancelled.update(quantum.cancelled)
        self._began_ns = time.monotonic_ns()

    def reach(self, point: int) -> None:
        """The step has come to a part: stand still there until the log says to go on.

        Raises:
            StepAborted: it says to stop.
        """
        self.reached = point
        while point >= self.until:
            self._pause()

    def end(self, points: int) -> None:
        """The step has come to its end, perhaps earlier than other members: there it waits until
        the log has let all of them come.

        Raises:
            StepAborted: it says to stop.
        """
        self.reached = points
        while self.until < points:
            self._pause()

    def _pause(self) -> None:
        with self._apart():
            quantum = self._next_run()
        if quantum is None:
            raise StepAborted
        self.begin(*quantum)


class LoggedStep(Protocol):
    """A step that computes chunks, or one that moves a row's KV."""

    cancelled: bool
    """Nobody wants it any more; set from outside."""

    @property
    def step_id(self) -> int:
        """By which the log names it."""
        ...

    @property
    def sequences(self) -> Sequence[int]:
        """Those that it is about."""
        ...

    @property
    def leads(self) -> bool:
        """This rank reports for all members."""
        ...

    @property
    def log_progress(self) -> LogProgress:
        """How far it may come."""
        ...

    def take_slots(self) -> bool:
        """Take the slots that it needs: all or none, and whether it has them."""
        ...

    def free_slots(self) -> None:
        """Free what `take_slots` took, of a step that does not begin."""
        ...


REMEMBERED = 4096
"""Steps and owners that ended before they were heard of here."""


class PendingSteps:
    """Thread-safe."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        """
        Args:
            acknowledge: told the number of a step whose slots are taken.
        """
        self._acknowledge = acknowledge
        self._lock = threading.Lock()
        self._steps: OrderedDict[int, tuple[LoggedStep, int]] = OrderedDict()
        """With their owners, in the order in which they came."""
        self._without_slots: OrderedDict[int, None] = OrderedDict()
        """Those that have no slots yet."""
        self._dropped: OrderedDict[int, None] = OrderedDict()
        """Steps that the log has dropped before they arrived."""
        self._ended_owners: OrderedDict[int, None] = OrderedDict()

    def add(self, run: LoggedStep, owner: int) -> bool:
        """A step has arrived; False if nobody wants it any more."""
        step_id = run.step_id
        with self._lock:
            if owner in self._ended_owners or self._dropped.pop(step_id, 0) is None:
                return False
            self._steps[step_id] = run, owner
            self._without_slots[step_id] = None
            self._take_slots()
            return True

    def slots_freed(self) -> None:
        """There may be room for those that wait for it."""
        with self._lock:
            self._take_slots()

    def _take_slots(self) -> None:
        waiting: set[int] = set()
        for step_id in list(self._without_slots):
            run, _ = self._steps[step_id]
            sequences = set(run.sequences)
            if waiting.isdisjoint(sequences) and run.take_slots():
                del self._without_slots[step_id]
                self._acknowledge(step_id)
            else:
                waiting |= sequences

    def take(self, step_id: int) -> LoggedStep:
        """The step that the log begins now."""
        with self._lock:
            run, _ = self._steps.pop(step_id)
            assert step_id not in self._without_slots, f"step {step_id} begins without slots"
            return run

    def drop(self, step_id: int) -> LoggedStep | None:
        """The log gives up a step that has not begun; None if it has not arrived."""
        with self._lock:
            if step_id not in self._steps:
                _remember(self._dropped, step_id)
                return None
            return self._drop(step_id)

    def end_owner(self, owner: int) -> list[LoggedStep]:
        """Nobody wants this owner's steps; those that were dropped."""
        with self._lock:
            _remember(self._ended_owners, owner)
            ended = [step_id for step_id, (_, whose) in self._steps.items() if whose == owner]
            return [self._drop(step_id) for step_id in ended]

    def _drop(self, step_id: int) -> LoggedStep:
        self._without_slots.pop(step_id, None)
        run, _ = self._steps.pop(step_id)
        run.cancelled = True
        return run

    def __len__(self) -> int:
        return len(self._steps)


def _remember(known: OrderedDict[int, None], step_id: int) -> None:
    known[step_id] = None
    if len(known) > REMEMBERED:
        known.popitem(last=False)
