"""What the log begins on a rank, lets go on part by part, and may abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from csps.protocols.log_entries import Run


class LoggedStep(Protocol):
    """A step that computes chunks, or one that moves a row's KV."""

    cancelled: bool
    """Nobody wants it any more; set from outside."""

    @property
    def number(self) -> int:
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
    def turn_seq(self) -> int:
        """Number of the present turn in the log."""
        ...

    @property
    def turn_ns(self) -> int:
        """Since the present turn began."""
        ...

    @property
    def reached(self) -> int:
        """The last part that it came to."""
        ...

    def goes_on(self, seq: int, turn: Run) -> None:
        """Go on up to a part from now on."""
        ...

    def take_slots(self) -> bool:
        """Take the slots that it needs: all or none, and whether it has them."""
        ...

    def give_back(self) -> None:
        """Free what `take_slots` took, of a step that does not begin."""
        ...
