"""Micro-partitions of rows that ranks send each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPart:
    """A micro-partition: neighbouring rows of one owner."""

    owner: int
    start: int
    """First row in the whole batch."""
    stop: int
    index: int
    """Among the owner's parts."""

    @property
    def rows(self) -> slice:
        """Rows in the whole batch."""
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        """Rows in the part."""
        return self.stop - self.start
