"""What a gang has kept of one conversation: where the KV of each of its positions lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from csps.protocols.placement import KvShare
from csps.protocols.span import Span


class KnownKv:
    """By position, the sequence that has computed it and the instance where it lies."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def prefix(self) -> int:
        """Positions from the first on that are known without a gap."""
        length = 0
        while length in self._places:
            length += 1
        return length

    def learn(self, rid: int, shares: Iterable[KvShare], stop: int) -> None:
        """A sequence has computed these, of which those before `stop` are kept."""
        for share in shares:
            if share.origin is None:
                kept = (it for it in share.span.positions if it < stop)
                self._places.update(dict.fromkeys(kept, (rid, share.instance)))

    def forget(self, rid: int, spans: Iterable[Span] = (Span(0, 2**62),)) -> None:
        """What a sequence has computed is not kept any more."""
        gone = [at for at, (origin, _) in self._places.items() if origin == rid]
        for position in gone:
            if any(Span(position, position + 1).intersection(it).length for it in spans):
                del self._places[position]

    def before(self, stop: int) -> tuple[KvShare, ...]:
        """Where the positions before one lie."""
        cuts = [0, *(p for p in range(1, stop) if self._places[p] != self._places[p - 1]), stop]
        return tuple(
            KvShare(instance=self._places[a][1], span=Span(a, b), origin=self._places[a][0])
            for a, b in pairwise(cuts)
            if a < b
        )

    def origins(self) -> set[int]:
        """Sequences that have computed some of it."""
        return {origin for origin, _ in self._places.values()}


def held_by(shares: Sequence[KvShare]) -> set[int]:
    """Instances that hold some."""
    return {share.instance for share in shares if share.span.length}
