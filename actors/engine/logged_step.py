"""What the log begins on a rank, lets go on part by part, and may abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from csps.actors.engine.log_turns import LogTurns


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
    def turns(self) -> LogTurns:
        """How far it may come."""
        ...

    def take_slots(self) -> bool:
        """Take the slots that it needs: all or none, and whether it has them."""
        ...

    def give_back(self) -> None:
        """Free what `take_slots` took, of a step that does not begin."""
        ...
