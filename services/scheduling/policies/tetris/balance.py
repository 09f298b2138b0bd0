"""History evenly over a group that has grown (Tetris §4.1).

Attention of a chunk to what lies before it takes as long as the instance with most of that takes.
So before a chunk, its group's members have equal parts of the history, to within a token. It does
not matter which tokens: history precedes every row of the chunk. As few tokens as possible move,
and what other sequences have computed stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import PlannedStep
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.shares import level_shares, outside, own, tokens_on
from csps.services.scheduling.step_shares import rows_of


def balanced(
    steps: Sequence[PlannedStep], kept: tuple[Share, ...], free: dict[InstanceId, int]
) -> Iterator[PlannedStep]:
    """A plan's chunks, each of which moves history before it attends to it.

    Args:
        kept: what others have computed of the prompt.
        free: slots that the plan leaves; those that moves take are subtracted.
    """
    lying = kept
    for step in steps:
        (piece,), (rows,) = step.pieces, rows_of(step)
        if moves := balancing_moves(lying, step.group, free):
            for share in moves:
                free[share.instance] -= share.tokens
            piece = msgspec.structs.replace(piece, keep=(*rows, *moves))
            step = msgspec.structs.replace(step, pieces=(piece,))
        lying = (*outside(lying, moves), *moves, *rows)
        yield step


def balancing_moves(
    history: Sequence[Share],
    group: Sequence[InstanceId],
    free: Mapping[InstanceId, int] | None = None,
) -> tuple[Share, ...]:
    """What has to move, and to whom, so that all members have as much.

    Args:
        history: where the KV of earlier chunks lies; on members of the group.
        group: of the next chunk.
        free: slots of its members, which limit what they can take in; None: enough.
    """
    held = tokens_on(history)
    assert held.keys() <= set(group), "history outside of the group"
    fixed = tokens_on(it for it in history if it.origin)
    level, total = _level(group, fixed, sum(held.values()))
    targets = _targets(
        total, [held.get(it, 0) for it in level], [(free or {}).get(it) for it in level]
    )
    if targets is None:
        return ()
    target_of = {it: fixed.get(it, 0) for it in group} | dict(zip(level, targets, strict=True))
    of: dict[InstanceId, list[Share]] = {}
    for it in own(history):
        of.setdefault(it.instance, []).append(it)
    surplus, wants = [], []
    for instance, target in target_of.items():
        excess = held.get(instance, 0) - target
        if excess > 0:
            surplus += list(_last(of[instance], excess))
        elif excess < 0:
            wants.append((instance, -excess))
    return tuple(_dealt(surplus, wants))


def _level(
    group: Sequence[InstanceId], fixed: Mapping[InstanceId, int], total: int
) -> tuple[list[InstanceId], int]:
    """Members that can have equal parts, and the tokens that are theirs then: all but those who
    have more of what stays where it is."""
    level = list(group)
    while over := [it for it in level if fixed.get(it, 0) > total // len(level)]:
        level = [it for it in level if it not in over]
        total -= sum(fixed[it] for it in over)
    return level, total


def _targets(total: int, held: Sequence[int], free: Sequence[int | None]) -> list[int] | None:
    """Tokens of each member: whoever holds most gets what is left over of an even division. None
    if there are not slots enough for what those with more would give."""
    count = len(held)
    limits = [total if room is None else have + room for have, room in zip(held, free, strict=True)]
    if any(limit < -(-total // count) for limit in limits):
        return level_shares(total, limits)
    base, over = divmod(total, count)
    most = sorted(range(count), key=lambda it: (-held[it], it))
    more = set(most[:over])
    return [base + (it in more) for it in range(count)]


def _last(shares: Sequence[Share], tokens: int) -> Iterator[Share]:
    """The last tokens of what an instance holds."""
    for share in reversed(shares):
        taken = min(tokens, share.tokens)
        tokens -= taken
        if taken:
            yield _part(share, share.tokens - taken, taken, share.instance)


def _dealt(surplus: list[Share], wants: list[tuple[InstanceId, int]]) -> Iterator[Share]:
    """Hand the surplus out in order."""
    left = iter(surplus)
    share = next(left, None)
    for instance, tokens in wants:
        while tokens:
            assert share is not None, "less to give than to take"
            taken = min(tokens, share.tokens)
            yield _part(share, 0, taken, instance)
            tokens -= taken
            rest = share.tokens - taken
            share = _part(share, taken, rest, share.instance) if rest else next(left, None)


def _part(share: Share, skipped: int, tokens: int, instance: InstanceId) -> Share:
    """Some of its positions, on an instance."""
    start = share.start + skipped * share.step
    stop = start + (tokens - 1) * share.step + 1
    return Share(instance, start, stop, share.step, share.origin)
