"""Where KV stays after a prefill, and who draws the answers (LoongServe §5.4).

*Down*: decoding scales poorly, so a batch keeps the fewest instances that hold its KV. *Up*: when
memory asks for it, answers are promised slots on further instances of the gang; and from a profiled
batch size on, when decoding becomes compute-bound, on as many instances as keep every master below
it. New KV is as even as possible over the masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.jobs import Elastic, Prompt

Parts = tuple[tuple[InstanceId, int], ...]
"""Instances and tokens, in the order of positions."""


class Kept(NamedTuple):
    """Where a request's KV is to lie."""

    prompt: Parts
    answer: Parts
    """Of the tokens to come."""
    master: InstanceId


class _Holder:
    """An instance, as what was placed before has left it."""

    def __init__(self, it: Elastic, mastered: int) -> None:
        self.id, self.order = it.id, it.order
        self.unused, self.mastered = it.unused, mastered
        self.awaited = 0
        """Tokens of answers that will be drawn here."""


def keep(
    batches: Sequence[tuple[Sequence[Prompt], Sequence[Elastic]]],
    everyone: Sequence[Elastic],
    mastered: Mapping[InstanceId, int],
    *,
    most_rows: int,
) -> list[tuple[Kept, ...]]:
    """Place the KV of batches that are prefilled on disjoint groups.

    Args:
        batches: prompts and instances of each; these have slots for those.
        everyone: all instances of the gang; together they have slots for all answers as well.
        mastered: rows that each instance draws already.
        most_rows: rows from which on a master is compute-bound.

    Returns:
        Of each batch, for each prompt in its order.
    """
    holders = {it.id: _Holder(it, mastered.get(it.id, 0)) for it in everyone}
    placed = [
        _place_prompts(prompts, [holders[it.id] for it in group], most_rows)
        for prompts, group in batches
    ]
    spare = sorted(holders.values(), key=lambda it: (not it.mastered, -it.unused, it.order))
    return [tuple(_place_answer(*it, spare) for it in lines) for lines in placed]


def _place_prompts(
    prompts: Sequence[Prompt], group: Sequence[_Holder], most_rows: int
) -> list[tuple[Prompt, list[_Holder], Parts]]:
    """Of each prompt, where its KV goes, and in which order the group's instances serve it.
    Prompts cannot go elsewhere: they take slots before any answer."""
    # Instances that decode already go first, so that idle ones stay idle; then the roomiest.
    holders = sorted(group, key=lambda it: (not it.mastered, -it.unused, it.order))
    size = _size(prompts, holders, most_rows)
    lines = []
    for prompt in prompts:
        master = _master(prompt, holders[:size])
        line = [master, *(it for it in holders if it is not master)]
        lines.append((prompt, line, _fill(prompt.tokens, line)))
    return lines


def _place_answer(
    prompt: Prompt, line: list[_Holder], kept: Parts, spare: Sequence[_Holder]
) -> Kept:
    others = [it for it in spare if it not in line]
    return Kept(kept, _fill(prompt.answer, [*line, *others]), line[0].id)


def _size(prompts: Sequence[Prompt], holders: Sequence[_Holder], most_rows: int) -> int:
    """The least degree of parallelism that holds the KV, answers included where they can be, and
    whose masters stay below the threshold."""
    future = sum(it.future for it in prompts)
    rows = len(prompts)
    for size in range(1, len(holders) + 1):
        first = holders[:size]
        rows += first[-1].mastered
        if sum(it.unused for it in first) >= future and rows <= most_rows * size:
            return size
    return len(holders)


def _master(prompt: Prompt, holders: Sequence[_Holder]) -> _Holder:
    """The least busy holder that has room for all of a request, or else the roomiest."""
    roomy = [it for it in holders if it.unused - it.awaited >= prompt.future]
    by_load = sorted(roomy, key=lambda it: (it.mastered, it.awaited - it.unused, it.order))
    master = by_load[0] if by_load else max(holders, key=lambda it: (it.unused, -it.order))
    master.mastered += 1
    master.awaited += prompt.answer
    return master


def _fill(tokens: int, line: Sequence[_Holder]) -> Parts:
    """Take slots of one instance after the other."""
    parts = []
    left = tokens
    for holder in line:
        part = min(left, holder.unused)
        if part:
            parts.append((holder.id, part))
            holder.unused -= part
            left -= part
    assert not left, f"no slots for {left} of {tokens} tokens"
    return tuple(parts)
