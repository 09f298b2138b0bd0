"""How far the log lets a step come on one rank, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from csps.protocols.log_entries import Run

NextTurn = Callable[[], tuple[int, Run] | None]
"""Does what else the log says until it says something about the step, and returns that with its
number in the log; None if the step is to stop."""


class StepAborted(Exception):
    """Nobody wants any of the step's sequences any more."""


class LogTurns:
    """Of one step. The engine thread's.

    Args:
        next_turn: called when the step has come as far as it was told to.
        apart: entered meanwhile: time and bytes of that are not the step's.
    """

    def __init__(
        self, next_turn: NextTurn, apart: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._next_turn, self._apart = next_turn, apart
        self.seq = 0
        """Number of the present turn in the log."""
        self.reached = 0
        """The last part that the step came to."""
        self.until = 0
        """The part at which it is to stand still."""
        self.withdrawn: set[int] = set()
        """Sequences that nobody wants any more."""
        self._began_ns = 0

    @property
    def ns(self) -> int:
        """Since the present turn began."""
        return time.monotonic_ns() - self._began_ns

    def begin(self, seq: int, turn: Run) -> None:
        """Go on up to a part from now on."""
        self.seq, self.until = seq, turn.until
        self.withdrawn.update(turn.withdrawn)
        self._began_ns = time.monotonic_ns()

    def come_to(self, part: int) -> None:
        """The step has come to a part: stand still there until the log says to go on.

        Raises:
            StepAborted: it says to stop.
        """
        self.reached = part
        while part >= self.until:
            self._stand_still()

    def end(self, parts: int) -> None:
        """The step has come to its end, perhaps earlier than other members: there it waits until
        the log has let all of them come.

        Raises:
            StepAborted: it says to stop.
        """
        self.reached = parts
        while self.until < parts:
            self._stand_still()

    def _stand_still(self) -> None:
        with self._apart():
            turn = self._next_turn()
        if turn is None:
            raise StepAborted
        self.begin(*turn)
