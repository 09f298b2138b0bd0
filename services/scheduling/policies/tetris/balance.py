"""History evenly over a group that has grown (Tetris §4.1).

Attention of a chunk to what lies before it takes as long as the instance with most of that takes.
So before a chunk, its group's members have equal parts of the history, to within a token. It does
not matter which tokens: history precedes every row of the chunk. As few tokens as possible move,
and those that are kept stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from csps.services.scheduling.commands import Share
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.shares import level_shares, tokens_on


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
    targets = _targets([held.get(it, 0) for it in group], [(free or {}).get(it) for it in group])
    surplus, wants = [], []
    for instance, target in zip(group, targets, strict=True):
        excess = held.get(instance, 0) - target
        if excess > 0:
            surplus += list(_last([it for it in history if it.instance == instance], excess))
        elif excess < 0:
            wants.append((instance, -excess))
    return tuple(_dealt(surplus, wants))


def _targets(held: Sequence[int], free: Sequence[int | None]) -> list[int]:
    """Tokens of each member: whoever holds most gets what is left over of an even division."""
    total, count = sum(held), len(held)
    limits = [total if room is None else have + room for have, room in zip(held, free, strict=True)]
    if any(limit < -(-total // count) for limit in limits):
        targets = level_shares(total, limits)
        assert targets is not None, "the history has a place already"
        return targets
    base, over = divmod(total, count)
    most = sorted(range(count), key=lambda it: (-held[it], it))
    return [base + (it in most[:over]) for it in range(count)]


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
