"""A step without the pieces that were withdrawn before it was sent."""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from csps.services.scheduling.commands import RunStep, Share
from csps.services.scheduling.ids import InstanceId, SequenceId
from csps.services.scheduling.shares import bounds_of, tokens_on
from csps.services.scheduling.step_shares import chunk_of, rows_of


def trimmed(
    command: RunStep,
    withdrawn: Container[SequenceId],
    *,
    placed: dict[SequenceId, tuple[Share, ...]],
) -> tuple[RunStep, list[InstanceId]]:
    """The step without these sequences; every other token stays on its instance.

    Args:
        placed: where the KV of sequences is to lie that are decoded in place.

    Returns:
        The step, and the instances that have nothing to do with it any more.
    """
    kept = [index for index, it in enumerate(command.pieces) if it.sequence not in withdrawn]
    if len(kept) == len(command.pieces):
        return command, []
    all_rows = list(rows_of(command))
    rows = tokens_on(share for index in kept for share in all_rows[index])
    concerned = {**rows, **dict.fromkeys(_holders(command, kept, placed))}
    group = tuple(it for it in command.group if it in concerned)
    rest = msgspec.structs.replace(
        command,
        group=group,
        bounds=bounds_of([rows.get(it, 0) for it in group]),
        pieces=tuple(command.pieces[index] for index in kept),
        history=tuple(command.history[index] for index in kept),
    )
    return rest, [it for it in command.group if it not in concerned]


def _holders(
    command: RunStep, kept: list[int], placed: dict[SequenceId, tuple[Share, ...]]
) -> Iterable[InstanceId]:
    """Who has or gets KV of the pieces that are left."""
    for index in kept:
        piece = command.pieces[index]
        chunk = chunk_of(piece)
        for share in (*command.history[index], *piece.keep):
            yield share.instance
        for share in placed.get(piece.sequence, ()):
            if share.span.intersection(chunk).length:
                yield share.instance
