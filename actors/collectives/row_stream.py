"""What gathering and reducing rows in micro-partitions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from csps.actors.collectives.row_shards import RowShards
from csps.actors.timeline import Phase
from csps.actors.transfers import Label, Transfer, Transfers
from csps.protocols.row_part import RowPart


class RowStream(ABC):
    """Rows that travel between members, part by part, beside what this member computes.

    The context ends when this member has passed on what others get from it, and not later: what is
    sent next, by an urgent job too, may have the same tags, and must not overtake it.
    """

    def __init__(
        self, shards: RowShards, transfers: Transfers, *, phase: Phase, layer: int | None
    ) -> None:
        self._shards = shards
        self._member = shards.member
        self._transfers = transfers
        self._phase = phase
        self._layer = layer
        self._arrivals: dict[RowPart, Transfer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish()

    @abstractmethod
    def _finish(self) -> None:
        """Until this member has passed on all that goes through it; may be called twice."""

    def _label(self, part: RowPart) -> Label:
        return Label(phase=self._phase, layer=self._layer, micro=part.index)
