"""The positions of a sequence on a rank, and the headers that prefill ranks send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from csps.actors.kv_cache.slot_allocator import SlotAllocator
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.message import KvHeader
from csps.protocols.core.placement import Span


def held_positions(slots: SlotAllocator, sequence_id: int, length: int) -> list[int]:
    """Return which of the first so many positions the rank has, ascending."""
    return [
        position
        for position in range(length)
        if slots.runs(sequence_id, Span(position, position + 1))
    ]


@contextmanager
def headers_sent() -> Iterator[list[KvHeader]]:
    """Yield a list that collects all headers sent meanwhile."""
    sent: list[KvHeader] = []
    send = KvConnection.send

    def noted(self: KvConnection, peer: int, header: KvHeader, body: Any) -> Any:
        sent.append(header)
        return send(self, peer, header, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvConnection, "send", noted)
        yield sent


def positions_of(sent: Iterable[KvHeader], layer: int) -> list[int]:
    """Return the positions, ascending, each as often as it was sent."""
    return sorted(p for slice_ in sent if slice_.layer == layer for p in slice_.span.positions)
