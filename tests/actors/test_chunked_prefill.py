"""Prompts in chunks, on groups that change, with KV that is moved: the same tokens. The test tracks
the KV of each rank token by token, as an array of owners."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gang_driver import LAYOUTS, Prompt, Request, even_slices, laid_out, prefill_step, prompt_of
from gang_threads import ThreadCell, thread_cell
from greedy_reference import greedy_tokens
from rank_kv import held_positions
from uniform_plan import uniform_plan

from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import Topology
from csps.protocols.gang.step_messages import PrefillChunk

NOWHERE = -1
ANY_ROWS = ("ulysses", "gathered_weights")
Owners = npt.NDArray[np.int64]


class Prefill:
    """Chunks of one request, and which prefill instance owns which of its tokens."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.done = 0
        self.owners: Owners = np.full(len(request.prompt), NOWHERE)

    @property
    def holders(self) -> set[int]:
        """Return the instances with KV of earlier chunks."""
        return set(self.owners[: self.done].tolist())

    def chunk(
        self,
        stop: int,
        placement: Sequence[KvSlice] = (),
        rng: Any = None,
        rows: Sequence[KvSlice] = (),
    ) -> PrefillChunk:
        """Return the next chunk, with its history in any order."""
        history = spans_of(self.owners[: self.done])
        (rng or random.Random(0)).shuffle(history)
        return self.request.chunk(
            self.done, stop, history=tuple(history), placement=tuple(placement), rows=tuple(rows)
        )


def spans_of(owners: Owners) -> list[KvSlice]:
    """Return the runs of equal owners."""
    cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    return [
        KvSlice(int(owners[start]), start, stop)
        for start, stop in itertools.pairwise(cuts)
        if start < stop
    ]


def run_step(
    cell: ThreadCell,
    prefills: Sequence[Prefill],
    chunks: Sequence[PrefillChunk],
    group: Sequence[int],
    bounds: Sequence[int] | None = None,
    **fields: Any,
) -> int:
    """Submit a step and note who owns its tokens afterwards."""
    step = prefill_step(chunks, group, bounds, **fields)
    tokens = [
        prefill.request.prompt[chunk.start : chunk.start + chunk.length]
        for prefill, chunk in zip(prefills, chunks, strict=True)
    ]
    step_id = cell.submit(step, np.concatenate(tokens))
    cut = np.repeat(step.group, np.diff(step.bounds))
    begin = 0
    for prefill, chunk in zip(prefills, chunks, strict=True):
        end = chunk.start + chunk.length
        prefill.owners[chunk.start : end] = cut[begin : begin + chunk.length]
        for kv_slice in (*chunk.rows, *chunk.placement):
            prefill.owners[kv_slice.span.positions] = kv_slice.instance
        prefill.done = end
        begin += chunk.length
    return step_id


def check_holdings(cell: ThreadCell, prefill: Prefill) -> None:
    """Check that every prefill rank has exactly the tokens that its instance owns."""
    for rank in cell.prefill_gang.ranks:
        rank.engine.pool.slots.check_integrity()
        resident = held_positions(
            rank.engine.pool.slots, prefill.request.sequence_id, len(prefill.owners)
        )
        assert resident == np.flatnonzero(prefill.owners == rank.engine.instance).tolist()


async def finish(cell: ThreadCell, model: Path, prefills: Sequence[Prefill]) -> None:
    """Decode and compare; nothing may be left behind."""
    requests = [prefill.request for prefill in prefills]
    answers = await cell.answer(*requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer == greedy_tokens(model, request.prompt.tolist(), len(answer))
    await cell.freed(*(request.sequence_id for request in requests))
    await cell.prefilled(*cell.steps)
    cell.check_idle()


async def reserved(cell: ThreadCell, *prompts: Prompt) -> list[Prefill]:
    decode = range(cell.decode.instances)
    prefills = [
        Prefill(
            Request(sequence_id=sequence_id, prompt=prompt, slices=even_slices(len(prompt), decode))
        )
        for sequence_id, prompt in enumerate(prompts, start=1)
    ]
    for prefill in prefills:
        await cell.reserve(prefill.request)
    return prefills


def place(*slices: tuple[int, int, int]) -> list[KvSlice]:
    """Return slices from (instance, start, stop) triples."""
    return [KvSlice(instance, start, stop) for instance, start, stop in slices]


async def test_a_group_grows_and_history_is_rebalanced_over_it(tiny_llama: Path) -> None:
    """Tetris: each chunk's group contains the last one's, and history spreads over it."""
    async with thread_cell(tiny_llama, prefill=4, decode=1) as cell:
        (prefill,) = await reserved(cell, prompt_of(90))
        run_step(cell, [prefill], [prefill.chunk(20)], [2])
        halves = place((2, 0, 10), (0, 10, 20), (2, 20, 30), (0, 30, 40))
        run_step(cell, [prefill], [prefill.chunk(40, halves)], [2, 0])
        quarters = place((2, 0, 15), (0, 15, 30), (1, 30, 50), (3, 50, 70))
        await cell.prefilled(run_step(cell, [prefill], [prefill.chunk(70, quarters)], [2, 0, 1, 3]))
        check_holdings(cell, prefill)
        run_step(cell, [prefill], [prefill.chunk(90)], [3, 1, 0, 2])
        await finish(cell, tiny_llama, [prefill])


async def test_a_smaller_group_stores_the_kv_of_a_larger_one(tiny_llama: Path) -> None:
    """LoongServe: scale-down placement, any token on any of those that stay."""
    async with thread_cell(tiny_llama, prefill=3, decode=2) as cell:
        (prefill,) = await reserved(cell, prompt_of(60))
        odd_and_even = laid_out("striped", 0, 40, [0, 1])
        await cell.prefilled(
            run_step(cell, [prefill], [prefill.chunk(40, odd_and_even)], [2, 1, 0])
        )
        check_holdings(cell, prefill)
        run_step(cell, [prefill], [prefill.chunk(60)], [0, 1])
        await finish(cell, tiny_llama, [prefill])


async def test_members_without_rows_lend_their_history(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=3, decode=1) as cell:
        (prefill,) = await reserved(cell, prompt_of(50))
        run_step(cell, [prefill], [prefill.chunk(20)], [0, 2])
        run_step(cell, [prefill], [prefill.chunk(50)], [1, 2, 0], [0, 30, 30, 30])
        await finish(cell, tiny_llama, [prefill])


async def test_short_requests_fill_up_the_last_part(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1) as cell:
        long, short, tiny = prefills = await reserved(
            cell, prompt_of(50), prompt_of(9, 1), prompt_of(1, 2)
        )
        run_step(cell, [long], [long.chunk(30)], [0, 1])
        run_step(
            cell,
            prefills,
            [prefill.chunk(len(prefill.request.prompt)) for prefill in prefills],
            [0, 1],
        )
        assert long.holders | short.holders | tiny.holders == {0, 1}
        await finish(cell, tiny_llama, prefills)


async def test_kv_that_is_not_sent_remains_until_it_is_cancelled(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1) as cell:
        (prefill,) = await reserved(cell, prompt_of(30))
        await cell.prefilled(run_step(cell, [prefill], [prefill.chunk(20)], [0, 1]))
        check_holdings(cell, prefill)
        cell.cancel(1)
        await cell.freed(1)
        await cell.prefill.stats()  # the cancellation came before it on every connection
        cell.check_idle()


@pytest.mark.parametrize("seed", range(6))
async def test_any_plan_of_chunks(tiny_llama: Path, seed: int) -> None:
    await run_random_plan(tiny_llama, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 300))
async def test_any_plan_of_chunks_often(tiny_llama: Path, seed: int) -> None:
    await run_random_plan(tiny_llama, seed)


async def run_random_plan(model: Path, seed: int) -> None:
    rng = random.Random(seed)
    instances, tp = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    async with thread_cell(model, prefill=instances, prefill_tp=tp, decode=2) as cell:
        prompts = [prompt_of(rng.randint(1, 60), seed + n) for n in range(rng.randint(1, 3))]
        prefills = await reserved(cell, *prompts)
        waits = rng.random() < 0.5
        while unfinished := [
            prefill for prefill in prefills if prefill.done < len(prefill.request.prompt)
        ]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            step_id = random_step(cell, chosen, instances, rng)
            if waits:
                await cell.prefilled(step_id)
                for computed in unfinished:
                    if computed.done < len(computed.request.prompt):
                        check_holdings(cell, computed)
        await finish(cell, model, prefills)


def random_step(
    cell: ThreadCell, chosen: Sequence[Prefill], instances: int, rng: random.Random
) -> int:
    """Return a step with any group that contains the holders, any bounds, chunk lengths and
    placements."""
    needed = set().union(*(prefill.holders for prefill in chosen))
    others = [i for i in range(instances) if i not in needed]
    group = [*needed, *rng.sample(others, rng.randint(0 if needed else 1, len(others)))]
    rng.shuffle(group)
    chunks, anywhere = [], rng.random() < 0.4
    for prefill in chosen:
        stop = rng.randint(prefill.done + 1, len(prefill.request.prompt))
        placement = random_placement(rng.choice([0, prefill.done]), stop, group, rng)
        computing = rng.sample(group, rng.randint(1, len(group)))
        rows = laid_out(rng.choice(LAYOUTS), prefill.done, stop, computing) if anywhere else ()
        chunks.append(prefill.chunk(stop, placement if rng.random() < 0.6 else (), rng, rows))
    total = sum(chunk.length for chunk in chunks)
    inner = sorted(rng.randint(0, total) for _ in group[1:])
    bounds = [0, *inner, total]
    strategy = random_strategy(bounds, rng)
    if anywhere:
        strategy = {"strategy": rng.choice(ANY_ROWS)}
    return run_step(cell, chosen, chunks, group, bounds, **strategy)


def random_strategy(bounds: Sequence[int], rng: random.Random) -> dict[str, Any]:
    """Return any exact strategy, with levels and micro-partitions if it has them."""
    strategy = rng.choice([*ANY_ROWS, "levels", "csa", "sp_tp", "sp_tp_flat"])
    if strategy in ANY_ROWS or (strategy.startswith("sp_tp") and rng.random() < 0.5):
        return {"strategy": strategy}
    members = len(bounds) - 1
    locations = [f"0-{member // 2}-{member % 2}" for member in range(members)]
    plan = uniform_plan(
        locations,
        levels=rng.randint(1, len(Topology.of(locations).granularities)),
        layers=2,
        micro_partitions=rng.randint(1, min(3, max(np.diff(bounds)))),
    )
    return {"strategy": strategy, "csa": replace(plan, pipelined=rng.random() < 0.5)}


def random_placement(
    start: int, stop: int, group: Sequence[int], rng: random.Random
) -> list[KvSlice]:
    if rng.random() < 0.4:
        keeping = rng.sample(group, rng.randint(1, len(group)))
        return list(laid_out(rng.choice(LAYOUTS), start, stop, keeping))
    cuts = sorted({start, stop, *(rng.randint(start, stop) for _ in range(3))})
    return place(*((rng.choice(group), a, b) for a, b in itertools.pairwise(cuts)))
