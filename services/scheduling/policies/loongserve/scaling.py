"""Where KV stays after a prefill, and who draws the answers (LoongServe §5.4).

*Down*: decoding scales poorly, so a batch keeps the fewest instances that hold its KV. *Up*: when
memory asks for it, answers are promised slots on further instances of the gang; and from a profiled
batch size on, when decoding becomes compute-bound, on as many instances as keep every master below
it. New KV is as even as possible over the masters.

From batches and where their KV is kept to what is launched.

Who draws the rows of a decode group that has grown (LoongServe §4.2, §5.4).

From a profiled batch size on an iteration is compute-bound at its master. Then rows of it go to
others: first to masters of the group, then to its other instances, then to idle ones, as few as
keep all below that size, and as evenly as can be. What has KV stays where it lies; what is still to
be drawn is kept by the new master, as far as that has slots.

Which instances of decode groups are emptied, and why (LoongServe §4, §5.2).

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

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

from csps.protocols.core.placement import striped
from csps.services.scheduling.deciding.decisions import (
    DecodePlacement,
    MovePlan,
    PlannedChunk,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.slices import laid_out, tokens_on
from csps.services.scheduling.policies.loongserve.allocation import Migration, MoveNs, targets_of
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Elastic,
    PendingPrompt,
    wait_ns,
)
from csps.services.scheduling.state.state import Sequence

Parts = tuple[tuple[InstanceId, int], ...]
"""Instances and tokens, in the order of positions."""


class KvPlacement(NamedTuple):
    """Where a request's KV is to lie."""

    prompt: Parts
    answer: Parts
    """Of the tokens to come."""
    master: InstanceId


class _Holder:
    """An instance, as what was placed before has left it."""

    def __init__(self, it: Elastic, mastered: int) -> None:
        self.id, self.order = it.id, it.order
        self.unused, self.mastered = it.unused, mastered
        self.awaited = 0
        """Tokens of answers that will be drawn here."""


def place_kv(
    batches: Many[tuple[Many[PendingPrompt], Many[Elastic]]],
    everyone: Many[Elastic],
    mastered: Mapping[InstanceId, int],
    *,
    most_rows: int,
) -> list[tuple[KvPlacement, ...]]:
    """Place the KV of batches that are prefilled on disjoint groups.

    Args:
        batches: prompts and instances of each; these have slots for those.
        everyone: all instances of the gang; together they have slots for all answers as well.
        mastered: rows that each instance draws already.
        most_rows: rows from which on a master is compute-bound.

    Returns:
        Of each batch, for each prompt in its order.
    """
    holders = {it.id: _Holder(it, mastered.get(it.id, 0)) for it in everyone}
    placed = [
        _place_prompts(prompts, [holders[instance.id] for instance in group], most_rows)
        for prompts, group in batches
    ]
    spare = sorted(holders.values(), key=lambda it: (not it.mastered, -it.unused, it.order))
    return [tuple(_place_answer(*line, spare) for line in lines) for lines in placed]


def _place_prompts(
    prompts: Many[PendingPrompt], group: Many[_Holder], most_rows: int
) -> list[tuple[PendingPrompt, list[_Holder], Parts]]:
    """Of each prompt, where its KV goes, and in which order the group's instances serve it.
    Prompts cannot go elsewhere: they take slots before any answer."""
    # Instances that decode already go first, so that idle ones stay idle; then the roomiest.
    holders = sorted(group, key=lambda it: (not it.mastered, -it.unused, it.order))
    size = _size(prompts, holders, most_rows)
    lines = []
    for prompt in prompts:
        master = _master(prompt, holders[:size])
        line = [master, *(holder for holder in holders if holder is not master)]
        lines.append((prompt, line, _fill(prompt.tokens, line)))
    return lines


def _place_answer(
    prompt: PendingPrompt, line: list[_Holder], kept: Parts, spare: Many[_Holder]
) -> KvPlacement:
    others = [it for it in spare if it not in line]
    return KvPlacement(kept, _fill(prompt.answer, [*line, *others]), line[0].id)


def _size(prompts: Many[PendingPrompt], holders: Many[_Holder], most_rows: int) -> int:
    """The least degree of parallelism that holds the KV, answers included where they can be, and
    whose masters stay below the threshold."""
    future = sum(prompt.future for prompt in prompts)
    rows = len(prompts)
    for size in range(1, len(holders) + 1):
        first = holders[:size]
        rows += first[-1].mastered
        if sum(it.unused for it in first) >= future and rows <= most_rows * size:
            return size
    return len(holders)


def _master(prompt: PendingPrompt, holders: Many[_Holder]) -> _Holder:
    """The least busy holder that has room for all of a request, or else the roomiest."""
    roomy = [holder for holder in holders if holder.unused - holder.awaited >= prompt.future]
    by_load = sorted(roomy, key=lambda it: (it.mastered, it.awaited - it.unused, it.order))
    master = by_load[0] if by_load else max(holders, key=lambda it: (it.unused, -it.order))
    master.mastered += 1
    master.awaited += prompt.answer
    return master


def _fill(tokens: int, line: Many[_Holder]) -> Parts:
    """Take slots of one instance after the other."""
    parts = []
    left = tokens
    for holder in line:
        part = min(left, holder.unused)
        if part:
            parts.append((holder.id, part))
            holder.unused -= part
            left -= part
    assert not left, f"no slots for {left} of {tokens} tokens"
    return tuple(parts)


ALONE, RING = "ulysses", "ring_kv"
"""How one instance attends, and how several do: KV comes by all members of a ring, so that those of
the smaller group keep what the plan gives them (§4.1)."""


def start(
    prompts: Many[PendingPrompt],
    group: Many[Elastic],
    kept: Many[KvPlacement],
    predicted_ns: int,
) -> StartPlan:
    """One prefill iteration, and the scale-down within it.

    Args:
        prompts: of the batch.
        group: its instances.
        kept: of each prompt, where its KV is to lie.
        predicted_ns: what the iteration takes.
    """
    members = [it.id for it in sorted(group, key=lambda it: it.order)]
    ring = len(members) > 1
    chunks = tuple(
        PlannedChunk(
            prompt.id,
            0,
            prompt.tokens,
            rows=laid_out(members, striped(prompt.tokens, len(members))) if ring else (),
        )
        for prompt in prompts
    )
    counts = dict.fromkeys(members, 0)
    for chunk in chunks:
        for instance, tokens in tokens_on(chunk.rows).items():
            counts[instance] += tokens
    bounds = (
        (0, *accumulate(counts.values())) if ring else (0, sum(prompt.tokens for prompt in prompts))
    )
    step = PlannedStep(
        group=tuple(members),
        bounds=bounds,
        chunks=chunks,
        strategy=RING if ring else ALONE,
        predicted_ns=predicted_ns,
    )
    decode = tuple(_placement(it, where) for it, where in zip(prompts, kept, strict=True))
    return StartPlan(steps=(step,), decode=decode)


def _placement(prompt: PendingPrompt, kept: KvPlacement) -> DecodePlacement:
    shares = tuple(_laid(kept.prompt, 0))
    return DecodePlacement(
        prompt.id, shares, kept.master, answer=tuple(_laid(kept.answer, prompt.tokens))
    )


def _laid(parts: Many[tuple[InstanceId, int]], start: int) -> list[PlacedSlice]:
    """Positions from `start` on, part by part."""
    shares = []
    for instance, tokens in parts:
        shares.append(PlacedSlice(instance, start, start + tokens))
        start += tokens
    return shares


def levelled(
    mastered: Mapping[InstanceId, int], line: Many[InstanceId], most: int
) -> dict[InstanceId, int]:
    """How many rows each master is to have.

    Args:
        mastered: rows that each draws now; those without any may be left out.
        line: whoever may draw, the group's own before others.
        most: rows that a master takes before it is compute-bound.

    Returns:
        As it is, if nobody draws more than `most`, or if there is nobody else.
    """
    rows = sum(mastered.values())
    now = {it: mastered[it] for it in line if mastered.get(it)}
    if max(now.values(), default=0) <= most:
        return now
    masters = sorted(line, key=lambda it: -now.get(it, 0))[: max(len(now), -(-rows // most))]
    each, more = divmod(rows, len(masters))
    return {it: each + (place < more) for place, it in enumerate(masters)}


def hand_over(
    row: Sequence, master: InstanceId, seen: int, unused: dict[InstanceId, int]
) -> MovePlan:
    """Have another instance draw a row.

    Args:
        seen: positions from here on have no KV yet, nearly.
        unused: slots that nobody was promised, of which the row's are taken.
    """
    start, stop = row.answer_span
    answer: list[PlacedSlice] = []
    for share in row.answer or (PlacedSlice(row.master_id, start, stop),):
        assert share.step == 1, "an answer that is not laid out part by part"
        first = max(share.start, min(share.stop, seen))
        room = unused[master] if share.instance == row.master_id else 0
        last = min(share.stop, first + room)
        unused[master] -= last - first
        parts = ((share.instance, share.start, first), (master, first, last))
        for instance, begin, end in (*parts, (share.instance, last, share.stop)):
            if begin < end:
                answer.append(PlacedSlice(instance, begin, end))
    placement = DecodePlacement(row.request_id, tuple(row.slices), master, tuple(answer))
    return MovePlan(sequence_id=row.id, placement=placement)


IterationNs = Callable[[int, int, int], int]
"""Of so many instances, requests, and tokens that these attend to."""


class FreedInstance(NamedTuple):
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
        self._average_decode_ns, self._most_sequences = average_decode_ns, most_rows

    # --- nobody need wait ---

    def shrink(self, batch: DecodeGroup, movable: Collection[InstanceId]) -> Migration | None:
        """The instance without which a group is better off by most; None if there is none.

        Args:
            movable: instances that can be emptied.
        """
        dop, rows = len(batch.instances), len(batch.requests)
        if dop < 2 or rows > self._most_sequences * (dop - 1):
            return None
        before_ns, after_ns = (self._batch_ns(batch, it) for it in (dop, dop - 1))
        gain = self._loss(batch, before_ns, before_ns - after_ns)
        best: tuple[float, Migration] | None = None
        for source in batch.instances:
            migration = None
            if source.id in movable:
                migration = targets_of(
                    source, [instance for instance in batch.instances if instance != source]
                )
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
        movable: Many[Elastic],
        batches: Many[DecodeGroup],
        startable: Callable[[Elastic], Many[PendingPrompt]],
        alone_ns: Callable[[PendingPrompt], float],
    ) -> FreedInstance | None:
        """The instance that is emptied soonest of those for which it pays; None if it does for
        none.

        Args:
            movable: instances that can be emptied.
            batches: all decode groups.
            startable: requests that an instance could prefill, once it decodes nothing.
            alone_ns: what such a prefill takes.
        """
        best: tuple[float, FreedInstance] | None = None
        for source in movable:
            migration = targets_of(source, [it for it in movable if it != source])
            move_ns = None if migration is None else self._move_ns(migration)
            if migration is None or move_ns is None:
                continue
            prompts = startable(source)
            if not prompts:
                continue
            (batch,) = [it for it in batches if source.id in [one.id for one in it.instances]]
            saved_ns = max(alone_ns(prompts[0]), wait_ns(batch.requests, self._average_decode_ns))
            if saved_ns > move_ns and (best is None or move_ns < best[0]):
                best = move_ns, FreedInstance(source, migration)
        return None if best is None else best[1]

    # --- requests to come to their ends ---

    def _batch_ns(self, batch: DecodeGroup, dop: int) -> int:
        return self._iteration_ns(dop, len(batch.requests), batch.context)

    def _loss(self, batch: DecodeGroup, iteration_ns: int, more_ns: int) -> float:
        """Of requests whose iterations take so much more until their ends, per token."""
        return sum([rest * more_ns / length for length, rest in self._lengths(batch, iteration_ns)])

    def _lengths(self, batch: DecodeGroup, iteration_ns: int) -> Iterator[tuple[float, float]]:
        """Of answers, and of what is left of them, in tokens, as far as anybody knows."""
        for request in batch.requests:
            rest = max(0, self._average_decode_ns - request.executed_ns) / iteration_ns
            yield request.generated_tokens + rest, rest
