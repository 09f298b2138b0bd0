"""Rows that decode go on elsewhere: on other instances, or with another master.

Whatever is moved when, the tokens are the model's, and every slot comes back.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from gang_driver import (
    ANSWER_S,
    LAYOUTS,
    Cell,
    Request,
    even_slices,
    laid_out,
    prefill_step,
    prompt_of,
    slices_at,
)
from gang_threads import STRICT, ThreadCell, elastic_cell, eventually, open_steps
from greedy_reference import greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from paused_ranks import PausedDecodeBatch, PausedSteps
from piggyback_requests import piggyback, reserve_piggybacked
from property_examples import examples

from csps.actors.comm.process_group import GroupMaker
from csps.actors.engine import move_run
from csps.actors.engine.kv_mover import KvMover
from csps.models.tokenizers.grammar import regex_grammar
from csps.protocols.core.placement import KvSlice, Span, round_robin
from csps.protocols.gang.messages import EvictKv, RetainKv, Sampling
from csps.protocols.gang.step_messages import MoveSequence, SequenceMoved, SequencePlacement
from csps.protocols.rpc import schema

LASTING = 1500
"""Tokens of an answer that continues however slow a busy machine is."""


def placed(request: Request) -> SequencePlacement:
    return SequencePlacement(slices=request.slices, master=request.master, answer=request.answer)


def on(request: Request, *instances: int, master: int | None = None) -> SequencePlacement:
    """Return a placement with the prompt in equal parts and the answer in turns."""
    length = len(request.prompt)
    return SequencePlacement(
        slices=even_slices(length, instances),
        master=instances[0] if master is None else master,
        answer=turns(length, request.sampling.max_tokens, instances),
    )


def turns(start: int, tokens: int, answer_holders: Sequence[int]) -> tuple[KvSlice, ...]:
    kept = round_robin(start, start + tokens, answer_holders)
    return tuple(KvSlice.of(i, span) for i, span in kept.items() if span.length)


def talking(sequence_id: int, length: int, tokens: int, *instances: int) -> Request:
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=even_slices(length, instances),
        master=instances[0],
        sampling=Sampling(temperature=0, max_tokens=tokens),
    )


async def decode(cell: Cell, request: Request) -> None:
    """Decode a sequence up to its second token at least."""
    await cell.reserve(request)
    group = sorted({kv_slice.instance for kv_slice in request.slices})
    cell.submit(prefill_step([request.chunk()], group), request.prompt)
    await cell.join(request)
    await cell.until(lambda: len(cell.tokens(request.sequence_id)) > 1)


async def check_answer(cell: Cell, model: Path, request: Request) -> None:
    await cell.until(lambda: cell.finished(request.sequence_id))
    expected = greedy_tokens(model, request.prompt.tolist(), request.sampling.max_tokens)
    assert cell.tokens(request.sequence_id) == expected
    await cell.freed(request.sequence_id)


async def check_first(cell: Cell, model: Path, request: Request, tokens: int) -> None:
    """Check the first tokens of an answer that is not awaited to its end."""
    await cell.until(lambda: len(cell.tokens(request.sequence_id)) >= tokens)
    expected = greedy_tokens(model, request.prompt.tolist(), tokens)
    assert cell.tokens(request.sequence_id)[:tokens] == expected
    cell.cancel(request.sequence_id)
    await cell.freed(request.sequence_id)


async def test_a_sequence_continues_where_its_kv_was_moved(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All KV moves, in blocks; the slots that it leaves are freed while the sequence continues."""
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 16)
    async with elastic_cell(tiny_llama, 3, quantum_ms=0.0) as cell:
        pools = [rank.engine.pool for rank in cell.prefill_gang.ranks]
        request = talking(1, 60, LASTING, 0)
        await decode(cell, request)
        cell.move(request, placed(request), on(request, 1, 2))
        await cell.until_received(3, SequenceMoved, sequence_id=1)
        reports = {moved.rank: moved for moved in cell.about(SequenceMoved, sequence_id=1)}
        assert not cell.finished(1)
        assert [pool.slots.used for pool in pools] == [0, 30 + LASTING // 2, 30 + LASTING // 2 - 1]
        token_bytes = 2 * pools[0].k[:, 0].nbytes
        assert reports[0].sent_bytes == (reports[1].tokens + reports[2].tokens) * token_bytes
        assert reports[1].tokens + reports[2].tokens > 60
        await check_first(
            cell, tiny_llama, request, reports[1].tokens + reports[2].tokens - 60 + 20
        )
        cell.check_idle()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=5, frequency_penalty=1.5),
        Sampling(temperature=1.0, seed=5, grammar=regex_grammar("([a-f][0-9]?x){1,9999}")),
    ],
    ids=["penalty", "grammar"],
)
async def test_a_sequence_gets_another_master_and_no_kv_moves(
    tiny_llama: Path, sampling: Sampling
) -> None:
    """The new master gets the tokens that the old one's sampler has counted."""
    async with elastic_cell(tiny_llama, 2) as cell:
        alone, moving = (
            Request(
                sequence_id=sequence_id,
                prompt=prompt_of(20),
                slices=even_slices(20, [0, 1]),
                sampling=replace(sampling, max_tokens=tokens),
                answer=turns(20, tokens, [0, 1]),
            )
            for sequence_id, tokens in ((1, 60), (2, LASTING))
        )
        await decode(cell, alone)
        await cell.until(lambda: cell.finished(1))
        await decode(cell, moving)
        after = SequencePlacement(slices=moving.slices, master=1, answer=moving.answer)
        cell.move(moving, placed(moving), after)
        await cell.until_received(2, SequenceMoved, sequence_id=2)
        assert not any(
            moved.tokens or moved.sent_bytes for moved in cell.about(SequenceMoved, sequence_id=2)
        )
        await cell.until(lambda: len(cell.tokens(2)) >= 60)
        assert cell.tokens(2)[:60] == cell.tokens(1)
        cell.cancel(2)
        await cell.freed(1, 2)
        cell.check_idle()


async def test_all_ranks_of_a_group_know_who_masters_a_moved_sequence(tiny_llama: Path) -> None:
    """A piggybacked prompt ties a rank to the group that has no part in the move. What is left of a
    master's budget for the prompt depends on whose sequence the other one is."""
    async with elastic_cell(tiny_llama, 3) as cell:
        moved = talking(1, 20, LASTING, 0)
        await decode(cell, moved)
        cell.move(moved, placed(moved), on(moved, 1))
        await cell.until_received(2, SequenceMoved, sequence_id=1)
        prompt = talking(2, 90, 5, 0, 1, 2)
        await reserve_piggybacked(cell, prompt)
        piggyback(cell, prompt, budget=6)
        await check_answer(cell, tiny_llama, prompt)
        await check_first(cell, tiny_llama, moved, 20)
        cell.check_idle()


async def test_others_continue_while_a_sequence_is_moved(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations run between two quanta, with the moving sequence among them."""
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 1)
    async with elastic_cell(tiny_llama, 2, quantum_ms=0.0) as cell:
        moving, other = talking(1, 20, LASTING, 0), talking(2, 20, LASTING, 0)
        # So that no more than 20 tokens move.
        moving = replace(moving, answer=turns(20, LASTING, [1]))
        await decode(cell, moving)
        await decode(cell, other)
        before = [len(cell.tokens(sequence_id)) for sequence_id in (1, 2)]
        cell.move(moving, placed(moving), on(moving, 1))
        await cell.until_received(2, SequenceMoved, sequence_id=1)
        assert not cell.finished(1)
        # As many parts as tokens and layers, and after each an iteration of those beside it.
        assert all(
            len(cell.tokens(sequence_id)) > b + 10
            for sequence_id, b in zip((1, 2), before, strict=True)
        )
        await check_first(cell, tiny_llama, moving, before[0] + 60)
        await check_first(cell, tiny_llama, other, 60)
        cell.check_idle()


async def test_a_sequence_that_ends_drops_its_move(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 1)
    async with elastic_cell(tiny_llama, 3, quantum_ms=0.0) as cell:
        cancelled, ending = talking(1, 200, 1000, 0, 1), talking(2, 200, 12, 0, 1)
        late = talking(3, 20, 3, 0)
        for request in (cancelled, ending, late):
            await decode(cell, request)
        await cell.until(lambda: cell.finished(3))
        for request in (cancelled, ending, late):
            cell.move(request, placed(request), on(request, 2, 1))
        cell.cancel(1)
        await check_answer(cell, tiny_llama, ending)
        await cell.freed(1, 3)
        ranks = cell.prefill_gang.ranks
        await eventually(lambda: not any(map(open_steps, ranks)))
        cell.check_idle()


async def test_a_waiting_move_takes_no_slots_when_its_sequence_has_left(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots belong to others from then on, although the log has not dropped the move yet: the
    leader hears of it last."""
    async with elastic_cell(tiny_llama, 2, kv_slots=64) as cell:
        delayed = PausedDecodeBatch(
            monkeypatch, cell.prefill_gang.ranks[0].loop.decode_batch, after=3
        )
        loop = cell.prefill_gang.ranks[1].loop
        pool = cell.prefill_gang.ranks[1].engine.pool
        request = talking(1, 20, 40, 0)
        await decode(cell, request)
        pool.slots.allocate(99, [Span(0, 64)])
        message = schema.pack(
            MoveSequence(
                step_id=1_000,
                sequence_id=1,
                prompt_tokens=20,
                stop=59,
                before=placed(request),
                after=on(request, 1),
                sampler=request.sampler,
            )
        )
        cell.decode.notify(1, "move", message)
        await eventually(lambda: loop.waiting == 1)
        cell.cancel(1)
        delayed.go_on.set()
        await cell.freed(1)
        pool.slots.free_sequence(99)
        loop._pending_steps.slots_freed()
        assert pool.slots.used == 0
        cell.decode.notify(0, "move", message)
        await eventually(lambda: loop.waiting == 0)
        cell.check_idle()


async def test_history_returns_after_the_step_that_moved_it_away(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence decodes elsewhere already, while the step has not ended where its KV lay."""
    over, release = threading.Event(), KvMover.release_sources

    def late(mover: KvMover) -> None:
        if any(move.rows is None for move in mover._outgoing):
            assert over.wait(ANSWER_S), "nobody let the step end"
        release(mover)

    monkeypatch.setattr(KvMover, "release_sources", late)
    async with elastic_cell(tiny_llama, 2) as cell:
        first = replace(talking(1, 40, 4, 0), retain=True)
        await decode(cell, first)
        await cell.until(lambda: cell.finished(1))
        await cell.retain_or_evict(cell.decode, RetainKv(sequence_id=1, start=0, stop=40))
        request = replace(talking(2, 50, LASTING, 1), prompt=np.append(first.prompt, prompt_of(10)))
        await cell.reserve(request)
        history = (KvSlice(0, 0, 40, source=1),)
        step = prefill_step([request.chunk(40, history=history)], [0, 1], [0, 0, 10])
        cell.submit(step, request.prompt[40:])
        await cell.join(request)
        cell.move(request, placed(request), on(request, 0))
        rank = cell.prefill_gang.ranks[0]
        await eventually(lambda: rank.loop.waiting == 1)
        assert rank.engine.pool.slots.tokens(2) == 40
        over.set()
        await cell.until_received(2, SequenceMoved, sequence_id=2)
        await check_first(cell, tiny_llama, request, len(cell.tokens(2)) + 5)
        assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1)) == 0
        cell.check_idle()


async def test_a_prompt_that_is_cancelled_while_it_scales_down_leaves_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has preempted a sequence on its instance, which then continues."""
    async with elastic_cell(tiny_llama, 3, quantum_ms=0.0) as cell:
        other = talking(1, 20, 100, 0)
        await decode(cell, other)
        steps = PausedSteps(monkeypatch)
        cancelled = talking(2, 60, 10, 1)
        await cell.reserve(cancelled)
        chunk = cancelled.chunk(rows=laid_out("striped", 0, 60, [0, 1, 2]))
        step = cell.submit(prefill_step([chunk], [0, 1, 2], strategy="ring_kv"), cancelled.prompt)
        await steps.begun()
        cell.cancel(2)
        steps.go_on.set()
        await cell.freed(2)
        await cell.prefilled(step)
        await check_answer(cell, tiny_llama, other)
        cell.check_idle()


async def test_only_whole_placements_are_moved(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 1) as cell:
        request = talking(1, 5, 4, 0)
        gap = SequencePlacement(slices=(KvSlice(0, 0, 4),), master=0)
        with pytest.raises(ValueError, match="each once"):
            cell.move(request, placed(request), gap)


@dataclass(frozen=True)
class Plan:
    """A sequence and what happens to it."""

    length: int
    tokens: int
    seed: int
    moves: int
    end: str
    """"" to the last token, or cancelled "before", "beside" or "after" its moves."""


PLANS = st.builds(
    Plan,
    length=st.integers(2, 50),
    tokens=st.integers(2, 40),
    seed=st.integers(0, 10**6),
    moves=st.integers(0, 3),
    end=st.sampled_from(["", "", "", "", "beside", "after"]),
)


class Story:
    """One sequence and its placements."""

    def __init__(self, sequence_id: int, plan: Plan, instances: int) -> None:
        self.plan, self.rng, self._instances = plan, random.Random(plan.seed), instances
        first = self._place()
        self.request = Request(
            sequence_id=sequence_id,
            prompt=prompt_of(plan.length, sequence_id),
            slices=first.slices,
            master=first.master,
            answer=first.answer,
            sampling=Sampling(temperature=0, max_tokens=plan.tokens),
        )
        self._placed = first

    def _some(self) -> list[int]:
        return self.rng.sample(range(self._instances), self.rng.randint(1, self._instances))

    def _place(self) -> SequencePlacement:
        length, holders = self.plan.length, self._some()
        if self.rng.random() < 0.5:
            slices = laid_out(self.rng.choice(LAYOUTS), 0, length, holders)
        else:
            cuts = sorted(self.rng.randint(0, length) for _ in holders[1:])
            slices = slices_at([0, *cuts, length], holders)
        answer = turns(length, self.plan.tokens, self._some()) if self.rng.random() < 0.7 else ()
        return SequencePlacement(
            slices=slices, master=self.rng.randrange(self._instances), answer=answer
        )

    async def live(self, cell: ThreadCell, model: Path) -> None:
        sequence_id, plan = self.request.sequence_id, self.plan
        await cell.reserve(self.request)
        group = sorted({kv_slice.instance for kv_slice in self.request.slices})
        cell.submit(prefill_step([self.request.chunk()], group), self.request.prompt)
        await cell.join(self.request)
        for number in range(plan.moves):
            sampled = min(number + 1, plan.tokens)
            await cell.until(lambda sampled=sampled: len(cell.tokens(sequence_id)) >= sampled)  # type: ignore[misc]
            after = self._place()
            seen = len(cell.about(SequenceMoved, sequence_id=sequence_id))
            cell.move(self.request, self._placed, after)
            ranks = len(self._placed.instances | after.instances) * cell.decode.tp
            self._placed = after
            if plan.end == "beside":
                break
            await cell.until(
                lambda seen=seen, ranks=ranks: (  # type: ignore[misc]
                    cell.finished(sequence_id)
                    or len(cell.about(SequenceMoved, sequence_id=sequence_id)) >= seen + ranks
                )
            )
            if cell.finished(sequence_id):
                break  # nothing of a row that has ended is moved
        if plan.end:
            cell.cancel(sequence_id)
            await cell.freed(sequence_id)
        else:
            await check_answer(cell, model, self.request)


async def check(
    model: Path, plans: list[Plan], instances: int, tp: int, data_group: GroupMaker | None
) -> None:
    async with elastic_cell(model, instances, tp=tp, quantum_ms=0.0, data_group=data_group) as cell:
        stories = [Story(sequence_id, plan, instances) for sequence_id, plan in enumerate(plans, 1)]
        await asyncio.gather(*(story.live(cell, model) for story in stories))
        ranks = cell.prefill_gang.ranks
        await eventually(lambda: not any(map(open_steps, ranks)))
        cell.check_idle()


@pytest.mark.parametrize("data_group", [STRICT, None], ids=["strict", "gloo"])
@pytest.mark.parametrize("tp", [1, 2])
def test_any_moves_give_the_tokens_of_the_model(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tp: int, data_group: GroupMaker | None
) -> None:
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 7)

    @settings(max_examples=examples(3))
    @given(st.lists(PLANS, min_size=1, max_size=4), st.integers(2, 4 // tp))
    def any_plans(plans: list[Plan], instances: int) -> None:
        asyncio.run(check(tiny_llama, plans, instances, tp, data_group))

    any_plans()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tp", [1, 2])
def test_many_moves_on_six_ranks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 5)

    @settings(max_examples=examples(25))
    @given(st.lists(PLANS, min_size=1, max_size=8), st.integers(2, 6 // tp))
    def any_plans(plans: list[Plan], instances: int) -> None:
        asyncio.run(check(tiny_llama, plans, instances, tp, STRICT))

    any_plans()
