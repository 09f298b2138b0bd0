"""Which instances of decode groups are emptied, and why (LoongServe §4, §5.2).

A group that has lost requests may hold on fewer instances what it holds; decoding scales poorly, so
it goes on faster there (§5.4): it *shrinks*, if what its requests gain until they end, as long as
answers have taken lately, is more than the move takes, both per token of the request that gains or
loses, as in Eqs. 1-4.

And while requests wait because all instances decode, one of them is *freed* if what it could start
is spared more than the move takes: the time until its group ends, as Eq. 2 estimates it, and at
least as long as the oldest takes itself, because a group that others join does not end then. Of
several it is the one that is emptied soonest, as Eqs. 3-4 take e_min: whoever moves can neither
give way nor be emptied meanwhile. Its requests go on in the groups that take its KV, which so
become one. What they lose by larger batches is not counted, as in Eqs. 1-4: where it is, prompts
wait, and far fewer are in time (`benchmarks/results/loongserve-load-2026-11-22.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.allocation import (
    Migration,
    MoveNs,
    targets_of,
)
from csps.services.scheduling.policies.loongserve.jobs import DecodeBatch, Elastic, Prompt
from csps.services.scheduling.policies.loongserve.waiting import wait_ns

IterationNs = Callable[[int, int, int], int]
"""Of so many instances, requests, and tokens that these attend to."""


class Freed(NamedTuple):
    """An instance that is to be emptied for requests that wait."""

    instance: Elastic
    migration: Migration


class Regrouping:
    """In one round.

    Args:
        iteration_ns: what iterations take.
        move_ns: what a migration takes.
        average_decode_ns: AvgLat_d, how long finished requests were decoded.
        most_rows: requests that a master takes.
    """

    def __init__(
        self,
        iteration_ns: IterationNs,
        move_ns: MoveNs,
        *,
        average_decode_ns: int,
        most_rows: int,
    ) -> None:
        self._iteration_ns, self._move_ns = iteration_ns, move_ns
        self._average_decode_ns, self._most_rows = average_decode_ns, most_rows

    # --- nobody need wait ---

    def shrink(self, batch: DecodeBatch, movable: Collection[InstanceId]) -> Migration | None:
        """The instance without which a group is better off by most; None if there is none.

        Args:
            movable: instances that can be emptied.
        """
        dop, rows = len(batch.instances), len(batch.requests)
        if dop < 2 or rows > self._most_rows * (dop - 1):
            return None
        before_ns, after_ns = (self._batch_ns(batch, it) for it in (dop, dop - 1))
        gain = self._loss(batch, before_ns, before_ns - after_ns)
        best: tuple[float, Migration] | None = None
        for source in batch.instances:
            migration = None
            if source.id in movable:
                migration = targets_of(source, [it for it in batch.instances if it != source])
            move_ns = None if migration is None else self._move_ns(migration)
            if migration is None or move_ns is None:
                continue
            lengths = self._lengths(batch, before_ns)
            net = gain - sum([move_ns / length for length, _ in lengths])
            if net > 0 and (best is None or net > best[0]):
                best = net, migration
        return None if best is None else best[1]

    # --- for those that wait ---

    def free(
        self,
        movable: Sequence[Elastic],
        batches: Sequence[DecodeBatch],
        startable: Callable[[Elastic], Sequence[Prompt]],
        alone_ns: Callable[[Prompt], float],
    ) -> Freed | None:
        """The instance that is emptied soonest of those for which it pays; None if it does for
        none.

        Args:
            movable: instances that can be emptied.
            batches: all decode groups.
            startable: requests that an instance could prefill, once it decodes nothing.
            alone_ns: what such a prefill takes.
        """
        best: tuple[float, Freed] | None = None
        for source in movable:
            migration = targets_of(source, [it for it in movable if it != source])
            move_ns = None if migration is None else self._move_ns(migration)
            if migration is None or move_ns is None:
                continue
            prompts = startable(source)
            if not prompts:
                continue
            (batch,) = [it for it in batches if source.id in [one.id for one in it.instances]]
            spared_ns = max(alone_ns(prompts[0]), wait_ns(batch.requests, self._average_decode_ns))
            if spared_ns > move_ns and (best is None or move_ns < best[0]):
                best = move_ns, Freed(source, migration)
        return None if best is None else best[1]

    # --- requests to come to their ends ---

    def _batch_ns(self, batch: DecodeBatch, dop: int) -> int:
        return self._iteration_ns(dop, len(batch.requests), batch.context)

    def _loss(self, batch: DecodeBatch, iteration_ns: int, more_ns: int) -> float:
        """Of requests whose iterations take so much more until their ends, per token."""
        return sum([rest * more_ns / length for length, rest in self._lengths(batch, iteration_ns)])

    def _lengths(self, batch: DecodeBatch, iteration_ns: int) -> Iterator[tuple[float, float]]:
        """Of answers, and of what is left of them, in tokens, as far as anybody knows."""
        for it in batch.requests:
            rest = max(0, self._average_decode_ns - it.executed_ns) / iteration_ns
            yield it.drawn + rest, rest
