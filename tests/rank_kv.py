"""Which of a sequence's positions a rank holds.

What prefill ranks in threads of the test announce to decode ranks.
"""

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
    """Of the first so many; ascending."""
    return [
        position
        for position in range(length)
        if slots.runs(sequence_id, Span(position, position + 1))
    ]


@contextmanager
def headers_sent() -> Iterator[list[KvHeader]]:
    """All that leave meanwhile, in a list that grows."""
    sent: list[KvHeader] = []
    send = KvConnection.send

    def noted(self: KvConnection, peer: int, header: KvHeader, body: Any) -> Any:
        sent.append(header)
        return send(self, peer, header, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvConnection, "send", noted)
        yield sent


def positions_of(sent: Iterable[KvHeader], layer: int) -> list[int]:
    """Ascending, each as often as it was sent."""
    return sorted(p for slice_ in sent if slice_.layer == layer for p in slice_.span.positions)
