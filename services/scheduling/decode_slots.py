"""Slots that a sequence takes where it is decoded."""

from __future__ import annotations

from typing import Protocol

from csps.protocols.placement import rest_of
from csps.services.scheduling.commands import Share
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.state import Sequence


class Placed(Protocol):
    """Where a sequence is decoded."""

    @property
    def shares(self) -> tuple[Share, ...]: ...
    @property
    def master(self) -> InstanceId: ...
    @property
    def answer(self) -> tuple[Share, ...]: ...


def decode_slots(placement: Placed, output_tokens: int) -> dict[InstanceId, int]:
    """Slots that a sequence needs where it is decoded, for tokens to come included. The master is
    named in any case, and so is who holds what it reuses: they free the sequence as well. None
    where no KV goes."""
    if not placement.shares:
        return {}
    slots = {placement.master: 0 if placement.answer else output_tokens}
    for it in placement.shares:
        slots[it.instance] = slots.get(it.instance, 0) + (0 if it.origin else it.tokens)
    for it in placement.answer:
        slots[it.instance] = slots.get(it.instance, 0) + it.tokens
    return slots


def coming_slots(sequence: Sequence, placement: Placed) -> dict[InstanceId, int]:
    """Slots for what a sequence that is decoded does not have where it is to lie."""
    lies = (*sequence.shares, *sequence.answer)
    if not sequence.answer:
        lies = (*lies, Share(sequence.master_id, *sequence.answer_span))
    coming: dict[InstanceId, int] = {}
    for share in (*placement.shares, *placement.answer):
        held = [it.span for it in lies if it.instance == share.instance]
        tokens = sum(it.length for it in rest_of(share.span, held))
        coming[share.instance] = coming.get(share.instance, 0) + tokens
    return coming
