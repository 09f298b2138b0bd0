"""What moving KV of a decode group takes: V(e_min) / bandwidth, the cost of Eq. 4, and what of it
the bandwidth does not say.

Rows move one after the other, and each goes on at its new place between two iterations: an
iteration of the group passes for every row, however little KV it has. Bytes are those that exist:
what answers were promised and have not drawn is not moved. Bandwidths are those of the scaling
information base, which `csps profile links` measures. Over a kind of link that nobody has measured
nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.allocation import Migration
from csps.services.scheduling.view import CostView, GangView, SequenceView

INSIDE, BETWEEN = "inside", "between"
"""Kinds of links: of a server, and between two of them."""


class Moving:
    """Of one gang in a round.

    Args:
        gang: whose KV would move.
        cost: times of links.
        drawn: how many tokens a sequence has drawn, nearly.
        iteration_ns: of the gang's decode groups, nearly.
    """

    def __init__(
        self,
        gang: GangView,
        cost: CostView,
        drawn: Callable[[SequenceView], int],
        iteration_ns: int,
    ) -> None:
        self._gang, self._cost, self._drawn = gang, cost, drawn
        self._iteration_ns = iteration_ns
        self._servers = {it.id: it.place.server_id for it in gang.instances}

    def ns(self, migration: Migration) -> int | None:
        """One part after the other, since all of them leave one instance; None if nobody knows."""
        slots = sum(tokens for _, tokens in migration.targets)
        stored = min(slots, self.stored.get(migration.source, 0))
        taken_ns = self._iteration_ns * self._rows.get(migration.source, 0)
        for target, tokens in migration.targets:
            size = -(-tokens * stored // slots) * self._gang.kv_bytes_per_token
            part_ns = self._cost.transfer_ns(self._kind(migration.source, target), size)
            if part_ns is None or not self._gang.kv_bytes_per_token:
                return None
            taken_ns += part_ns
        return taken_ns

    def _kind(self, source: InstanceId, target: InstanceId) -> str:
        return INSIDE if self._servers[source] == self._servers[target] else BETWEEN

    @cached_property
    def stored(self) -> dict[InstanceId, int]:
        """Tokens whose KV lies on each instance, as of now."""
        found: dict[InstanceId, int] = {}
        for sequence in self._gang.decoding.values():
            for instance, tokens in self._lies(sequence):
                found[instance] = found.get(instance, 0) + tokens
        return found

    @cached_property
    def _rows(self) -> dict[InstanceId, int]:
        """Sequences that have slots on each instance, or are drawn there."""
        found: dict[InstanceId, int] = {}
        for it in self._gang.decoding.values():
            for instance in {it.master_id, *(where for where, _ in self._lies(it))}:
                found[instance] = found.get(instance, 0) + 1
        return found

    def _lies(self, sequence: SequenceView) -> Iterator[tuple[InstanceId, int]]:
        for share in sequence.shares:
            yield share.instance, share.tokens
        start, stop = sequence.answer_span
        seen = min(stop, start + self._drawn(sequence))
        for share in sequence.answer:
            yield share.instance, max(0, min(share.stop, seen) - share.start)
        if not sequence.answer:
            yield sequence.master_id, seen - start
