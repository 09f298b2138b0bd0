"""When groups of an elastic gang grow, shrink, merge or give way, as the router sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from csps.protocols.gang_client import GangClient
from csps.protocols.messages import PrefillDone
from csps.services.router.moves import LiveMove
from csps.services.router.sequences import LiveSequence, Sequences
from csps.services.scheduling.commands import RunStep, Share
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.sequences import Placed
from csps.services.telemetry.elastic_metrics import ElasticEvent


def concerned(placed: Placed) -> frozenset[InstanceId]:
    """Who takes part in decoding a sequence."""
    named = (it.instance for it in (*placed.shares, *placed.answer))
    return frozenset((placed.master, *named))


def decode_groups(sequences: Iterable[LiveSequence]) -> list[set[InstanceId]]:
    """Instances that are iterated together: those that sequences have in common."""
    groups: list[set[InstanceId]] = []
    for sequence in sequences:
        members = set(concerned(sequence.placed))
        apart = [it for it in groups if it.isdisjoint(members)]
        groups = [*apart, members.union(*(it for it in groups if it not in apart))]
    return groups


class ElasticEvents:
    """Notes them where requests are traced and counted.

    Args:
        note: takes what has happened to a request.
    """

    def __init__(
        self, sequences: Sequences, note: Callable[[LiveSequence, ElasticEvent], None]
    ) -> None:
        self._sequences, self._note = sequences, note

    def _joined(self, gang: GangClient) -> list[LiveSequence]:
        """Those that a gang decodes now."""
        known = self._sequences.by_id.values()
        return [it for it in known if it.joined and not it.over and it.decode is gang]

    def joins(self, sequence: LiveSequence) -> None:
        """A sequence is decoded from now on, on an elastic gang."""
        now, members = time.monotonic(), concerned(sequence.placed)
        holders = {it.instance for it in sequence.placed.shares}
        if not members <= holders:
            self._note(sequence, ElasticEvent(kind="scale_up", began=now, ended=now))
        groups = decode_groups(self._joined(sequence.decode))
        if sum(not it.isdisjoint(members) for it in groups) > 1:
            self._note(sequence, ElasticEvent(kind="merge", began=now, ended=now))

    def decoded_on(self, gang: GangClient, group: Collection[InstanceId]) -> bool:
        """Whether some of these instances decode."""
        return any(not concerned(it.placed).isdisjoint(group) for it in self._joined(gang))

    def step_done(
        self,
        command: RunStep,
        sequences: Sequence[LiveSequence],
        ranks: Sequence[PrefillDone],
        *,
        took_s: float,
        preempting: bool,
    ) -> None:
        """A step of an elastic gang is over.

        Args:
            sequences: of its pieces; the first one's trace is told.
            took_s: on the instance that was longest at it.
            preempting: some of its instances decoded when it was launched.
        """
        ended = time.monotonic()
        began = ended - took_s
        if {it.instance for it in _keepers(sequences)} < set(command.group):
            event = ElasticEvent(
                kind="scale_down",
                began=began,
                ended=ended,
                seconds=max((it.placing_s for it in ranks), default=0.0),
                sent_bytes=sum(it.placed_bytes for it in ranks),
                tokens=sum(piece.length for piece in command.pieces),
            )
            self._note(sequences[0], event)
        if preempting:
            event = ElasticEvent(kind="preempt", began=began, ended=ended, seconds=took_s)
            self._note(sequences[0], event)

    def moved(self, sequence: LiveSequence, move: LiveMove) -> None:
        """A row goes on where it was moved to."""
        event = ElasticEvent(
            kind="migrate" if move.tokens else "remaster",
            began=move.began,
            ended=time.monotonic(),
            seconds=move.seconds,
            sent_bytes=move.sent_bytes,
            tokens=move.tokens,
        )
        self._note(sequence, event)


def _keepers(sequences: Iterable[LiveSequence]) -> Iterator[Share]:
    return (share for sequence in sequences for share in sequence.placed.shares)
