"""LoongServe places KV after a prefill, chooses masters, and empties instances (§4, §5.4).

`place_kv` scales *down*: decoding scales poorly, so a batch decodes on the fewest instances that
hold its KV. It scales *up* for slots of answers, and from a profiled batch size on for more
masters. `start` turns batches and placements into plans.

`levelled` and `hand_over` give a decode group more masters, as few and as even as possible. KV
stays in place; a new master stores the tokens to come, as far as it has slots.

`Regrouping` empties instances: to *shrink* a group that decodes faster on fewer instances, and to
*free* one for waiting requests, if that gains more than the migration takes (Eqs. 1-4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

from csps.protocols.core.placement import KvSlice, place, striped, tokens_on
from csps.services.scheduling.deciding.decisions import (
    DecodePlacement,
    MovePlan,
    PlannedChunk,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.loongserve.allocation import Migration, MoveNs, targets_of
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Elastic,
    PendingPrompt,
    wait_ns,
)
from csps.services.scheduling.state.state import Sequence

TokenCounts = tuple[tuple[InstanceId, int], ...]
"""Instances and numbers of tokens, in the order of positions."""


class KvPlacement(NamedTuple):
    """Placement of a request's KV."""

    prompt: TokenCounts
    answer: TokenCounts
    """Holders of the tokens to be sampled."""
    master: InstanceId


class _Holder:
    """An instance as it will be after earlier placements of the round."""

    def __init__(self, instance: Elastic, mastered: int) -> None:
        self.id, self.order = instance.id, instance.order
        self.unused, self.mastered = instance.unused, mastered
        self.awaited = 0
        """Tokens of answers that will be sampled here."""


def place_kv(
    batches: Many[tuple[Many[PendingPrompt], Many[Elastic]]],
    everyone: Many[Elastic],
    mastered: Mapping[InstanceId, int],
    *,
    most_sequences: int,
) -> list[tuple[KvPlacement, ...]]:
    """Place the KV of batches that are prefilled on disjoint groups.

    Args:
        batches: prompts of each batch, and instances with slots for them.
        everyone: all instances of the gang; together they have slots for all answers as well.
        mastered: number of sequences that each instance samples already.
        most_sequences: number of sequences from which on a master is compute-bound.

    Returns:
        The placements of each batch, in the order of its prompts.
    """
    holders = {
        instance.id: _Holder(instance, mastered.get(instance.id, 0)) for instance in everyone
    }
    placed = [
        _place_prompts(prompts, [holders[instance.id] for instance in group], most_sequences)
        for prompts, group in batches
    ]
    spare = sorted(holders.values(), key=_decoding_first)
    return [tuple(_place_answer(*prompt, spare) for prompt in of_batch) for of_batch in placed]


def _decoding_first(holder: _Holder) -> tuple[bool, int, int]:
    """Order instances: decoding ones, so that idle ones stay idle; then by free slots."""
    return not holder.mastered, -holder.unused, holder.order


def _place_prompts(
    prompts: Many[PendingPrompt], group: Many[_Holder], most_sequences: int
) -> list[tuple[PendingPrompt, list[_Holder], TokenCounts]]:
    """Place the KV of a batch's prompts.

    Returns:
        Each prompt with the group's instances in its order of use, the master first, and the
        placement of its KV.
    """
    # Prompts take slots before any answer, because they cannot go elsewhere.
    ordered = sorted(group, key=_decoding_first)
    size = _size(prompts, ordered, most_sequences)
    placed = []
    for prompt in prompts:
        master = _master(prompt, ordered[:size])
        holders = [master, *(holder for holder in ordered if holder is not master)]
        placed.append((prompt, holders, _fill(prompt.tokens, holders)))
    return placed


def _place_answer(
    prompt: PendingPrompt, holders: list[_Holder], placed: TokenCounts, spare: Many[_Holder]
) -> KvPlacement:
    """Place the KV of an answer, on the group first."""
    others = [holder for holder in spare if holder not in holders]
    return KvPlacement(placed, _fill(prompt.answer, [*holders, *others]), holders[0].id)


def _size(prompts: Many[PendingPrompt], holders: Many[_Holder], most_sequences: int) -> int:
    """Return the fewest holders with slots for all KV and few enough sequences per master.

    All holders if no smaller number has slots for the answers.
    """
    future = sum(prompt.future for prompt in prompts)
    sequences = len(prompts)
    for size in range(1, len(holders) + 1):
        first = holders[:size]
        sequences += first[-1].mastered
        if sum(holder.unused for holder in first) >= future and sequences <= most_sequences * size:
            return size
    return len(holders)


def _master(prompt: PendingPrompt, holders: Many[_Holder]) -> _Holder:
    """Choose the least busy holder with slots for all of a request, or the one with most slots."""
    roomy = [holder for holder in holders if holder.unused - holder.awaited >= prompt.future]
    if roomy:
        master = min(
            roomy,
            key=lambda holder: (holder.mastered, holder.awaited - holder.unused, holder.order),
        )
    else:
        master = max(holders, key=lambda holder: (holder.unused, -holder.order))
    master.mastered += 1
    master.awaited += prompt.answer
    return master


def _fill(tokens: int, holders: Many[_Holder]) -> TokenCounts:
    """Take slots of one instance after the other."""
    counts = []
    left = tokens
    for holder in holders:
        count = min(left, holder.unused)
        if count:
            counts.append((holder.id, count))
            holder.unused -= count
            left -= count
    assert not left, f"no slots for {left} of {tokens} tokens"
    return tuple(counts)


ALONE, RING = "ulysses", "ring_kv"
"""Strategies of one instance, and of several. KV passes every member of a ring, so the holders of
the smaller group store theirs without extra messages (§4.1)."""


def start(
    prompts: Many[PendingPrompt],
    group: Many[Elastic],
    placements: Many[KvPlacement],
    predicted_ns: int,
) -> StartPlan:
    """Plan one prefill iteration, and the scale-down within it.

    Args:
        prompts: prompts of the batch.
        group: its instances.
        placements: placement of each prompt's KV.
        predicted_ns: predicted time of the iteration.
    """
    members = [instance.id for instance in sorted(group, key=lambda instance: instance.order)]
    ring = len(members) > 1
    chunks = tuple(
        PlannedChunk(
            prompt.id,
            0,
            prompt.tokens,
            rows=place(members, striped(prompt.tokens, len(members))) if ring else (),
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
    decode = tuple(
        _placement(prompt, placement) for prompt, placement in zip(prompts, placements, strict=True)
    )
    return StartPlan(steps=(step,), decode=decode)


def _placement(prompt: PendingPrompt, placement: KvPlacement) -> DecodePlacement:
    slices = tuple(_consecutive(placement.prompt, 0))
    answer = tuple(_consecutive(placement.answer, prompt.tokens))
    return DecodePlacement(prompt.id, slices, placement.master, answer=answer)


def _consecutive(counts: Many[tuple[InstanceId, int]], start: int) -> list[KvSlice]:
    """Return consecutive slices from position `start` on."""
    slices = []
    for instance, tokens in counts:
        slices.append(KvSlice(instance, start, start + tokens))
        start += tokens
    return slices


def levelled(
    mastered: Mapping[InstanceId, int], instances: Many[InstanceId], most: int
) -> dict[InstanceId, int]:
    """Return the number of sequences that each master is to sample.

    Args:
        mastered: number of sequences that each samples now; 0 may be left out.
        instances: instances that may sample, the group's own before others.
        most: most sequences of a master before it is compute-bound.

    Returns:
        The present numbers, if no master has more than `most`, or if there is no other instance.
    """
    sequences = sum(mastered.values())
    now = {instance: mastered[instance] for instance in instances if mastered.get(instance)}
    if max(now.values(), default=0) <= most:
        return now
    masters = sorted(instances, key=lambda instance: -now.get(instance, 0))
    masters = masters[: max(len(now), -(-sequences // most))]
    each, more = divmod(sequences, len(masters))
    return {master: each + (place < more) for place, master in enumerate(masters)}


def hand_over(
    sequence: Sequence, master: InstanceId, seen: int, unused: dict[InstanceId, int]
) -> MovePlan:
    """Let another instance sample a sequence.

    Args:
        seen: estimated position from which on there is no KV yet.
        unused: slots that are not reserved; those of the sequence are taken from them.
    """
    start, stop = sequence.answer_span
    answer: list[KvSlice] = []
    for kv_slice in sequence.answer or (KvSlice(sequence.master_id, start, stop),):
        assert kv_slice.step == 1, (
            f"sequence {sequence.id}: a slice of its answer is not consecutive: {kv_slice}"
        )
        first = max(kv_slice.start, min(kv_slice.stop, seen))
        room = unused[master] if kv_slice.instance == sequence.master_id else 0
        last = min(kv_slice.stop, first + room)
        unused[master] -= last - first
        for instance, begin, end in (
            (kv_slice.instance, kv_slice.start, first),
            (master, first, last),
            (kv_slice.instance, last, kv_slice.stop),
        ):
            if begin < end:
                answer.append(KvSlice(instance, begin, end))
    placement = DecodePlacement(sequence.request_id, tuple(sequence.slices), master, tuple(answer))
    return MovePlan(sequence_id=sequence.id, placement=placement)


IterationNs = Callable[[int, int, int], int]
"""Predicted iteration by instances, requests, and tokens that these attend to."""


class FreedInstance(NamedTuple):
    """An instance to be emptied for waiting requests."""

    instance: Elastic
    migration: Migration


class Regrouping:
    """The choice of instances to empty in one round.

    Args:
        iteration_ns: predicts an iteration.
        move_ns: predicts a migration.
        average_decode_ns: AvgLat_d, the average decode time of finished requests.
        most_sequences: most sequences of a master.
    """

    def __init__(
        self,
        iteration_ns: IterationNs,
        move_ns: MoveNs,
        *,
        average_decode_ns: int,
        most_sequences: int,
    ) -> None:
        self._iteration_ns, self._move_ns = iteration_ns, move_ns
        self._average_decode_ns, self._most_sequences = average_decode_ns, most_sequences

    # --- faster decoding ---

    def shrink(self, batch: DecodeGroup, movable: Collection[InstanceId]) -> Migration | None:
        """Return the migration that empties the instance whose loss speeds up a group most.

        Args:
            movable: instances that can be emptied.

        Returns:
            None if no migration pays off.
        """
        dop, sequences = len(batch.instances), len(batch.requests)
        if dop < 2 or sequences > self._most_sequences * (dop - 1):
            return None
        before_ns, after_ns = self._batch_ns(batch, dop), self._batch_ns(batch, dop - 1)
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

    # --- waiting requests ---

    def free(
        self,
        movable: Many[Elastic],
        batches: Many[DecodeGroup],
        startable: Callable[[Elastic], Many[PendingPrompt]],
        alone_ns: Callable[[PendingPrompt], float],
    ) -> FreedInstance | None:
        """Return the instance that is emptied soonest of those for which it pays off.

        Args:
            movable: instances that can be emptied.
            batches: all decode groups.
            startable: returns the requests that an instance could prefill once it is empty.
            alone_ns: predicts such a prefill.

        Returns:
            None if it pays off for no instance.
        """
        best: tuple[float, FreedInstance] | None = None
        for source in movable:
            migration = targets_of(source, [other for other in movable if other != source])
            move_ns = None if migration is None else self._move_ns(migration)
            if migration is None or move_ns is None:
                continue
            prompts = startable(source)
            if not prompts:
                continue
            (batch,) = [
                batch
                for batch in batches
                if source.id in [instance.id for instance in batch.instances]
            ]
            # A group that others join ends later than Eq. 2 estimates, so the prompt saves at least
            # its own time. The loss of the merged groups is not counted: where it was, far fewer
            # prompts were in time (benchmarks/results/loongserve-load-2026-11-22.md).
            saved_ns = max(alone_ns(prompts[0]), wait_ns(batch.requests, self._average_decode_ns))
            if saved_ns > move_ns and (best is None or move_ns < best[0]):
                best = move_ns, FreedInstance(source, migration)
        return None if best is None else best[1]

    # --- losses and gains ---

    def _batch_ns(self, batch: DecodeGroup, dop: int) -> int:
        return self._iteration_ns(dop, len(batch.requests), batch.context)

    def _loss(self, batch: DecodeGroup, iteration_ns: int, more_ns: int) -> float:
        """Return the loss of requests whose iterations take `more_ns` longer, per token."""
        return sum([rest * more_ns / length for length, rest in self._lengths(batch, iteration_ns)])

    def _lengths(self, batch: DecodeGroup, iteration_ns: int) -> Iterator[tuple[float, float]]:
        """Yield the estimated length of each answer, and the rest of it, in tokens."""
        for request in batch.requests:
            rest = max(0, self._average_decode_ns - request.executed_ns) / iteration_ns
            yield request.generated_tokens + rest, rest
