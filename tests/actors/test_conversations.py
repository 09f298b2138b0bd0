"""Conversations whose turns begin with KV that earlier turns have left: the model's own tokens.

In each turn the placement is random, and so is how much KV is reused, so that a prompt's beginning
lies under several sequences on any instances of either gang.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gang_driver import LAYOUTS, Prompt, Request, laid_out, prefill_step, prompt_of, slices_at
from gang_threads import STRICT, ThreadCell, elastic_cell, eventually, open_steps, thread_cell
from greedy_reference import greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from piggyback_requests import piggyback, reserve_piggybacked
from property_examples import examples

from csps.actors.comm.process_group import GroupMaker
from csps.protocols.core.placement import KvSlice, Span, round_robin
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import EvictKv, RetainKv, Sampling


class KnownKv:
    """Sequence that has computed the KV of each position, and the instance where it lies."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def prefix(self) -> int:
        """Return the number of positions from the first on that are known without a gap."""
        length = 0
        while length in self._places:
            length += 1
        return length

    def learn(self, sequence_id: int, slices: Iterable[KvSlice], stop: int) -> None:
        """Note KV that has a sequence's name; positions before `stop` are retained."""
        for part in slices:
            kept = (position for position in part.span.positions if position < stop)
            self._places.update(dict.fromkeys(kept, (sequence_id, part.instance)))

    def forget(self, sequence_id: int, spans: Iterable[Span] = (Span(0, 2**62),)) -> None:
        """Forget KV that a sequence has computed, in these spans."""
        forgotten = [at for at, (source, _) in self._places.items() if source == sequence_id]
        for position in forgotten:
            if any(Span(position, position + 1).intersection(span).length for span in spans):
                del self._places[position]

    def before(self, stop: int) -> tuple[KvSlice, ...]:
        """Return where the positions before one lie."""
        cuts = [0, *(p for p in range(1, stop) if self._places[p] != self._places[p - 1]), stop]
        return tuple(
            KvSlice(self._places[a][1], a, b, source=self._places[a][0])
            for a, b in pairwise(cuts)
            if a < b
        )

    def origins(self) -> set[int]:
        """Return the sequences that have computed some of the known KV."""
        return {source for source, _ in self._places.values()}


def holders_of(slices: Sequence[KvSlice]) -> set[int]:
    """Return the instances that hold some of the KV."""
    return {part.instance for part in slices if part.span.length}


ANY_ROWS = ("ulysses", "gathered_weights")
STRATEGIES = (*ANY_ROWS, "sp_tp_flat")


@dataclass(frozen=True)
class Plan:
    """A conversation."""

    seed: int
    turns: int
    rides: bool
    """Flag that second turns are computed as piggybacked prefill."""


PLANS = st.builds(Plan, seed=st.integers(0, 10**6), turns=st.integers(2, 4), rides=st.booleans())


@dataclass
class Talk:
    """A conversation on a cell of two gangs, or of one elastic gang."""

    cell: ThreadCell
    plan: Plan
    text: Prompt
    sequence_ids: list[int]
    """Sequence ids for the turns."""
    prefilled: KnownKv = field(default_factory=KnownKv)
    decoded: KnownKv = field(default_factory=KnownKv)
    longest: int = 5
    """Most tokens of an answer."""
    rode: bool = False
    """Flag that the last turn was piggybacked."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.plan.seed)
        self.in_place = self.cell.prefill is self.cell.decode
        if self.in_place:
            self.prefilled = self.decoded

    async def go_through(self, model: Path) -> None:
        """Run all turns."""
        for sequence_id in self.sequence_ids:
            tokens = self.rng.randint(1, self.longest)
            request = self._request(sequence_id, tokens)
            if self.rng.random() < 0.15:
                await self._give_up(request)
                continue
            answer = await self._run_turn(request)
            assert answer == greedy_tokens(model, self.text.tolist(), tokens)
            await self._retain(request, len(self.text) + tokens - 1)
            new = prompt_of(self.rng.randint(1, 20), sequence_id)
            self.text = np.concatenate([self.text, np.array(answer, "<i4"), new]).astype("<i4")

    def _request(self, sequence_id: int, tokens: int) -> Request:
        length, instances = len(self.text), range(self.cell.decode.instances)
        reused = self._reused(self.decoded)
        holders = self.rng.sample(instances, self.rng.randint(1, len(instances)))
        master = self.rng.choice(instances)
        answer: tuple[KvSlice, ...] = ()
        if self.rng.random() < 0.5:
            kept = round_robin(length, length + tokens, holders)
            answer = tuple(
                KvSlice.of(instance, span) for instance, span in kept.items() if span.length
            )
        return Request(
            sequence_id=sequence_id,
            prompt=self.text,
            slices=(*self.decoded.before(reused), *self._laid_out(reused, length, holders)),
            master=master,
            answer=answer,
            sampling=Sampling(temperature=0, max_tokens=tokens),
            retain=True,
        )

    def _reused(self, known: KnownKv) -> int:
        """Return how much of the known KV is reused: the last token is always computed."""
        most = min(known.prefix, len(self.text) - 1)
        return most if self.rng.random() < 0.5 else self.rng.randint(0, most)

    def _laid_out(self, start: int, stop: int, instances: Sequence[int]) -> tuple[KvSlice, ...]:
        if self.rng.random() < 0.5:
            return laid_out(self.rng.choice(LAYOUTS), start, stop, instances)
        cuts = sorted(self.rng.randint(start, stop) for _ in instances[1:])
        return slices_at([start, *cuts, stop], instances)

    async def _run_turn(self, request: Request) -> list[int]:
        cell = self.cell
        # Without all KV before the end of a prompt, a gang computes none.
        self.rode = self.plan.rides and self.decoded.prefix > 0 and not cell.decode.window
        if self.rode:
            await reserve_piggybacked(cell, request)
            piggyback(cell, request, self.rng.randint(1, 30))
        else:
            await cell.reserve(request)
            await cell.prefilled(*self._submit(request))
            if request.chunk().decoded:
                await cell.join(request)
        await cell.until(lambda: cell.finished(request.sequence_id))
        return cell.tokens(request.sequence_id)

    async def _give_up(self, request: Request) -> None:
        """Run a turn whose prompt is cancelled."""
        cell = self.cell
        await cell.reserve(request)
        step_ids = self._submit(request)
        if self.rng.random() < 0.5:
            await cell.prefilled(*step_ids)
        cell.cancel(request.sequence_id)
        await cell.prefilled(*step_ids)
        await cell.freed(request.sequence_id)
        self.prefilled.forget(request.sequence_id)

    def _submit(self, request: Request) -> list[int]:
        """Submit the steps of the prompt, one or two at once, and return their ids."""
        length = len(self.text)
        reused = self._in_place(request) if self.in_place else self._reused(self.prefilled)
        starts = sorted({reused, self.rng.randint(reused, length - 1)})
        history, steps = self.prefilled.before(reused), []
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            step_id, computed = self._chunk(request, start, stop, history)
            steps.append(step_id)
            history = (*history, *computed)
            if self.in_place:
                history = within(request.slices, stop)
            else:
                self.prefilled.learn(request.sequence_id, computed, stop)
        return steps

    def _in_place(self, request: Request) -> int:
        """Return how much KV is reused. KV reserved elsewhere than it is known may move there."""
        known = self.decoded.before(self.decoded.prefix)
        reused = sum(kv_slice.tokens for kv_slice in request.slices if kv_slice.source)
        if self.rng.random() < 0.5:
            return reused
        while reused < min(self.decoded.prefix, len(self.text) - 1):
            next_one = Span(reused, reused + 1)
            places = [
                {
                    kv_slice.instance
                    for kv_slice in slices
                    if kv_slice.span.intersection(next_one).length
                }
                for slices in (known, request.slices)
            ]
            if places[0] == places[1]:
                break
            reused += 1
        return reused

    def _chunk(
        self, request: Request, start: int, stop: int, history: tuple[KvSlice, ...]
    ) -> tuple[int, tuple[KvSlice, ...]]:
        """Submit a step and return its id and its chunk."""
        instances = range(self.cell.prefill.instances)
        needed = holders_of(history)
        if self.in_place:
            needed |= holders_of(request.slices)
        group = list(needed | set(self.rng.sample(instances, self.rng.randint(1, len(instances)))))
        self.rng.shuffle(group)
        rows: tuple[KvSlice, ...] = ()
        cuts = [start, *sorted(self.rng.randint(start, stop) for _ in group[1:]), stop]
        computed = slices_at(cuts, group)
        if any_rows := self.rng.random() < 0.5:
            computing = self.rng.sample(group, self.rng.randint(1, len(group)))
            rows = computed = laid_out(self.rng.choice(LAYOUTS), start, stop, computing)
        chunk = request.chunk(start, stop, history=history, rows=rows)
        strategy = self.rng.choice(ANY_ROWS if any_rows else STRATEGIES)
        step = prefill_step([chunk], group, [cut - start for cut in cuts], strategy=strategy)
        return self.cell.submit(step, self.text[start:stop]), computed

    async def _retain(self, request: Request, stop: int) -> None:
        """Retain all KV that was computed, or a part of it."""
        cell, sequence_id = self.cell, request.sequence_id
        answer_holders = request.answer or (
            KvSlice(request.master, len(self.text), max(len(self.text), stop)),
        )
        kept = Span(0, stop if self.rng.random() < 0.7 else self.rng.randint(0, stop))
        if not (self.in_place or self.rode or request.chunk().decoded):
            kept = Span(0, 0)  # it was not sent
        named = [*request.slices, *answer_holders]
        before = self.decoded.origins()
        if takes_over := self.rng.random() < 0.5:
            self.decoded.learn(sequence_id, named, kept.stop)
        else:
            own = [kv_slice for kv_slice in named if not kv_slice.source]
            self.decoded.learn(sequence_id, own, kept.stop)
        left = await cell.retain_or_evict(
            cell.decode, RetainKv(sequence_id=sequence_id, start=kept.start, stop=kept.stop)
        )
        expected = sum(kv_slice.span.intersection(kept).length for kv_slice in named)
        assert left == expected * cell.decode.tp
        if takes_over:
            for source in sorted(before - self.decoded.origins()):
                assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=source)) == 0
        if not self.in_place and self.rng.random() < 0.3:
            released = Span(self.rng.randint(0, stop), stop)
            self.prefilled.forget(sequence_id, [released])
            await cell.retain_or_evict(
                cell.prefill,
                EvictKv(sequence_id=sequence_id, start=released.start, stop=released.stop),
            )
        for rank in cell.ranks:
            rank.engine.pool.slots.check_integrity()

    async def end(self) -> None:
        """Evict all retained KV."""
        gangs: list[GangClient] = [self.cell.decode]
        if not self.in_place:
            gangs.append(self.cell.prefill)
        for gang in gangs:
            for sequence_id in self.sequence_ids:
                assert await self.cell.retain_or_evict(gang, EvictKv(sequence_id=sequence_id)) == 0


def within(slices: Sequence[KvSlice], stop: int) -> tuple[KvSlice, ...]:
    """Return the part of the slices before a position."""
    cuts = (kv_slice.cut(kv_slice.span.intersection(Span(0, stop))) for kv_slice in slices)
    return tuple(cut for cut in cuts if cut.span.length)


async def hold(cell: ThreadCell, model: Path, plans: Sequence[Plan], *, longest: int = 5) -> None:
    """Run conversations beside each other and check that nothing is left.

    Args:
        longest: most tokens of an answer.
    """
    first = 1
    talks = []
    for plan in plans:
        text = prompt_of(random.Random(plan.seed).randint(2, 40), plan.seed)
        sequence_ids = list(range(first, first + plan.turns))
        talks.append(Talk(cell, plan, text, sequence_ids, longest=longest))
        first += plan.turns
    await asyncio.gather(*(talk.go_through(model) for talk in talks))
    await asyncio.gather(*(talk.end() for talk in talks))
    ranks = cell.prefill_gang.ranks
    await eventually(lambda: not any(map(open_steps, ranks)))
    cell.check_idle()


WORLDS = [
    pytest.param(1, STRICT, id="strict"),
    pytest.param(2, STRICT, id="tp2"),
    pytest.param(1, None, id="gloo", marks=pytest.mark.slow),
    pytest.param(2, None, id="gloo-tp2", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "data_group"), WORLDS)
def test_any_conversations_on_two_gangs(
    tiny_llama: Path, tp: int, data_group: GroupMaker | None
) -> None:
    @settings(max_examples=examples(2))
    @given(st.lists(PLANS, min_size=1, max_size=2), st.integers(1, 4 // tp), st.integers(1, 3))
    def any_plans(plans: list[Plan], prefill: int, decode: int) -> None:
        async def check() -> None:
            async with thread_cell(
                tiny_llama,
                prefill=prefill,
                prefill_tp=tp,
                decode=decode,
                quantum_ms=0.0,
                data_group=data_group,
            ) as cell:
                await hold(cell, tiny_llama, plans)

        asyncio.run(check())

    any_plans()


@pytest.mark.parametrize(("tp", "data_group"), WORLDS)
def test_any_conversations_in_place(
    tiny_llama: Path, tp: int, data_group: GroupMaker | None
) -> None:
    @settings(max_examples=examples(2))
    @given(st.lists(PLANS, min_size=1, max_size=2), st.integers(1, 6 // tp))
    def any_plans(plans: list[Plan], instances: int) -> None:
        async def check() -> None:
            async with elastic_cell(
                tiny_llama, instances, tp=tp, quantum_ms=0.0, data_group=data_group
            ) as cell:
                await hold(cell, tiny_llama, plans)

        asyncio.run(check())

    any_plans()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_many_conversations(tiny_llama: Path, tp: int) -> None:
    """Several conversations run beside each other."""

    @settings(max_examples=30)
    @given(st.lists(PLANS, min_size=2, max_size=4), st.integers(1, 3), st.booleans())
    def any_plans(plans: list[Plan], instances: int, in_place: bool) -> None:
        async def check() -> None:
            cells = (
                elastic_cell(tiny_llama, instances, tp=tp, quantum_ms=0.0)
                if in_place
                else thread_cell(tiny_llama, prefill=instances, prefill_tp=tp, decode=2)
            )
            async with cells as cell:
                await hold(cell, tiny_llama, plans)

        asyncio.run(check())

    any_plans()
