"""Which of a sequence's positions a rank holds."""

from __future__ import annotations

from csps.actors.slot_allocator import SlotAllocator
from csps.protocols.span import Span


def held_positions(slots: SlotAllocator, rid: int, length: int) -> list[int]:
    """Of the first so many; ascending."""
    return [position for position in range(length) if slots.runs(rid, Span(position, position + 1))]
