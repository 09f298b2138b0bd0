"""Who computes which rows of a step whose strategy is a ring."""

from __future__ import annotations

import msgspec

from csps.protocols.placement import RING_LAYOUTS
from csps.protocols.plans import RINGS
from csps.services.scheduling.decisions import PlannedPiece, PlannedStep
from csps.services.scheduling.shares import laid_out
from csps.services.scheduling.step_shares import rows_of


def in_zigzag(step: PlannedStep) -> PlannedStep:
    """A step around a ring with its rows in zigzag, each piece for itself (CP §3.5.1)."""
    return in_layout(step, "zigzag")


def in_layout(step: PlannedStep, name: str) -> PlannedStep:
    """A step around a ring with its rows in one of the layouts for rings; other steps, and rows
    that were laid out, as they are.

    Every instance has as many rows of a piece as the bounds give it, so that plans need the same
    slots; but they come from both ends of the piece, or from all of it, which shares causal
    attention evenly.
    """
    if step.strategy not in RINGS or len(step.group) == 1 or any(it.rows for it in step.pieces):
        return step
    pieces: list[PlannedPiece] = []
    for piece, rows in zip(step.pieces, rows_of(step), strict=True):
        layout = RING_LAYOUTS[name]([share.tokens for share in rows])
        laid = laid_out([share.instance for share in rows], layout, piece.start)
        pieces.append(msgspec.structs.replace(piece, rows=laid))
    return msgspec.structs.replace(step, pieces=tuple(pieces))
