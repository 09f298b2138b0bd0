"""Who computes what of a step, who keeps its KV, and where later chunks find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from csps.protocols.span import Span
from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import PlannedStep, StartPlan
from csps.services.scheduling.ids import InstanceId, RequestId
from csps.services.scheduling.shares import outside, own, within

Histories = tuple[tuple[Share, ...], ...]
"""Of each piece of a step: where the KV of its sequence's earlier positions lies."""


class PieceShape(Protocol):
    """A piece, planned or launched."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def rows(self) -> tuple[Share, ...]: ...
    @property
    def keep(self) -> tuple[Share, ...]: ...


class StepShape(Protocol):
    """A step, planned or launched."""

    @property
    def group(self) -> tuple[InstanceId, ...]: ...
    @property
    def bounds(self) -> tuple[int, ...]: ...
    @property
    def pieces(self) -> tuple[PieceShape, ...]: ...


def chunk_of(piece: PieceShape) -> Span:
    """The positions of a piece."""
    return Span(piece.start, piece.start + piece.length)


def rows_of(step: StepShape) -> Iterator[tuple[Share, ...]]:
    """Of each piece, who computes what; in the order of an instance's rows."""
    begin = 0
    for piece in step.pieces:
        yield piece.rows or tuple(_cut(step, piece, begin))
        begin += piece.length


def _cut(step: StepShape, piece: PieceShape, begin: int) -> Iterator[Share]:
    """At the bounds.

    Args:
        begin: where the piece begins in the step.
    """
    offset = piece.start - begin
    for instance, (start, stop) in zip(step.group, pairwise(step.bounds), strict=True):
        first, last = max(start, begin), min(stop, begin + piece.length)
        if first < last:
            yield Share(instance, first + offset, last + offset)


def cut_at_bounds(step: StepShape) -> bool:
    """Who computes a row keeps its KV, and the bounds say who that is."""
    return not any(it.rows or it.keep for it in step.pieces)


def slots_of(step: StepShape, histories: Histories) -> dict[InstanceId, int]:
    """Slots that a step needs: for what an instance computes, which is sent from there, and for
    what comes to it to be kept."""
    if cut_at_bounds(step):
        parts = zip(step.group, pairwise(step.bounds), strict=True)
        return {instance: stop - start for instance, (start, stop) in parts if start < stop}
    slots: dict[InstanceId, int] = {}
    for piece, rows, history in zip(step.pieces, rows_of(step), histories, strict=True):
        for share in (*rows, *_coming(piece.keep, (*rows, *history))):
            slots[share.instance] = slots.get(share.instance, 0) + share.tokens
    return slots


def _coming(keep: tuple[Share, ...], there: Sequence[Share]) -> Iterator[Share]:
    """What an instance is to keep and does not have."""
    having: dict[InstanceId, list[Share]] = {}
    for it in there if keep else ():
        having.setdefault(it.instance, []).append(it)
    for share in keep:
        held = having.get(share.instance, ())
        if share not in held:
            yield from outside([share], held)


Lying = dict[RequestId, tuple[Share, ...]]
"""Where the KV of sequences lies."""


def histories_of(
    plan: StartPlan, begun: Mapping[RequestId, tuple[Share, ...]], *, in_place: bool
) -> Iterator[Histories]:
    """Where each step of a plan finds what is computed when it begins.

    Args:
        plan: whose steps are launched in order.
        begun: what others have computed of its requests.
        in_place: KV lies where it is decoded.
    """
    lying = dict(begun)
    placed = {it.request: it.shares for it in plan.decode} if in_place else {}
    for step in plan.steps:
        yield tuple([lying.get(it.request, ()) for it in step.pieces])
        if step is not plan.steps[-1]:
            _extend(lying, step, placed)


def left_by(plan: StartPlan, begun: Mapping[RequestId, tuple[Share, ...]]) -> Lying:
    """Where a plan for two gangs leaves what it computes."""
    lying = dict(begun)
    for step in plan.steps:
        _extend(lying, step, {})
    return {request: tuple(own(shares)) for request, shares in lying.items()}


def _extend(lying: Lying, step: PlannedStep, placed: Mapping[RequestId, tuple[Share, ...]]) -> None:
    """Add where a step leaves the KV of its pieces."""
    for piece, rows in zip(step.pieces, rows_of(step), strict=True):
        before = lying.get(piece.request, ())
        if piece.request in placed:
            lying[piece.request] = (*before, *within(placed[piece.request], chunk_of(piece)))
        elif piece.keep:
            moved = [it for it in piece.keep if it.start < piece.start]
            lying[piece.request] = (*outside(before, moved), *piece.keep)
        else:
            lying[piece.request] = (*before, *rows)
