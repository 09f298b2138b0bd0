"""KV that simulated gangs keep beyond its sequence, by the name of who has computed it."""

from __future__ import annotations

from collections.abc import Iterable

from csps.loadgen.simulator.slots import Slots
from csps.protocols.span import Span
from csps.services.scheduling.commands import Keep, Release, Share
from csps.services.scheduling.events import Kept
from csps.services.scheduling.ids import SequenceId, index_of, instance_id
from csps.services.scheduling.shares import outside, tokens_on, within


class KeptKv:
    """What one gang has kept.

    Args:
        slots: of its instances.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lies: dict[SequenceId, tuple[Share, ...]] = {}

    @property
    def tokens(self) -> int:
        """Of everything."""
        return sum(it.tokens for shares in self._lies.values() for it in shares)

    def has(self, shares: Iterable[Share]) -> bool:
        """Whether what is reused is here."""
        return all(
            share.tokens
            == sum(
                it.span.intersection(share.span).length
                for it in self._lies.get(share.origin, ())
                if it.instance == share.instance
            )
            for share in shares
            if share.origin
        )

    def add(self, sequence: SequenceId, shares: tuple[Share, ...]) -> None:
        """More of a sequence stays, and nothing else has slots for it."""
        self._set(sequence, (*outside(self._lies.get(sequence, ()), shares), *shares))

    def obey(self, command: Keep | Release) -> list[Kept]:
        """Keep what a command says; returns what each instance of the gang has left."""
        lies = self._lies.get(command.sequence, ())
        span = Span(command.start, max(command.start, command.stop))
        if isinstance(command, Keep):
            left = within(lies, span)
        else:
            left = tuple(it.cut(rest) for it in lies for rest in it.span.without(span))
        self._set(command.sequence, left)
        instances = (instance_id(command.gang, it) for it in range(len(self._slots.free)))
        tokens = tokens_on(left)
        return [
            Kept(sequence=command.sequence, instance=it, tokens=tokens.get(it, 0))
            for it in instances
        ]

    def _set(self, sequence: SequenceId, shares: tuple[Share, ...]) -> None:
        self._slots.hold(("kept", sequence), _by_index(shares))
        self._lies[sequence] = shares
        if not shares:
            del self._lies[sequence]


def _by_index(shares: Iterable[Share]) -> dict[int, int]:
    return {index_of(it): count for it, count in tokens_on(shares).items()}
