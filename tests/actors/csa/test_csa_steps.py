"""Whole prefill steps with sparse attention on real gangs, streamed to a decode gang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gang_driver import ANSWER_S, Cell, Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from greedy_reference import greedy_tokens
from tiny_checkpoints import make_checkpoint
from uniform_plan import uniform_plan

from csps.actors.attention.csa.running_attention import OwnRows
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.gang.messages import PrefillDone

LOCATIONS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
LAYERS = 4
"""Most layers of any checkpoint here, so that plans reach all layers."""


def plan(members: int, *, levels: int, drop_ratio: float, micro: int = 2) -> CsaPlan:
    return uniform_plan(
        LOCATIONS[:members],
        levels=levels,
        layers=LAYERS,
        drop_ratio=drop_ratio,
        micro_partitions=micro,
    )


async def prefill(cell: Cell, requests: Sequence[Request], csa: CsaPlan) -> None:
    for request in requests:
        await cell.reserve(request)
    chunks = [request.chunk() for request in requests]
    group = range(len(csa.locations))
    step = prefill_step(chunks, group, strategy="csa", csa=csa)
    cell.submit(step, np.concatenate([request.prompt for request in requests]))


@pytest.mark.parametrize(
    ("members", "tp", "levels"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 3), (3, 1, 2), (2, 2, 2)]
)
async def test_tokens_are_transformers_when_nothing_is_dropped(
    tiny_llama: Path, members: int, tp: int, levels: int
) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((67, 1, 30))]
    requests = [
        Request(sequence_id=sequence_id, prompt=prompt, slices=even_slices(len(prompt), [0]))
        for sequence_id, prompt in enumerate(prompts)
    ]
    async with thread_cell(tiny_llama, prefill=members, prefill_tp=tp, decode=1) as cell:
        await prefill(cell, requests, plan(members, levels=levels, drop_ratio=0.0))
        answers = await cell.answer(*requests)
        assert answers == [greedy_tokens(tiny_llama, prompt.tolist(), 6) for prompt in prompts]
        await cell.freed(*range(len(requests)))
        await cell.prefilled(*cell.steps)
        cell.check_idle()


async def test_dropping_leaves_the_kv_cache_whole(tmp_path: Path) -> None:
    """Decode finds all tokens of the prompt, and frees all slots."""
    # Neither of the tiny model's two layers drops anything.
    model = make_checkpoint(tmp_path, num_hidden_layers=LAYERS)
    request = Request(sequence_id=1, prompt=prompt_of(80), slices=even_slices(80, [0, 1]))
    # Plain gloo measures how long exchanges took.
    async with thread_cell(model, prefill=4, decode=2, data_group=None) as cell:
        await prefill(cell, [request], plan(4, levels=3, drop_ratio=0.5))
        (answer,) = await cell.answer(request)
        assert len(answer) == request.sampling.max_tokens
        await cell.freed(1)
        await cell.prefilled(*cell.steps)
        cell.check_idle()
        assert all(done.exchange_s > 0 for done in cell.about(PrefillDone))


async def test_steps_of_several_plans_follow_each_other(tiny_llama: Path) -> None:
    requests = [
        Request(
            sequence_id=sequence_id,
            prompt=prompt_of(40 + sequence_id, sequence_id),
            slices=even_slices(40 + sequence_id, [0]),
        )
        for sequence_id in range(4)
    ]
    async with thread_cell(tiny_llama, prefill=4, decode=1) as cell:
        for request in requests:
            levels = 1 + request.sequence_id % 3
            await prefill(cell, [request], plan(4, levels=levels, drop_ratio=0.0))
        answers = await cell.answer(*requests)
        assert answers == [
            greedy_tokens(tiny_llama, request.prompt.tolist(), 6) for request in requests
        ]
        await cell.freed(*range(4))
        await cell.prefilled(*cell.steps)
        cell.check_idle()


class Doors:
    """Doors before the second and the seventh micro-partition of a layer's own rows.

    A step may run two quanta ahead, so there are some yield points between the doors.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.second, self.seventh = threading.Event(), threading.Event()
        self.ranks_waiting = threading.Semaphore(0)
        attend_next = OwnRows.attend_next

        def attend_behind_door(own: OwnRows) -> None:
            if own.done in (1, 6):
                door = self.second if own.done == 1 else self.seventh
                self.ranks_waiting.release()
                assert door.wait(ANSWER_S), "the door stayed closed"
            attend_next(own)

        patch.setattr(OwnRows, "attend_next", attend_behind_door)


async def test_high_priority_steps_of_one_rank_run_inside_a_layer(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = Doors(monkeypatch)
    lengths = (80, 5, 6)
    long, *high_priority = (
        Request(
            sequence_id=sequence_id,
            prompt=prompt_of(length, sequence_id),
            slices=even_slices(length, [0]),
        )
        for sequence_id, length in enumerate(lengths)
    )
    async with thread_cell(tiny_llama, prefill=2, decode=1, quantum_ms=0.0) as cell:
        await prefill(cell, [long], plan(2, levels=2, drop_ratio=0.0, micro=8))
        for _ in (0, 1):
            assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        for rank, request in enumerate(high_priority):
            await cell.reserve(request)
            cell.submit(prefill_step([request.chunk()], [rank], high_priority=True), request.prompt)
        await cell.prefill.stats()  # all have arrived
        doors.second.set()
        await cell.until(
            lambda: all(cell.samples(request.sequence_id) for request in high_priority)
        )
        doors.seventh.set()
        answers = await cell.answer(long, *high_priority)
        assert answers == [
            greedy_tokens(tiny_llama, request.prompt.tolist(), 6)
            for request in (long, *high_priority)
        ]
        await cell.freed(*range(len(lengths)))
        await cell.prefilled(*cell.steps)
        cell.check_idle()
        (step_id, *_) = cell.steps
        assert all(done.yielded_s > 0 for done in cell.about(PrefillDone, step_id=step_id))


async def test_a_cancelled_step_leaves_neither_slots_nor_threads(tiny_llama: Path) -> None:
    before = set(threading.enumerate())
    request = Request(sequence_id=1, prompt=prompt_of(400), slices=even_slices(400, [0]))
    async with thread_cell(tiny_llama, prefill=4, decode=1) as cell:
        cell.failures_expected = True
        await prefill(cell, [request], plan(4, levels=3, drop_ratio=0.5))
        cell.cancel(1)
        await cell.prefilled(*cell.steps)
        await cell.idle()
    waiting = {thread for thread in threading.enumerate() if thread.name == "waiting"}
    for thread in waiting - before:
        thread.join(60)
        assert not thread.is_alive()
