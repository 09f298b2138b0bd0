"""A step without the pieces that were withdrawn before it was sent."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.ids import InstanceId, SequenceId
from csps.services.scheduling.shares import bounds_of, shares_of, without


def trimmed(command: RunStep, withdrawn: Container[SequenceId]) -> tuple[RunStep, list[InstanceId]]:
    """The step without these sequences; every other token stays on its instance.

    Returns:
        The step, and the instances that have nothing to compute in it any more.
    """
    kept = [index for index, it in enumerate(command.pieces) if it.sequence not in withdrawn]
    if len(kept) == len(command.pieces):
        return command, []
    shares = shares_of(_bounds_of_kept(command, withdrawn))
    members = list(zip(command.group, shares, strict=True))
    rest = msgspec.structs.replace(
        command,
        group=tuple(instance for instance, share in members if share),
        bounds=bounds_of([share for share in shares if share]),
        pieces=tuple(command.pieces[index] for index in kept),
        history=tuple(command.history[index] for index in kept),
    )
    return rest, [instance for instance, share in members if not share]


def _bounds_of_kept(command: RunStep, withdrawn: Container[SequenceId]) -> tuple[int, ...]:
    bounds, stop = command.bounds, command.bounds[-1]
    for piece in reversed(command.pieces):
        start = stop - piece.length
        if piece.sequence in withdrawn:
            bounds = without(bounds, start, stop)
        stop = start
    return bounds
