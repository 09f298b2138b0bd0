"""Counts the exchanges under way, begun and not awaited, when attention is computed.

It counts by the order of calls on each rank, so that no clock decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.actors.timing.timeline import Phase


class Overlaps:
    """Exchanges that bring something and are under way as each call of attention begins, rank by
    rank."""

    def __init__(self) -> None:
        self.at_calls: list[tuple[Phase, ...]] = []
        self._under_way: dict[int, dict[int, PendingTransfer]] = {}

    @property
    def share(self) -> float:
        """Return the share of calls beside which an exchange was under way."""
        return sum(map(bool, self.at_calls)) / len(self.at_calls)

    @property
    def phases(self) -> set[Phase]:
        """Return the phases of all exchanges that were ever under way beside attention."""
        return {phase for call in self.at_calls for phase in call}

    def begun(self, transfer: PendingTransfer) -> None:
        self._of_rank()[id(transfer)] = transfer

    def waited_for(self, transfer: PendingTransfer) -> None:
        self._of_rank().pop(id(transfer), None)

    def computes(self) -> None:
        self.at_calls.append(tuple(exchange.label.phase for exchange in self._of_rank().values()))

    def _of_rank(self) -> dict[int, PendingTransfer]:
        return self._under_way.setdefault(threading.get_ident(), {})


@contextmanager
def counted(*modules: ModuleType) -> Iterator[Overlaps]:
    """
    Args:
        modules: that call attention.
    """
    overlaps = Overlaps()

    def begins(start: Callable[..., PendingTransfer]) -> Callable[..., PendingTransfer]:
        def begin(
            self: Transfers, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag, label: Label
        ) -> PendingTransfer:
            transfer = start(self, sends, recvs, tag, label)
            if recvs and (self.overlap or self._together is not None):
                overlaps.begun(transfer)
            return transfer

        return begin

    def waits(wait: Callable[..., None]) -> Callable[..., None]:
        def waited(self: Transfers, transfer: PendingTransfer) -> None:
            wait(self, transfer)
            overlaps.waited_for(transfer)

        return waited

    def computing(attention: Callable[..., Any]) -> Callable[..., Any]:
        def computes(*arguments: Any, **named: Any) -> Any:
            overlaps.computes()
            return attention(*arguments, **named)

        return computes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfers, "start", begins(Transfers.start))
        for name in ("wait", "complete", "_finish_one"):
            patch.setattr(Transfers, name, waits(getattr(Transfers, name)))
        for module in modules:
            patch.setattr(module, "attention", computing(module.attention))
        yield overlaps
