"""Layout of a step: who computes which rows, who stores their KV, where later chunks find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from csps.protocols.attention.plan import RINGS
from csps.protocols.core.placement import RING_LAYOUTS, KvSlice, Span, outside, own, place, within
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.scheduling.deciding.decisions import PlannedChunk, PlannedStep, StartPlan
from csps.services.scheduling.events.events import InstanceId, RequestId

Histories = tuple[tuple[KvSlice, ...], ...]
"""Placement of the KV before each chunk of a step."""


AnyChunk = PlannedChunk | PrefillChunk
AnyStep = PlannedStep | PrefillStep
"""Step that is planned or launched."""


def span_of(chunk: AnyChunk) -> Span:
    """Return the positions of a chunk."""
    return Span(chunk.start, chunk.start + chunk.length)


def rows_of(step: AnyStep) -> Iterator[tuple[KvSlice, ...]]:
    """Yield who computes what of each chunk, in the order of an instance's rows."""
    begin = 0
    for chunk in step.chunks:
        yield chunk.rows or tuple(_cut(step, chunk, begin))
        begin += chunk.length


def _cut(step: AnyStep, chunk: AnyChunk, begin: int) -> Iterator[KvSlice]:
    """Cut a chunk at the step's bounds.

    Args:
        begin: where the chunk begins in the step.
    """
    offset = chunk.start - begin
    for instance, (start, stop) in zip(step.group, pairwise(step.bounds), strict=True):
        first, last = max(start, begin), min(stop, begin + chunk.length)
        if first < last:
            yield KvSlice(instance, first + offset, last + offset)


def cut_at_bounds(step: AnyStep) -> bool:
    """Return whether the bounds alone say who computes a row and stores its KV."""
    return not any(chunk.rows or chunk.placement for chunk in step.chunks)


def slots_of(step: AnyStep, histories: Sequence[tuple[KvSlice, ...]]) -> dict[InstanceId, int]:
    """Return the slots that a step needs: for what an instance computes, and for what it receives
    to store."""
    if cut_at_bounds(step):
        parts = zip(step.group, pairwise(step.bounds), strict=True)
        return {instance: stop - start for instance, (start, stop) in parts if start < stop}
    slots: dict[InstanceId, int] = {}
    chunks: Sequence[AnyChunk] = step.chunks
    for chunk, rows, history in zip(chunks, rows_of(step), histories, strict=True):
        for kv_slice in (*rows, *_coming(chunk.placement, (*rows, *history))):
            slots[kv_slice.instance] = slots.get(kv_slice.instance, 0) + kv_slice.tokens
    return slots


def _coming(placement: tuple[KvSlice, ...], there: Sequence[KvSlice]) -> Iterator[KvSlice]:
    """Yield what an instance is to store and does not have."""
    resident_by_instance: dict[InstanceId, list[KvSlice]] = {}
    for kv_slice in there if placement else ():
        resident_by_instance.setdefault(kv_slice.instance, []).append(kv_slice)
    for kv_slice in placement:
        resident = resident_by_instance.get(kv_slice.instance, ())
        if kv_slice not in resident:
            yield from outside([kv_slice], resident)


Placements = dict[RequestId, tuple[KvSlice, ...]]
"""Placement of sequences' KV, by request."""


def histories_of(
    plan: StartPlan, begun: Mapping[RequestId, tuple[KvSlice, ...]], *, in_place: bool
) -> Iterator[Histories]:
    """Yield where each step of a plan finds the KV that is computed when it begins.

    Args:
        plan: whose steps are launched in order.
        begun: KV of its requests that others have computed.
        in_place: whether KV lies where it is decoded.
    """
    placements = dict(begun)
    placed = (
        {placement.request_id: placement.slices for placement in plan.decode} if in_place else {}
    )
    for step in plan.steps:
        yield tuple([placements.get(chunk.request_id, ()) for chunk in step.chunks])
        if step is not plan.steps[-1]:
            _extend(placements, step, placed)


def stored_by(plan: StartPlan, begun: Mapping[RequestId, tuple[KvSlice, ...]]) -> Placements:
    """Return where a plan for two gangs leaves what it computes."""
    placements = dict(begun)
    for step in plan.steps:
        _extend(placements, step, {})
    return {request: tuple(own(slices)) for request, slices in placements.items()}


def _extend(
    placements: Placements, step: PlannedStep, placed: Mapping[RequestId, tuple[KvSlice, ...]]
) -> None:
    """Add where a step leaves the KV of its chunks."""
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        before = placements.get(chunk.request_id, ())
        if chunk.request_id in placed:
            placements[chunk.request_id] = (
                *before,
                *within(placed[chunk.request_id], span_of(chunk)),
            )
        elif chunk.placement:
            moved = [kv_slice for kv_slice in chunk.placement if kv_slice.start < chunk.start]
            placements[chunk.request_id] = (*outside(before, moved), *chunk.placement)
        else:
            placements[chunk.request_id] = (*before, *rows)


def in_zigzag(step: PlannedStep) -> PlannedStep:
    """Lay a ring step's rows out in zigzag, each chunk for itself (CP §3.5.1)."""
    return in_layout(step, "zigzag")


def in_layout(step: PlannedStep, name: str) -> PlannedStep:
    """Lay a ring step's rows out in one of the ring layouts; return other steps, and rows that were
    laid out, unchanged.

    Every instance has as many rows of a chunk as the bounds give it, so that plans need the same
    slots. But the rows come from both ends of the chunk, or from all of it, which shares causal
    attention evenly.
    """
    if (
        step.strategy not in RINGS
        or len(step.group) == 1
        or any(chunk.rows for chunk in step.chunks)
    ):
        return step
    chunks: list[PlannedChunk] = []
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        layout = RING_LAYOUTS[name]([kv_slice.tokens for kv_slice in rows])
        laid = place([kv_slice.instance for kv_slice in rows], layout, start=chunk.start)
        chunks.append(msgspec.structs.replace(chunk, rows=laid))
    return msgspec.structs.replace(step, chunks=tuple(chunks))
