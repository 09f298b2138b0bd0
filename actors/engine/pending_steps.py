"""Steps that a rank knows and has not begun, and how far the log lets a begun step run.

A member takes a step's slots when the step arrives and then acknowledges it. So a step begins at
all members or at none, and never waits for slots after it has begun. If slots are missing, KV of a
former router is still being freed. A later step that fits does not wait for an earlier one that
does not: the router promises no slot twice, so both will fit. Steps that share a sequence keep
their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from csps.protocols.sequencer.log_entries import RunQuantum

_log = logging.getLogger(__name__)

NextRun = Callable[[], tuple[int, RunQuantum] | None]
"""Function that executes log entries until one resumes the step. It returns that entry with its
number in the log, or None if the step is to stop."""


class StepAborted(Exception):
    """All of the step's sequences were cancelled."""


class LogProgress:
    """Progress of one step in the log. Used by the engine thread only.

    Args:
        next_run: called at the yield point up to which the step may run.
        apart: context for this call; its time and bytes do not count for the step.
        wait: waits until the device has come to the yield point as well. Only then is the time of
            a quantum known, and only then does other work not queue behind the step's.
    """

    def __init__(
        self,
        next_run: NextRun,
        apart: Callable[[], AbstractContextManager[None]],
        wait: Callable[[], None],
    ) -> None:
        self._next_run, self._apart, self._wait = next_run, apart, wait
        self.seq = 0
        """Number of the present entry in the log."""
        self.reached = 0
        """Last yield point that the step has reached."""
        self.until = 0
        """Yield point at which the step is to pause."""
        self.cancelled: set[int] = set()
        """Sequences of the step that were cancelled."""
        self._began_ns = 0

    @property
    def ns(self) -> int:
        """Return the nanoseconds since the present quantum began."""
        return time.monotonic_ns() - self._began_ns

    def begin(self, seq: int, quantum: RunQuantum) -> None:
        """Run up to the yield point of this quantum from now on."""
        self.seq, self.until = seq, quantum.until
        self.cancelled.update(quantum.cancelled)
        self._began_ns = time.monotonic_ns()

    def reach(self, point: int) -> None:
        """Note that the step has reached a yield point; pause if the log does not let it go on.

        Raises:
            StepAborted: the log stops the step.
        """
        self.reached = point
        while point >= self.until:
            self._pause()

    def end(self, points: int) -> None:
        """Wait at the step's end until the log has let all members come there.

        Raises:
            StepAborted: the log stops the step.
        """
        self.reached = points
        while self.until < points:
            self._pause()

    def _pause(self) -> None:
        self._wait()
        with self._apart():
            quantum = self._next_run()
        if quantum is None:
            raise StepAborted
        self.begin(*quantum)


class LoggedStep(Protocol):
    """A step that computes chunks, or one that moves a sequence's KV."""

    cancelled: bool
    """Flag that the step is to stop; set from outside."""

    @property
    def step_id(self) -> int:
        """Return the id by which the log names the step."""
        ...

    @property
    def sequences(self) -> Sequence[int]:
        """Return the sequences that the step computes or moves."""
        ...

    @property
    def leads(self) -> bool:
        """Return whether this rank reports for all members."""
        ...

    @property
    def log_progress(self) -> LogProgress:
        """Return how far the log lets the step run."""
        ...

    def take_slots(self) -> bool:
        """Take all slots that the step needs, or none; return whether it has them."""
        ...

    def free_slots(self) -> None:
        """Free the slots of a step that does not begin."""
        ...


REMEMBERED = 4096
"""Number of ended steps and owners to remember, for messages of theirs that arrive late."""


class PendingSteps:
    """Steps waiting to begin, with their slots. Thread-safe."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        """Args:
        acknowledge: called with the id of a step whose slots are taken.
        """
        self._acknowledge = acknowledge
        self._lock = threading.Lock()
        self._steps: OrderedDict[int, tuple[LoggedStep, int]] = OrderedDict()
        """Steps with their owners, in the order of arrival."""
        self._without_slots: OrderedDict[int, None] = OrderedDict()
        """Ids of steps without slots."""
        self._dropped: OrderedDict[int, None] = OrderedDict()
        """Ids of steps that the log has dropped before they arrived."""
        self._ended_owners: OrderedDict[int, None] = OrderedDict()

    def add(self, run: LoggedStep, owner: int) -> bool:
        """Add a step that has arrived; return False if it was cancelled before."""
        step_id = run.step_id
        with self._lock:
            if owner in self._ended_owners or self._dropped.pop(step_id, 0) is None:
                _log.debug("step %d was dropped before it arrived", step_id)
                return False
            self._steps[step_id] = run, owner
            self._without_slots[step_id] = None
            self._take_slots()
            return True

    def slots_freed(self) -> None:
        """Retry steps that wait for slots."""
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
                # A later step of the same sequence must not overtake: what it moves back may be
                # what this one is to compute here and to move away.
                waiting |= sequences

    def take(self, step_id: int) -> LoggedStep:
        """Remove and return the step that the log begins now."""
        with self._lock:
            run, _ = self._steps.pop(step_id)
            assert step_id not in self._without_slots, f"step {step_id} begins without its slots"
            return run

    def drop(self, step_id: int) -> LoggedStep | None:
        """Remove and return a step that the log drops; None if it has not arrived."""
        with self._lock:
            if step_id not in self._steps:
                _remember(self._dropped, step_id)
                return None
            return self._drop(step_id)

    def end_owner(self, owner: int) -> list[LoggedStep]:
        """Drop all steps of an owner and return them."""
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
