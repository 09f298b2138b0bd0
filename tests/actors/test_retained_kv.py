"""Retained KV of a sequence that is over: what is sent, who holds it, and when it is freed."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gang_driver import (
    ANSWER_S,
    GangPlan,
    Prompt,
    Request,
    even_slices,
    prefill_step,
    prompt_of,
    slices_at,
)
from gang_threads import ThreadCell, elastic_cell, thread_cell, thread_gang
from greedy_reference import greedy_tokens
from rank_kv import headers_sent, positions_of

from csps.protocols.core.errors import FaultError
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import EvictKv, RequestFailed, ReserveKv, RetainKv, Sampling
from csps.protocols.sequencer.log_entries import Change

GREEDY = Sampling(temperature=0, max_tokens=4)


def shares_of(source: int, *cuts: tuple[int, int, int]) -> tuple[KvSlice, ...]:
    """Return slices from (instance, start, stop), computed by another sequence."""
    return tuple(KvSlice(i, a, b, source=source) for i, a, b in cuts)


async def first_turn(cell: ThreadCell, sequence_id: int, length: int = 40) -> Prompt:
    """Run a prompt that instance 0 of the one gang computes and instances 0 and 1 of the other
    decode, or both of one gang. All of it is retained. Return the text with which the next turn
    begins."""
    group = [0, 1] if cell.prefill is cell.decode else [0]
    request = Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=even_slices(length, [0, 1]),
        sampling=GREEDY,
        retain=True,
    )
    await cell.reserve(request)
    await cell.prefilled(cell.submit(prefill_step([request.chunk()], group), request.prompt))
    (answer,) = await cell.answer(request)
    kept = await cell.retain_or_evict(
        cell.decode, RetainKv(sequence_id=sequence_id, start=0, stop=length + 3)
    )
    assert kept == length + 3
    return np.array([*request.prompt, *answer], "<i4")


async def test_a_second_turn_sends_what_the_other_gang_lacks(tiny_llama: Path) -> None:
    """The prompt's beginning lies in both gangs, the answer in one; the computing gang retains more
    than the other."""
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        text = np.concatenate([await first_turn(cell, 1), prompt_of(9, 7)])
        length = len(text)
        await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1, start=30, stop=50))
        reused = shares_of(1, (0, 0, 20), (1, 20, 30))
        request = Request(
            sequence_id=2,
            prompt=text,
            slices=(*reused, *slices_at([30, 35, length], [0, 1])),
            master=1,
            sampling=GREEDY,
        )
        with headers_sent() as sent:
            await cell.reserve(request)
            chunk = request.chunk(40, history=shares_of(1, (0, 0, 40)))
            step_id = cell.submit(prefill_step([chunk], [0, 1], [0, 5, length - 40]), text[40:])
            assert await cell.answer(request) == [greedy_tokens(tiny_llama, text.tolist(), 4)]
        layers = cell.decode.descriptions[0].layers
        for layer in range(layers):
            assert positions_of(sent, layer) == list(range(30, length))
        await cell.prefilled(step_id)
        await cell.freed(2)
        for gang in (cell.prefill, cell.decode):
            assert await cell.retain_or_evict(gang, EvictKv(sequence_id=1)) == 0
        cell.check_idle()


async def test_history_that_lies_where_it_is_needed_does_not_move(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 2) as cell:
        text = np.concatenate([await first_turn(cell, 1), prompt_of(9, 7)])
        await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1, start=20, stop=50))
        mesh = cell.prefill_gang.ranks[0].engine.mesh
        before = list(mesh.bytes_sent)
        slices = (*shares_of(1, (0, 0, 20)), *slices_at([20, len(text)], [0]))
        request = Request(sequence_id=2, prompt=text, slices=slices, sampling=GREEDY)
        await cell.reserve(request)
        cell.submit(prefill_step([request.chunk(20, history=slices[:1])], [0]), text[20:])
        assert await cell.answer(request) == [greedy_tokens(tiny_llama, text.tolist(), 4)]
        await cell.freed(2)
        assert mesh.bytes_sent == before
        assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1)) == 0
        cell.check_idle()


async def test_kv_evicted_during_a_read_is_read_to_the_end(tiny_llama: Path) -> None:
    """No sequence gets its slots before."""
    async with elastic_cell(tiny_llama, 2, kv_slots=200) as cell:
        text = np.concatenate([await first_turn(cell, 1), prompt_of(9, 7)])
        history = shares_of(1, (0, 0, 20), (1, 20, 40))
        request = Request(
            sequence_id=2,
            prompt=text,
            slices=(*history, *slices_at([40, len(text)], [1])),
            sampling=replace(GREEDY, max_tokens=30),
        )
        await cell.reserve(request)
        assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1)) == 0
        pools = [rank.engine.pool for rank in cell.prefill_gang.ranks]
        assert [pool.slots.used for pool in pools] == [20 + 29, len(text) - 20]
        other = Request(sequence_id=3, prompt=prompt_of(100, 3), slices=even_slices(100, [0, 1]))
        await cell.reserve(other)
        cell.submit(prefill_step([other.chunk()], [0, 1]), other.prompt)
        cell.submit(prefill_step([request.chunk(40, history=history)], [0, 1]), text[40:])
        answers = await cell.answer(request, other)
        assert answers[0] == greedy_tokens(tiny_llama, text.tolist(), 30)
        assert answers[1] == greedy_tokens(tiny_llama, other.prompt.tolist(), 6)
        await cell.freed(2, 3)
        cell.check_idle()


async def test_history_that_is_not_resident_is_refused(tiny_llama: Path) -> None:
    """A reservation and a step are refused, and nothing is left of either."""
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        text = np.concatenate([await first_turn(cell, 1), prompt_of(9, 7)])
        for gang in (cell.prefill, cell.decode):
            await cell.retain_or_evict(gang, RetainKv(sequence_id=1, start=0, stop=15))
        request = Request(
            sequence_id=2,
            prompt=text,
            slices=(*shares_of(1, (0, 0, 16)), *slices_at([16, len(text)], [0])),
        )
        with pytest.raises(FaultError, match="does not have it"):
            await cell.reserve(request)
        cell.failures_expected = True
        chunk = request.chunk(16, history=shares_of(1, (0, 0, 16)))
        cell.submit(prefill_step([chunk], [0, 1]), text[16:])
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=2))
        cell.cancel(2)
        await cell.prefilled(*cell.steps)
        assert await cell.retain_or_evict(cell.prefill, EvictKv(sequence_id=1)) == 0
        assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=1)) == 0
        cell.check_idle()


async def test_retained_kv_is_freed_with_its_router(tiny_llama: Path) -> None:
    """A running sequence that was to be retained is freed as well; the next router finds
    nothing."""
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        await first_turn(cell, 1)
        running = Request(
            sequence_id=2,
            prompt=prompt_of(20, 2),
            slices=even_slices(20, [0, 1]),
            sampling=replace(GREEDY, max_tokens=2000),
            retain=True,
        )
        await cell.reserve(running)
        cell.submit(prefill_step([running.chunk()], [0]), running.prompt)
        await cell.join(running)
        await cell.until(lambda: len(cell.tokens(2)) > 2)
        await cell.disconnect()
        await cell.idle()


async def test_retained_kv_of_one_gang_outlives_the_other(tiny_llama: Path) -> None:
    """The next turn sends all that the new gang lacks."""
    async with (
        AsyncExitStack() as later,
        thread_cell(tiny_llama, prefill=2, decode=2) as cell,
    ):
        cell.failures_expected = True
        text = np.concatenate([await first_turn(cell, 1), prompt_of(9, 7)])
        await cell.decode_gang.close()
        await cell.decode.lost
        plan = GangPlan(model_dir=str(tiny_llama), role="decode", instances=1)
        cell.decode_gang = await later.enter_async_context(thread_gang(plan))
        cell.decode = await cell.attach(cell.decode_gang.members, "decode")
        await cell.connect()
        request = Request(
            sequence_id=2, prompt=text, slices=even_slices(len(text), [0]), sampling=GREEDY
        )
        await cell.reserve(request)
        chunk = request.chunk(40, history=shares_of(1, (0, 0, 40)))
        step_id = cell.submit(prefill_step([chunk], [0, 1]), text[40:])
        assert await cell.answer(request) == [greedy_tokens(tiny_llama, text.tolist(), 4)]
        await cell.prefilled(step_id)
        await cell.freed(2)
        assert await cell.retain_or_evict(cell.prefill, EvictKv(sequence_id=1)) == 0
        cell.check_idle()


async def test_a_sequence_that_leaves_while_it_is_reserved_is_forgotten(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may let it leave before the reservation is done: nothing is retained of which nothing
    is left."""
    async with elastic_cell(tiny_llama, 1) as cell:
        loop, pool = cell.ranks[0].loop, cell.ranks[0].engine.pool
        reservations = loop.decode_batch.reservations
        reserve, left = reservations.reserve, threading.Event()
        change = loop.decode_batch.change

        def leaving(request: ReserveKv, owner: int) -> None:
            reserve(request, owner)
            cell.prefill_gang.conduct(lambda sequencer: sequencer.cancel(request.sequence_id))
            assert left.wait(ANSWER_S)

        def noted(changed: Change) -> None:
            change(changed)
            left.set()

        monkeypatch.setattr(reservations, "reserve", leaving)
        monkeypatch.setattr(loop.decode_batch, "change", noted)
        request = Request(
            sequence_id=1, prompt=prompt_of(20, 1), slices=even_slices(20, [0]), retain=True
        )
        await cell.reserve(request)
        assert bool(pool.slots.tokens(1)) == (1 in loop._kv._lifetime._retained)
        cell.cancel(1)
        await cell.freed(1)
        assert not loop._kv._lifetime._retained
        cell.check_idle()


async def test_a_refused_reservation_is_not_retained(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 1, kv_slots=10) as cell:
        request = Request(
            sequence_id=1, prompt=prompt_of(20, 1), slices=even_slices(20, [0]), retain=True
        )
        with pytest.raises(FaultError, match="out of slots"):
            await cell.reserve(request)
        assert not cell.ranks[0].loop._kv._lifetime._retained
