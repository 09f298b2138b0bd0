"""When groups of an elastic gang grow, shrink, merge or give way, as the router sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from csps.protocols.gang_client import GangClient
from csps.protocols.messages import PrefillDone
from csps.services.router.decode_groups import DecodeGroups, concerned
from csps.services.router.moves import LiveMove
from csps.services.router.sequences import LiveSequence
from csps.services.scheduling.commands import RunStep, Share
from csps.services.scheduling.ids import InstanceId
from csps.services.telemetry.elastic_metrics import ElasticEvent, Kind


class ElasticEvents:
    """Notes them where requests are traced and counted.

    Args:
        groups: instances that are iterated together; they follow what has moved from here.
        note: takes what has happened to a request.
    """

    def __init__(
        self, groups: DecodeGroups, note: Callable[[LiveSequence, ElasticEvent], None]
    ) -> None:
        self._groups, self._note = groups, note

    def joins(self, sequence: LiveSequence) -> None:
        """A sequence is about to be decoded, on an elastic gang."""
        now, members = time.monotonic(), concerned(sequence.placed)
        holders = {it.instance for it in sequence.placed.shares}
        if not members <= holders:
            self._note(sequence, ElasticEvent(kind="scale_up", began=now, ended=now))
        if len(self._groups.touching(sequence.decode, members)) > 1:
            self._note(sequence, ElasticEvent(kind="merge", began=now, ended=now))

    def decoded_on(self, gang: GangClient, group: Collection[InstanceId]) -> bool:
        """Whether some of these instances decode."""
        return bool(self._groups.touching(gang, group))

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
        """A row goes on where it was moved to. A move may be several events, each of which has all
        that it cost."""
        ended = time.monotonic()
        for kind in self._kinds(sequence.decode, move):
            event = ElasticEvent(
                kind=kind,
                began=move.began,
                ended=ended,
                seconds=move.seconds,
                sent_bytes=move.sent_bytes,
                tokens=move.tokens,
            )
            self._note(sequence, event)

    def _kinds(self, gang: GangClient, move: LiveMove) -> Iterator[Kind]:
        found = self._groups.move(gang, concerned(move.before), concerned(move.command))
        if move.tokens:
            yield "migrate"
        elif move.before.master != move.command.master:
            yield "remaster"
        if found.met:
            yield "merge"
        if found.left:
            yield "scale_down"
        if found.new:
            yield "scale_up"


def _keepers(sequences: Iterable[LiveSequence]) -> Iterator[Share]:
    return (share for sequence in sequences for share in sequence.placed.shares)
