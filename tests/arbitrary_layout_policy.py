"""Policy with random layouts of rows, KV and answers, and reference counts by position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from csps.protocols.core.placement import (
    LAYOUTS,
    KvSlice,
    Span,
    bounds_of,
    contiguous,
    own,
    place,
    round_robin,
    tokens_on,
    within,
)
from csps.protocols.gang.messages import ReserveKv
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    MovePlan,
    PlannedChunk,
    PlannedStep,
    SchedulerView,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.state.state import Cached, Gang, GangPair, Request

Free = dict[InstanceId, int]
SOON_NS = 2_000_000
"""Time until a decoding sequence may move again."""


class AnyLayout:
    """Policy that plans anything allowed, and uses one instance if that finds no room."""

    name = "any_layout"
    whole_prompts = False

    def __init__(self, seed: int, *, block: int = 0, moves: bool = False) -> None:
        """Make the policy.

        Args:
            seed: of its random choices.
            block: tokens of a block if cached prefixes are reused; 0: none is.
            moves: whether it moves decoding sequences of an elastic gang all the time.
        """
        self._random, self._block, self.regroups = random.Random(seed), block, moves

    def priority(self, prompt_tokens: int, pairs: object) -> str:
        return "low"

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        most = pair.decode.largest
        return prompt_tokens <= pair.prefill.largest and prompt_tokens + output_tokens <= most

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        pair = view.pairs[0]
        gangs = (*pair.prefill.instances, *pair.decode.instances)
        free = {gang.id: gang.free_slots for gang in gangs}
        decisions: list[Decision] = []
        if self.regroups:
            decisions += self._wandering(pair.decode, free)
            if pair.decode.decoding:
                decisions.append(WakeAt(at_ns=view.now_ns + SOON_NS))
        waiting = list(view.waiting("low"))
        while waiting:
            together = [waiting.pop(0)]
            if waiting and waiting[0].cls == together[0].cls and self._random.random() < 0.3:
                together.append(waiting.pop(0))
            plan = self._plan(together, pair, free, view)
            if plan is None and len(together) > 1:
                waiting.insert(0, together.pop())
                plan = self._plan(together, pair, free, view)
            if plan is None:
                decisions.append(Blocked(request_id=together[0].id))
                break
            decisions.append(plan)
        return decisions

    def _wandering(self, gang: Gang, free: Free) -> Iterator[MovePlan]:
        """Move every decoding sequence, if there are slots for it twice."""
        for sequence in gang.decoding.values():
            if sequence.joined_ns is None or sequence.is_moving:
                continue
            start, stop = sequence.answer_span
            slices, answer = self._laid(gang, 0, start), self._laid(gang, start, stop - start)
            coming = tokens_on((*slices, *answer))
            if all(n <= free[instance] for instance, n in coming.items()):
                for instance, n in coming.items():
                    free[instance] -= n
                master = self._random.choice(gang.instances).id
                placement = DecodePlacement(sequence.request_id, slices, master, answer)
                yield MovePlan(sequence_id=sequence.id, placement=placement)

    def _plan(
        self, requests: list[Request], pair: GangPair, free: Free, view: SchedulerView
    ) -> StartPlan | None:
        for attempt in range(4):
            in_place = pair.prefill is pair.decode
            cached = self._reusable(requests, pair.prefill, view) if attempt < 3 else None
            apart = attempt < 3 and not in_place
            resident = self._reusable(requests, pair.decode, view) if apart else None
            if attempt < 3:
                plan = self._any(requests, pair, cached, cached if in_place else resident)
            else:
                plan = _on_one(requests, pair, free)
            needed = _needed(plan, requests, cached, resident, in_place=in_place)
            if all(n <= free[instance] for instance, n in needed.items()):
                for instance, n in needed.items():
                    free[instance] -= n
                return plan
        return None

    def _reusable(self, requests: list[Request], gang: Gang, view: SchedulerView) -> Cached | None:
        """Return some reusable blocks of a prompt."""
        if len(requests) > 1 or not self._block or self._random.random() < 0.2:
            return None
        cached = view.cached(requests[0], gang.id)
        if cached is None:
            return None
        tokens = self._block * self._random.randint(1, cached.tokens // self._block)
        return Cached(tokens, within(cached.slices, Span(0, tokens)), cached.taken)

    def _any(
        self,
        requests: list[Request],
        pair: GangPair,
        cached: Cached | None,
        resident: Cached | None,
    ) -> StartPlan:
        """Plan requests whose prefix is `cached` for prefill and `resident` on the decode gang."""
        in_place = pair.prefill is pair.decode
        placements = tuple(self._placement(request, pair.decode, resident) for request in requests)
        if len(requests) == 2:
            lengths = [request.prompt_tokens for request in requests]
            extents = [
                (request, 0, length) for request, length in zip(requests, lengths, strict=True)
            ]
            placed = placements if in_place else ()
            steps = [self._step(extents, pair, placed, [(), ()])]
            return StartPlan(steps=tuple(steps), decode=placements)
        (request,) = requests
        first = cached.tokens if cached else 0
        some = (cut for cut in self._some_of(request.prompt_tokens) if cut > first)
        cuts = sorted({first, request.prompt_tokens, *some})
        steps, stored = [], stored_at(cached.slices if cached else ())
        for start, stop in pairwise(cuts):
            resident = tuple(KvSlice(stored[p], p, p + 1) for p in range(start))
            extent = [(request, start, stop - start)]
            steps.append(
                self._step(extent, pair, placements if in_place else (), [resident], first)
            )
            lay(stored, steps[-1].chunks[0], steps[-1], placements[0] if in_place else None)
        return StartPlan(steps=tuple(steps), decode=placements)

    def _some_of(self, tokens: int) -> list[int]:
        return [self._random.randrange(tokens) for _ in range(self._random.randint(0, 2))]

    def _group(self, gang: Gang) -> list[InstanceId]:
        ids = [instance.id for instance in gang.instances]
        return self._random.sample(ids, self._random.randint(1, len(ids)))

    def _laid(self, gang: Gang, start: int, length: int) -> tuple[KvSlice, ...]:
        group = self._group(gang)
        layout = self._random.choice(list(LAYOUTS.values()))
        return place(group, layout(length, len(group)), start=start)

    def _placement(self, request: Request, gang: Gang, cached: Cached | None) -> DecodePlacement:
        master = self._random.choice(gang.instances).id
        prompt, total = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        first = cached.tokens if cached else 0
        slices, answer = self._laid(gang, first, prompt - first), tuple[KvSlice, ...]()
        slices = (*(cached.slices if cached else ()), *slices)
        if self._random.random() < 0.5:
            spans = round_robin(prompt, total, self._group(gang))
            answer = tuple(
                KvSlice.of(instance, span) for instance, span in spans.items() if span.length
            )
        return DecodePlacement(request.id, slices, master, answer)

    def _step(
        self,
        extents: list[tuple[Request, int, int]],
        pair: GangPair,
        in_place: Sequence[DecodePlacement],
        resident: list[tuple[KvSlice, ...]],
        first: int = 0,
    ) -> PlannedStep:
        with_rows = self._random.random() < 0.7
        chunks = []
        for request, start, length in extents:
            rows = self._laid(pair.prefill, start, length) if with_rows else ()
            placement: tuple[KvSlice, ...] = ()
            if not in_place and self._random.random() < 0.5:
                # The chunk's placement may include KV that is already there.
                since = self._random.choice([first, start])
                placement = self._laid(pair.prefill, since, start + length - since)
            chunks.append(PlannedChunk(request.id, start, length, rows, placement))
        total = sum(length for _, _, length in extents)
        involved = [kv_slice for chunk in chunks for kv_slice in (*chunk.rows, *chunk.placement)]
        chunk_of = {request.id: range(start, start + length) for request, start, length in extents}
        involved += [kv_slice for slices in resident for kv_slice in slices]
        involved += [
            kv_slice
            for placement in in_place
            for kv_slice in placement.slices
            if set(kv_slice.span.positions) & set(chunk_of[placement.request_id])
        ]
        concerned = list(dict.fromkeys(kv_slice.instance for kv_slice in involved))
        if with_rows:
            counts = tokens_on(kv_slice for chunk in chunks for kv_slice in chunk.rows)
            bounds = bounds_of([counts.get(instance, 0) for instance in concerned])
        else:
            computing = self._group(pair.prefill)[:total]
            concerned = [
                *computing,
                *(instance for instance in concerned if instance not in computing),
            ]
            cuts = [total * i // len(computing) for i in range(len(computing) + 1)]
            bounds = (*cuts, *[total] * (len(concerned) - len(computing)))
        return PlannedStep(
            group=tuple(concerned),
            bounds=tuple(bounds),
            chunks=tuple(chunks),
            strategy="ulysses",
            predicted_ns=1000,
        )


def _on_one(requests: list[Request], pair: GangPair, free: Free) -> StartPlan:
    prefill, decode = (
        max(gang.instances, key=lambda instance: free[instance.id]).id
        for gang in (pair.prefill, pair.decode)
    )
    lengths = [request.prompt_tokens for request in requests]
    step = PlannedStep(
        group=(prefill,),
        bounds=(0, sum(lengths)),
        chunks=tuple(PlannedChunk(request.id, 0, request.prompt_tokens) for request in requests),
        strategy="ulysses",
        predicted_ns=1000,
    )
    placements = (
        DecodePlacement(request.id, (KvSlice(decode, 0, request.prompt_tokens),), decode)
        for request in requests
    )
    return StartPlan(steps=(step,), decode=tuple(placements))


# --- position by position ----------------------------------------------------------------------


def rows_of(
    step: PlannedStep | PrefillStep, chunk: PlannedChunk | PrefillChunk
) -> Iterator[tuple[int, InstanceId]]:
    """Return (position, instance that computes it) of each row."""
    if chunk.rows:
        for kv_slice in chunk.rows:
            yield from (
                (p, kv_slice.instance) for p in range(kv_slice.start, kv_slice.stop, kv_slice.step)
            )
        return
    begin = 0
    for other in step.chunks:
        if other == chunk:
            break
        begin += other.length
    for member, spans in enumerate(contiguous(step.bounds)):
        for token in (p for span in spans for p in span.positions):
            if begin <= token < begin + chunk.length:
                yield token - begin + chunk.start, step.group[member]


def lay(
    stored: dict[int, InstanceId],
    chunk: PlannedChunk | PrefillChunk,
    step: PlannedStep | PrefillStep,
    in_place: DecodePlacement | ReserveKv | None,
) -> None:
    """Record where the KV of a sequence is after a step."""
    stored.update(rows_of(step, chunk))
    others = chunk.placement if in_place is None else in_place.slices
    extent = range(chunk.start, chunk.start + chunk.length)
    for kv_slice in others:
        for p in range(kv_slice.start, kv_slice.stop, kv_slice.step):
            if in_place is None or p in extent:
                stored[p] = kv_slice.instance


def stored_at(slices: Sequence[KvSlice]) -> dict[int, InstanceId]:
    """Return where each position is stored."""
    return {
        p: kv_slice.instance
        for kv_slice in slices
        for p in range(kv_slice.start, kv_slice.stop, kv_slice.step)
    }


def _needed(
    plan: StartPlan,
    requests: list[Request],
    cached: Cached | None,
    resident: Cached | None,
    *,
    in_place: bool,
) -> dict[InstanceId, int]:
    """Return the slots of positions that an instance computes or stores and does not have, and of
    reused prefixes.
    """
    needed = {**(cached.taken if cached else {}), **(resident.taken if resident else {})}
    had: dict[int, dict[int, InstanceId]] = {}
    for step in () if in_place else plan.steps:
        for chunk in step.chunks:
            before = had.setdefault(chunk.request_id, stored_at(cached.slices if cached else ()))
            rows = set(rows_of(step, chunk))
            stores = {
                (p, kv_slice.instance)
                for kv_slice in chunk.placement
                for p in range(kv_slice.start, kv_slice.stop, kv_slice.step)
            }
            for _, instance in rows | (stores - set(before.items())):
                needed[instance] = needed.get(instance, 0) + 1
            lay(before, chunk, step, None)
    output = {request.id: request.output_tokens for request in requests}
    for placement in plan.decode:
        for kv_slice in (*own(placement.slices), *placement.answer):
            tokens = len(range(kv_slice.start, kv_slice.stop, kv_slice.step))
            needed[kv_slice.instance] = needed.get(kv_slice.instance, 0) + tokens
        if not placement.answer:
            needed[placement.master] = (
                needed.get(placement.master, 0) + output[placement.request_id]
            )
    return needed
