"""Steps that a rank was told of and has not begun: their slots are taken when they arrive.

A member acknowledges a step when its slots are taken, so that a step begins at all members or at
none and never waits inside for room. Where there is none, what a former router has left is still
on its way out. A step behind that fits does not wait for one that does not: the router has given
away no slot twice, so there will be room for both. Unless they have a sequence in common: what the
step behind brings back may be what the one before is to compute here and to give away.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from csps.actors.engine.logged_step import LoggedStep

REMEMBERED = 4096
"""Steps and owners that ended before they were heard of here."""


class StepDesk:
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
        self._roomless: OrderedDict[int, None] = OrderedDict()
        """Those that have no slots yet."""
        self._gone: OrderedDict[int, None] = OrderedDict()
        """Steps that the log has dropped before they arrived."""
        self._ended_owners: OrderedDict[int, None] = OrderedDict()

    def add(self, run: LoggedStep, owner: int) -> bool:
        """A step has arrived; False if nobody wants it any more."""
        number = run.number
        with self._lock:
            if owner in self._ended_owners or self._gone.pop(number, 0) is None:
                return False
            self._steps[number] = run, owner
            self._roomless[number] = None
            self._take_slots()
            return True

    def slots_came_back(self) -> None:
        """There may be room for those that wait for it."""
        with self._lock:
            self._take_slots()

    def _take_slots(self) -> None:
        waiting: set[int] = set()
        for number in list(self._roomless):
            run, _ = self._steps[number]
            sequences = set(run.sequences)
            if waiting.isdisjoint(sequences) and run.take_slots():
                del self._roomless[number]
                self._acknowledge(number)
            else:
                waiting |= sequences

    def take(self, number: int) -> LoggedStep:
        """The step that the log begins now."""
        with self._lock:
            run, _ = self._steps.pop(number)
            assert number not in self._roomless, f"step {number} begins without slots"
            return run

    def drop(self, number: int) -> LoggedStep | None:
        """The log gives up a step that has not begun; None if it has not arrived."""
        with self._lock:
            if number not in self._steps:
                _remember(self._gone, number)
                return None
            return self._drop(number)

    def end_owner(self, owner: int) -> list[LoggedStep]:
        """Nobody wants this owner's steps; those that were dropped."""
        with self._lock:
            _remember(self._ended_owners, owner)
            ended = [number for number, (_, whose) in self._steps.items() if whose == owner]
            return [self._drop(number) for number in ended]

    def _drop(self, number: int) -> LoggedStep:
        self._roomless.pop(number, None)
        run, _ = self._steps.pop(number)
        run.cancelled = True
        return run

    def __len__(self) -> int:
        return len(self._steps)


def _remember(known: OrderedDict[int, None], number: int) -> None:
    known[number] = None
    if len(known) > REMEMBERED:
        known.popitem(last=False)
