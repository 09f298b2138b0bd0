"""A job that all members have come to, held where its leader has said how the group begins."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from gang_cell import ANSWER_S, Cell

from csps.actors.prefill import PrefillLoop
from csps.actors.prefill_orders import PrefillOrders


class HeldOrders:
    """Nobody hears what leaders in this process decide before `go_on` is set. What they learn
    meanwhile is too late for the layer that the first orders are for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self._decided = threading.Event()
        self._decide = PrefillLoop._decide

        def held(loop: PrefillLoop, *arguments: Any) -> PrefillOrders:
            orders = self._decide(loop, *arguments)
            self._decided.set()
            assert self.go_on.wait(ANSWER_S), "nobody let the orders go"
            return orders

        patch.setattr(PrefillLoop, "_decide", held)

    async def decided(self) -> None:
        """Wait for the first orders."""
        assert await asyncio.to_thread(self._decided.wait, ANSWER_S)

    async def meanwhile_cancel(self, cell: Cell, rid: int) -> None:
        """All ranks know that a request is cancelled, and compute the first layer nevertheless."""
        await self.decided()
        cell.cancel(rid)
        await cell.prefill.stats()
        self.go_on.set()
