"""One gang that prefills and decodes: any sequence of steps gives the tokens of the model.

What is computed stays where it was computed, or moves to where it is to lie, and is decoded there.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gang_driver import (
    GREEDY,
    LAYOUTS,
    Request,
    even_slices,
    laid_out,
    prefill_step,
    prompt_of,
    slices_at,
)
from gang_threads import STRICT, ThreadCell, elastic_cell, eventually, open_steps, thread_cell
from greedy_reference import greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from paused_ranks import PausedDecodeBatch
from piggyback_requests import piggyback, reserve_piggybacked
from property_examples import examples
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.comm.process_group import GroupMaker
from csps.actors.engine import decode_batch
from csps.actors.engine.iteration import IterationBatch
from csps.actors.engine.kv_mover import KvMover
from csps.kernels import cpu_attention
from csps.kernels.arguments import SlotRuns
from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import KvSlice, Span, round_robin
from csps.protocols.gang.messages import RankKvReceived, Sampling
from csps.protocols.sequencer.decode_batches import GRANTS

STRATEGIES = ("ulysses", "gathered_weights", "ring_kv", "ring_q", "sp_tp_flat")
ANY_ROWS = ("ulysses", "gathered_weights", "ring_kv", "ring_q")


def greedy(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens)


async def test_kv_is_adopted_where_it_was_computed(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 3) as cell:
        request = Request(
            sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [2, 0]), master=1
        )
        pools = [rank.engine.pool for rank in cell.prefill_gang.ranks]
        await cell.reserve(request)
        taken = [pool.slots.used for pool in pools]
        cell.submit(prefill_step([request.chunk()], [2, 0]), request.prompt)
        await cell.until_received(2, RankKvReceived, sequence_id=1)
        assert [pool.slots.used for pool in pools] == taken == [20, GREEDY.max_tokens - 1, 20]
        assert await cell.answer(request) == [greedy_tokens(tiny_llama, request.prompt.tolist(), 6)]
        assert not any(cell.prefill_gang.ranks[0].engine.mesh.bytes_sent[3:])
        await cell.freed(1)
        cell.check_idle()


async def _striped_and_stored_by_one(cell: ThreadCell) -> Request:
    """Run a prompt that three instances compute in a ring and the second stores, up to its first
    token."""
    request = Request(sequence_id=1, prompt=prompt_of(48), slices=even_slices(48, [1]), master=1)
    await cell.reserve(request)
    chunk = request.chunk(rows=laid_out("striped", 0, 48, [0, 1, 2]))
    step = prefill_step([chunk], [0, 1, 2], strategy="ring_kv")
    await cell.prefilled(cell.submit(step, request.prompt))
    return request


async def test_the_first_token_sees_rows_where_they_were_computed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder has every third of its pool's slots for its own rows. Attending to slots one by
    one took longer than all other work of scaling down."""
    runs_of_calls: list[int] = []
    attend = cpu_attention.decode_attention

    def counted(
        q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
    ) -> tuple[Tensor, Tensor]:
        runs_of_calls.append(len(runs.runs))
        return attend(q_rhd, k_shd, v_shd, runs, scale)

    monkeypatch.setattr(cpu_attention, "decode_attention", counted)
    async with elastic_cell(tiny_llama, 3) as cell:
        request = await _striped_and_stored_by_one(cell)
        assert runs_of_calls == [1, 1, 1]
        assert await cell.answer(request) == [greedy_tokens(tiny_llama, request.prompt.tolist(), 6)]


async def test_a_step_that_ends_leaves_alone_what_a_move_has_taken(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another instance stores rows than computed them, their KV may be on its way back before
    the step is over on the computing instance."""
    release = KvMover.release_sources

    def late(mover: KvMover) -> None:
        if mover._phase == "placing" and mover._group.member == 2:
            mover._pool.slots.allocate(1, [Span(2, 48, 3)])
        release(mover)

    monkeypatch.setattr(KvMover, "release_sources", late)
    async with elastic_cell(tiny_llama, 3) as cell:
        await _striped_and_stored_by_one(cell)
        slots = [rank.engine.pool.slots for rank in cell.prefill_gang.ranks]
        assert slots[0].tokens(1) == 0
        assert slots[2].tokens(1) == 16
        cell.cancel(1)
        await cell.freed(1)
        cell.check_idle()


async def test_a_decode_batch_continues_beside_a_long_step(tiny_llama: Path) -> None:
    """On the same ranks, an iteration between two parts."""
    async with elastic_cell(tiny_llama, 2, quantum_ms=0.0) as cell:
        talking = Request(
            sequence_id=1,
            prompt=prompt_of(20),
            slices=even_slices(20, [0, 1]),
            sampling=greedy(1500),
        )
        long = Request(sequence_id=2, prompt=prompt_of(800, 2), slices=even_slices(800, [0, 1]))
        for request in (talking, long):
            await cell.reserve(request)
        cell.submit(prefill_step([talking.chunk()], [0, 1]), talking.prompt)
        await cell.join(talking)
        await cell.until(lambda: len(cell.tokens(1)) > 3)
        before = len(cell.tokens(1))
        cell.submit(prefill_step([long.chunk()], [0, 1]), long.prompt)
        await cell.until(lambda: cell.tokens(2))
        assert len(cell.tokens(1)) > before + 2
        assert await cell.answer(long) == [greedy_tokens(tiny_llama, long.prompt.tolist(), 6)]
        cell.cancel(1)
        await cell.freed(1, 2)
        cell.check_idle()


async def test_instances_that_need_nothing_of_each_other_stay_together(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a gang that only decodes: an instance that runs ahead would wait for the other as soon as
    both have a sequence in common."""
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        quick, slow = (rank.loop.decode_batch for rank in cell.decode_gang.ranks)
        resident = PausedDecodeBatch(monkeypatch, slow)
        request = Request(
            sequence_id=1, prompt=prompt_of(20), slices=even_slices(20, [0]), sampling=greedy(200)
        )
        await reserve_piggybacked(cell, request)
        piggyback(cell, request, 20)
        await eventually(lambda: quick.iterations == GRANTS)
        resident.go_on.set()
        await cell.until(lambda: cell.finished(1))
        assert cell.tokens(1) == greedy_tokens(tiny_llama, request.prompt.tolist(), 200)
        await cell.freed(1)


async def test_sequences_of_different_instances_do_not_wait_for_each_other(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one decode group is blocked, the other samples its whole answer; both then go on
    together with a sequence that joins them."""
    async with elastic_cell(tiny_llama, 2) as cell:
        _, slow = (rank.loop.decode_batch for rank in cell.prefill_gang.ranks)
        resident = PausedDecodeBatch(monkeypatch, slow)
        on = [
            Request(
                sequence_id=sequence_id,
                prompt=prompt_of(20, sequence_id),
                slices=even_slices(20, instances),
                master=instances[0],
                sampling=greedy(40),
            )
            for sequence_id, instances in ((1, [0]), (2, [1]), (3, [1, 0]))
        ]
        steps = []
        for request in on:
            await cell.reserve(request)
            group = sorted({s.instance for s in request.slices})
            steps.append(cell.submit(prefill_step([request.chunk()], group), request.prompt))
        await cell.prefilled(*steps)  # one of them needs the instance that is to stand still
        await cell.join(on[1])
        assert await cell.answer(on[0]) == [greedy_tokens(tiny_llama, on[0].prompt.tolist(), 40)]
        assert len(cell.tokens(2)) == 1, "the other one has not begun"
        await cell.join(on[2])
        resident.go_on.set()
        for request in on[1:]:
            await cell.until(lambda request=request: cell.finished(request.sequence_id))  # type: ignore[misc]
            assert cell.tokens(request.sequence_id) == greedy_tokens(
                tiny_llama, request.prompt.tolist(), 40
            )
        await cell.freed(1, 2, 3)
        cell.check_idle()


def alternating(start: int, tokens: int, answer_holders: Sequence[int]) -> tuple[KvSlice, ...]:
    kept = round_robin(start, start + tokens, answer_holders)
    return tuple(KvSlice.of(i, span) for i, span in kept.items() if span.length)


async def test_kv_holders_of_an_answer_take_turns(tiny_llama: Path) -> None:
    """The master may be none of the holders; their slices are even to within a token."""
    async with elastic_cell(tiny_llama, 3) as cell:
        pools = [rank.engine.pool for rank in cell.prefill_gang.ranks]
        requests = [
            Request(
                sequence_id=sequence_id,
                prompt=prompt_of(11 * sequence_id, sequence_id),
                slices=laid_out("striped", 0, 11 * sequence_id, [0, 1]),
                master=sequence_id % 3,
                sampling=greedy(12),
                answer=alternating(11 * sequence_id, 12, [2, 1]),
            )
            for sequence_id in (1, 2, 3)
        ]
        for request in requests:
            await cell.reserve(request)
            cell.submit(prefill_step([request.chunk()], [0, 1]), request.prompt)
        assert [pool.slots.used for pool in pools] == [6 + 11 + 17, 5 + 11 + 16 + 3 * 5, 3 * 6]
        for sequence, answer in zip(requests, await cell.answer(*requests), strict=True):
            assert answer == greedy_tokens(tiny_llama, sequence.prompt.tolist(), 12)
        await cell.freed(1, 2, 3)
        cell.check_idle()


async def test_an_answer_without_a_kv_holder_is_refused(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 1) as cell:
        gap = (KvSlice.of(0, Span(5, 9, 2)),)
        request = Request(
            sequence_id=1, prompt=prompt_of(5), slices=even_slices(5, [0]), answer=gap
        )
        with pytest.raises(ProtocolError, match="no instance stores some positions"):
            await cell.reserve(request)
        cell.check_idle()


@dataclass(frozen=True)
class Plan:
    """A request, in which way its prompt is computed, and whether anybody waits for the answer."""

    length: int
    tokens: int
    chunks: tuple[int, ...]
    """Percentages at which the prompt is cut; none makes it piggybacked."""
    seed: int
    high_priority: bool
    cancelled: bool


PLANS = st.builds(
    Plan,
    length=st.integers(3, 60),
    tokens=st.integers(1, 5),
    chunks=st.lists(st.integers(0, 100), max_size=3).map(tuple),
    seed=st.integers(0, 10**6),
    high_priority=st.booleans(),
    cancelled=st.sampled_from([False, False, False, True]),
)


class Story:
    """One request's steps, on groups of their own."""

    def __init__(self, sequence_id: int, plan: Plan, instances: int) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        holders = self.rng.sample(range(instances), self.rng.randint(1, instances))
        self.request = Request(
            sequence_id=sequence_id,
            prompt=prompt_of(plan.length, sequence_id),
            slices=self._slices(holders),
            master=self.rng.randrange(instances),
            sampling=greedy(plan.tokens),
            answer=self._alternating_slices(instances),
        )
        self._instances = instances

    def _slices(self, holders: list[int]) -> tuple[KvSlice, ...]:
        length = self.plan.length
        if self.rng.random() < 0.5:
            return laid_out(self.rng.choice(LAYOUTS), 0, length, holders)
        cuts = sorted(self.rng.randint(0, length) for _ in holders[1:])
        return slices_at([0, *cuts, length], holders)

    def _alternating_slices(self, instances: int) -> tuple[KvSlice, ...]:
        """Return the holders of the answer, in turn."""
        if self.rng.random() < 0.5:
            return ()
        answer_holders = self.rng.sample(range(instances), self.rng.randint(1, instances))
        return alternating(self.plan.length, self.plan.tokens, answer_holders)

    async def begin(self, cell: ThreadCell) -> None:
        """Send all of it at once."""
        if not self.plan.chunks:
            await reserve_piggybacked(cell, self.request)
            piggyback(cell, self.request, self.rng.randint(1, 30))
            return
        await cell.reserve(self.request)
        inner = {cut * self.plan.length // 100 for cut in self.plan.chunks}
        bounds = sorted({0, self.plan.length, *inner})
        for start, stop in itertools.pairwise(bounds):
            self._chunk(cell, start, stop)

    def _chunk(self, cell: ThreadCell, start: int, stop: int) -> None:
        history = self._within(0, start)
        needed = {kv_slice.instance for kv_slice in (*history, *self._within(start, stop))}
        group = list(needed | set(self.rng.sample(range(self._instances), 1)))
        self.rng.shuffle(group)
        cuts = sorted(self.rng.randint(0, stop - start) for _ in group[1:])
        rows: tuple[KvSlice, ...] = ()
        strategies: tuple[str, ...] = STRATEGIES
        if self.rng.random() < 0.5:
            computing = self.rng.sample(group, self.rng.randint(1, len(group)))
            rows = laid_out(self.rng.choice(LAYOUTS), start, stop, computing)
            strategies = ANY_ROWS
        chunk = self.request.chunk(start, stop, history=tuple(history), rows=rows)
        step = prefill_step(
            [chunk],
            group,
            [0, *cuts, stop - start],
            strategy=self.rng.choice(strategies),
            high_priority=self.plan.high_priority,
        )
        cell.submit(step, self.request.prompt[start:stop])

    def _within(self, start: int, stop: int) -> list[KvSlice]:
        span = Span(start=start, stop=stop)
        cuts = [
            KvSlice.of(kv_slice.instance, kv_slice.span.intersection(span))
            for kv_slice in self.slices
        ]
        return [cut for cut in cuts if cut.span.length]

    @property
    def slices(self) -> Sequence[KvSlice]:
        return self.request.slices

    async def end(self, cell: ThreadCell, model: Path) -> None:
        """Check that the answer is right, or was cancelled."""
        sequence_id = self.request.sequence_id
        if self.plan.cancelled:
            cell.cancel(sequence_id)
        else:
            if self.plan.chunks:
                await cell.join(self.request)
            await cell.until(lambda: cell.finished(sequence_id))
            expected = greedy_tokens(model, self.request.prompt.tolist(), self.plan.tokens)
            assert cell.tokens(sequence_id) == expected
        await cell.freed(sequence_id)


async def check(
    model: Path, plans: list[Plan], instances: int, tp: int, data_group: GroupMaker | None
) -> None:
    async with elastic_cell(model, instances, tp=tp, quantum_ms=0.0, data_group=data_group) as cell:
        stories = [Story(sequence_id, plan, instances) for sequence_id, plan in enumerate(plans, 1)]
        for story in stories:
            await story.begin(cell)
        await asyncio.gather(*(story.end(cell, model) for story in stories))
        await cell.prefilled(*cell.steps)
        ranks = cell.prefill_gang.ranks
        await eventually(lambda: not any(map(open_steps, ranks)))
        cell.check_idle()


@pytest.mark.parametrize("data_group", [STRICT, None], ids=["strict", "gloo"])
@pytest.mark.parametrize("tp", [1, 2])
def test_any_steps_give_the_tokens_of_the_model(
    tiny_llama: Path, tp: int, data_group: GroupMaker | None
) -> None:
    @settings(max_examples=examples(5))
    @given(st.lists(PLANS, min_size=1, max_size=5), st.integers(1, 6 // tp))
    def any_plans(plans: list[Plan], instances: int) -> None:
        asyncio.run(check(tiny_llama, plans, instances, tp, data_group))

    any_plans()


async def test_a_sequence_that_has_ended_on_one_instance_is_not_computed_again(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant goes on for several iterations after a stop token, of which other ranks would have
    to learn first."""
    computed: list[int] = []
    forward = decode_batch.forward

    def recorded(engine: Engine, batch: IterationBatch, *more: Any) -> Tensor:
        computed.extend(sequence.sequence_id for sequence in batch.decoding)
        return forward(engine, batch, *more)

    monkeypatch.setattr(decode_batch, "forward", recorded)
    async with elastic_cell(tiny_llama, 1) as cell:
        prompts = [prompt_of(20, number) for number in range(2)]
        answers = [greedy_tokens(tiny_llama, prompt.tolist(), 60) for prompt in prompts]
        stop = next(at for at in range(5, 60) if answers[0][at] not in answers[0][:at])
        samplings = [
            Sampling(temperature=0, max_tokens=60, stop_token_ids=(answers[0][stop],)),
            greedy(60),
        ]
        on = [
            Request(
                sequence_id=1 + number,
                prompt=prompts[number],
                slices=even_slices(20, [0]),
                sampling=samplings[number],
            )
            for number in range(2)
        ]
        got = await cell.generate(*on, group=[0])
        assert got == [answers[0][: stop + 1], answers[1]]
        await cell.freed(1, 2)
        cell.check_idle()
    # Prefill samples the first token, and the last one is never embedded.
    assert computed.count(1) == stop
    assert computed.count(2) == 59
