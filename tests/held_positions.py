"""Which of a sequence's positions a rank's pool holds."""

from __future__ import annotations

from csps.actors.kv_pool import KvPool
from csps.protocols.span import Span


def held_positions(pool: KvPool, rid: int, length: int) -> list[int]:
    """Of the first so many; ascending."""
    return [position for position in range(length) if pool.runs(rid, Span(position, position + 1))]
