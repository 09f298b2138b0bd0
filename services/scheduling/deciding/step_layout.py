"""Who computes what of a step, who keeps its KV, and where later chunks find it.

Who computes which rows of a step whose strategy is a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from csps.protocols.attention.plan import RINGS
from csps.protocols.core.placement import RING_LAYOUTS, Span
from csps.services.scheduling.deciding.decisions import PlannedChunk, PlannedStep, StartPlan
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId, RequestId
from csps.services.scheduling.events.slices import laid_out, outside, own, within

Histories = tuple[tuple[PlacedSlice, ...], ...]
"""Of each piece of a step: where the KV of its sequence's earlier positions lies."""


class ChunkShape(Protocol):
    """A piece, planned or launched."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def rows(self) -> tuple[PlacedSlice, ...]: ...
    @property
    def placement(self) -> tuple[PlacedSlice, ...]: ...


class StepShape(Protocol):
    """A step, planned or launched."""

    @property
    def group(self) -> tuple[InstanceId, ...]: ...
    @property
    def bounds(self) -> tuple[int, ...]: ...
    @property
    def chunks(self) -> tuple[ChunkShape, ...]: ...


def span_of(chunk: ChunkShape) -> Span:
    """The positions of a piece."""
    return Span(chunk.start, chunk.start + chunk.length)


def rows_of(step: StepShape) -> Iterator[tuple[PlacedSlice, ...]]:
    """Of each piece, who computes what; in the order of an instance's rows."""
    begin = 0
    for chunk in step.chunks:
        yield chunk.rows or tuple(_cut(step, chunk, begin))
        begin += chunk.length


def _cut(step: StepShape, chunk: ChunkShape, begin: int) -> Iterator[PlacedSlice]:
    """At the bounds.

    Args:
        begin: where the piece begins in the step.
    """
    offset = chunk.start - begin
    for instance, (start, stop) in zip(step.group, pairwise(step.bounds), strict=True):
        first, last = max(start, begin), min(stop, begin + chunk.length)
        if first < last:
            yield PlacedSlice(instance, first + offset, last + offset)


def cut_at_bounds(step: StepShape) -> bool:
    """Who computes a row keeps its KV, and the bounds say who that is."""
    return not any(chunk.rows or chunk.placement for chunk in step.chunks)


def slots_of(step: StepShape, histories: Histories) -> dict[InstanceId, int]:
    """Slots that a step needs: for what an instance computes, which is sent from there, and for
    what comes to it to be kept."""
    if cut_at_bounds(step):
        parts = zip(step.group, pairwise(step.bounds), strict=True)
        return {instance: stop - start for instance, (start, stop) in parts if start < stop}
    slots: dict[InstanceId, int] = {}
    for chunk, rows, history in zip(step.chunks, rows_of(step), histories, strict=True):
        for share in (*rows, *_coming(chunk.placement, (*rows, *history))):
            slots[share.instance] = slots.get(share.instance, 0) + share.tokens
    return slots


def _coming(
    placement: tuple[PlacedSlice, ...], there: Sequence[PlacedSlice]
) -> Iterator[PlacedSlice]:
    """What an instance is to keep and does not have."""
    having: dict[InstanceId, list[PlacedSlice]] = {}
    for it in there if placement else ():
        having.setdefault(it.instance, []).append(it)
    for share in placement:
        held = having.get(share.instance, ())
        if share not in held:
            yield from outside([share], held)


Placements = dict[RequestId, tuple[PlacedSlice, ...]]
"""Where the KV of sequences lies."""


def histories_of(
    plan: StartPlan, begun: Mapping[RequestId, tuple[PlacedSlice, ...]], *, in_place: bool
) -> Iterator[Histories]:
    """Where each step of a plan finds what is computed when it begins.

    Args:
        plan: whose steps are launched in order.
        begun: what others have computed of its requests.
        in_place: KV lies where it is decoded.
    """
    lying = dict(begun)
    placed = {it.request_id: it.slices for it in plan.decode} if in_place else {}
    for step in plan.steps:
        yield tuple([lying.get(chunk.request_id, ()) for chunk in step.chunks])
        if step is not plan.steps[-1]:
            _extend(lying, step, placed)


def stored_by(plan: StartPlan, begun: Mapping[RequestId, tuple[PlacedSlice, ...]]) -> Placements:
    """Where a plan for two gangs leaves what it computes."""
    lying = dict(begun)
    for step in plan.steps:
        _extend(lying, step, {})
    return {request: tuple(own(slices)) for request, slices in lying.items()}


def _extend(
    lying: Placements, step: PlannedStep, placed: Mapping[RequestId, tuple[PlacedSlice, ...]]
) -> None:
    """Add where a step leaves the KV of its pieces."""
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        before = lying.get(chunk.request_id, ())
        if chunk.request_id in placed:
            lying[chunk.request_id] = (*before, *within(placed[chunk.request_id], span_of(chunk)))
        elif chunk.placement:
            moved = [kv_slice for kv_slice in chunk.placement if kv_slice.start < chunk.start]
            lying[chunk.request_id] = (*outside(before, moved), *chunk.placement)
        else:
            lying[chunk.request_id] = (*before, *rows)


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
    if step.strategy not in RINGS or len(step.group) == 1 or any(it.rows for it in step.chunks):
        return step
    chunks: list[PlannedChunk] = []
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        layout = RING_LAYOUTS[name]([share.tokens for share in rows])
        laid = laid_out([share.instance for share in rows], layout, chunk.start)
        chunks.append(msgspec.structs.replace(chunk, rows=laid))
    return msgspec.structs.replace(step, chunks=tuple(chunks))
