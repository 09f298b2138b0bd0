"""Who draws the rows of a decode group that has grown (LoongServe §4.2, §5.4).

From a profiled batch size on an iteration is compute-bound at its master. Then rows of it go to
others: first to masters of the group, then to its other instances, then to idle ones, as few as
keep all below that size, and as evenly as can be. What has KV stays where it lies; what is still to
be drawn is kept by the new master, as far as that has slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import DecodePlacement, Move
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.view import SequenceView


def levelled(
    mastered: Mapping[InstanceId, int], line: Sequence[InstanceId], most: int
) -> dict[InstanceId, int]:
    """How many rows each master is to have.

    Args:
        mastered: rows that each draws now; those without any may be left out.
        line: whoever may draw, the group's own before others.
        most: rows that a master takes before it is compute-bound.

    Returns:
        As it is, if nobody draws more than `most`, or if there is nobody else.
    """
    rows = sum(mastered.values())
    now = {it: mastered[it] for it in line if mastered.get(it)}
    if max(now.values(), default=0) <= most:
        return now
    masters = sorted(line, key=lambda it: -now.get(it, 0))[: max(len(now), -(-rows // most))]
    each, more = divmod(rows, len(masters))
    return {it: each + (place < more) for place, it in enumerate(masters)}


def handed_over(
    row: SequenceView, master: InstanceId, seen: int, unused: dict[InstanceId, int]
) -> Move:
    """Have another instance draw a row.

    Args:
        seen: positions from here on have no KV yet, nearly.
        unused: slots that nobody was promised, of which the row's are taken.
    """
    start, stop = row.answer_span
    answer: list[Share] = []
    for share in row.answer or (Share(row.master_id, start, stop),):
        assert share.step == 1, "an answer that is not laid out part by part"
        first = max(share.start, min(share.stop, seen))
        room = unused[master] if share.instance == row.master_id else 0
        last = min(share.stop, first + room)
        unused[master] -= last - first
        parts = ((share.instance, share.start, first), (master, first, last))
        for instance, begin, end in (*parts, (share.instance, last, share.stop)):
            if begin < end:
                answer.append(Share(instance, begin, end))
    placement = DecodePlacement(row.request_id, tuple(row.shares), master, tuple(answer))
    return Move(sequence=row.id, placement=placement)
