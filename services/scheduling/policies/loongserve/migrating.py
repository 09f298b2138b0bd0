"""Which sequences move, and where to, when an instance is to be emptied (LoongServe §5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import DecodePlacement, Move
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.allocation import Migration
from csps.services.scheduling.view import SequenceView


def moves(migration: Migration, sequences: Sequence[SequenceView]) -> Iterator[Move]:
    """One for each sequence that has slots on the instance: all that it has there goes to the
    targets, as many tokens to each as the migration says.

    Args:
        migration: of all slots of an instance.
        sequences: that are decoded in the gang.
    """
    room = dict(migration.targets)
    for it in sequences:
        start, stop = it.answer_span
        answer = it.answer or (Share(it.master_id, start, stop),)
        lying = [share.instance for share in (*it.shares, *answer)]
        if migration.source not in (*lying, it.master_id):
            continue
        shares = tuple(_elsewhere(it.shares, migration.source, room))
        kept = tuple(_elsewhere(answer, migration.source, room))
        master = it.master_id
        if master == migration.source:
            master = (kept or shares)[0].instance
        placement = DecodePlacement(it.request_id, shares, master, kept)
        yield Move(sequence=it.id, placement=placement)


def _elsewhere(
    shares: Sequence[Share], source: InstanceId, room: dict[InstanceId, int]
) -> Iterator[Share]:
    """The same positions, those of an instance on others."""
    for share in shares:
        if share.instance != source:
            yield share
            continue
        span = share.span
        first = 0
        for target in list(room):
            tokens = min(span.length - first, room[target])
            if tokens:
                yield Share.of(target, span.part(slice(first, first + tokens)))
                room[target] -= tokens
                first += tokens
        assert first == span.length, "more moves than was planned"
