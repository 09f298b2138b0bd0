"""What strategies whose exchanges go on beside their computing have in common."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Transfers


class WithTransfers:
    """Entered for a job's duration; left when all exchanges of the job have ended."""

    def __init__(self, group: SpGroup, *, overlap: bool = True) -> None:
        self._transfers = Transfers(group.mesh, group.clock, overlap=overlap)

    def __enter__(self) -> Self:
        self._transfers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transfers.__exit__(kind, error, trace)
