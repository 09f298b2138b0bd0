"""LoongServe's examples and promises on ranks: what only any token on any instance fits (§4.1),
and the tokens of the model whatever happens to groups at whichever layer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gang_driver import ANSWER_S, Request, even_slices, laid_out, prefill_step, prompt_of, slices_at
from gang_threads import ThreadCell, elastic_cell
from greedy_reference import greedy_tokens
from rank_kv import held_positions
from test_moving_sequences import check_answer, decode, on, placed, turns
from tiny_checkpoints import make_checkpoint

from csps.actors.engine.step_run import StepRun
from csps.actors.kv_cache.slot_allocator import OutOfSlots
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import RankKvReceived, Sampling
from csps.protocols.gang.step_messages import SequencePlacement

EVERYONE = (0, 1, 2)


async def filled(cell: ThreadCell, free: tuple[int, ...], slots: int) -> None:
    """Fill the instances with others' requests up to this many free slots."""
    for instance, left in enumerate(free):
        taken = slots - left
        if taken:
            slices = even_slices(taken, [instance])
            one = Sampling(temperature=0, max_tokens=1)
            request = Request(
                sequence_id=100 + instance, prompt=prompt_of(taken), slices=slices, sampling=one
            )
            await cell.reserve(request)


@pytest.mark.parametrize("tp", [1, 2])
async def test_600k_on_100_200_and_400_thousand_slots(tiny_llama: Path, tp: int) -> None:
    """§4.1's example with a thousandth of the tokens. Stored while it is computed, the KV fits.
    Computed first and moved then, it finds no slots on the first instance."""
    async with elastic_cell(tiny_llama, 3, tp=tp, kv_slots=401) as cell:
        await filled(cell, (100, 200, 401), 401)
        prompt, rows = prompt_of(600), laid_out("striped", 0, 600, EVERYONE)
        reactive = Request(sequence_id=1, prompt=prompt, slices=rows, master=2)
        with pytest.raises(OutOfSlots):
            await cell.reserve(reactive)
        cell.cancel(1)
        await cell.freed(1)
        two = Sampling(temperature=0, max_tokens=2)
        slices = slices_at([0, 100, 200, 600], (1, 0, 2))
        proactive = Request(sequence_id=2, prompt=prompt, slices=slices, master=2, sampling=two)
        await cell.reserve(proactive)
        pools = [rank.engine.pool for rank in cell.prefill_gang.ranks]
        assert [pool.slots.free for pool in pools] == [
            free for free in (0, 100, 0) for _ in range(tp)
        ]
        step = prefill_step([proactive.chunk(rows=rows)], EVERYONE, strategy="ring_kv")
        cell.submit(step, prompt)
        await cell.until_received(3 * tp, RankKvReceived, sequence_id=2)
        kept = [held_positions(pool.slots, 2, 600) for pool in pools[::tp]]
        assert kept == [[*range(100, 200)], [*range(100)], [*range(200, 600)]]
        assert await cell.answer(proactive) == [greedy_tokens(tiny_llama, prompt.tolist(), 2)]
        cell.cancel(100)
        cell.cancel(101)
        await cell.freed(2, 100, 101)
        cell.check_idle()


async def test_the_six_slots_of_figure_4(tiny_llama: Path) -> None:
    """Two instances of three slots, two and one of them taken: the three that are left serve a
    request that needs three, and none of them moves."""
    async with elastic_cell(tiny_llama, 2, kv_slots=3) as cell:
        await filled(cell, (1, 2), 3)
        request = Request(
            sequence_id=1,
            prompt=prompt_of(2),
            slices=even_slices(2, [1]),
            master=1,
            sampling=Sampling(temperature=0, max_tokens=2),
            answer=(KvSlice(0, 2, 3),),
        )
        await cell.reserve(request)
        assert all(rank.engine.pool.slots.free == 0 for rank in cell.prefill_gang.ranks)
        rows = laid_out("striped", 0, 2, (0, 1))
        cell.submit(
            prefill_step([request.chunk(rows=rows)], (0, 1), strategy="ring_kv"), request.prompt
        )
        expected = greedy_tokens(tiny_llama, request.prompt.tolist(), 2)
        assert await cell.answer(request) == [expected]
        cell.cancel(100)
        cell.cancel(101)
        await cell.freed(1, 100, 101)
        cell.check_idle()


class HeldLayer:
    """The next step's leader stands before a layer until it may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._layer, self._reached, self._may_go_on = -1, threading.Event(), threading.Event()
        begin = StepRun._begin_layer

        def resident(run: StepRun, index: int) -> None:
            if run.leads and index == self._layer:
                self._layer = -1
                self._reached.set()
                assert self._may_go_on.wait(ANSWER_S), "nobody let the step go on"
            begin(run, index)

        patch.setattr(StepRun, "_begin_layer", resident)

    def arm(self, layer: int) -> None:
        self._reached.clear()
        self._may_go_on.clear()
        self._layer = layer

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, ANSWER_S), "no step came to the layer"

    def go_on(self) -> None:
        self._may_go_on.set()


LAYERS = 3
EVENTS = ("nothing more", "cancel it", "cancel another", "migrate", "scale up", "merge")
"""Events while all instances compute a prompt that scales down and preempts two sequences."""


def row(sequence_ids: Iterator[int], length: int, tokens: int, *instances: int) -> Request:
    """Return a request whose prompt is the same in each story."""
    return Request(
        sequence_id=next(sequence_ids),
        prompt=prompt_of(length, length),
        slices=even_slices(length, instances),
        master=instances[-1],
        sampling=Sampling(temperature=0, max_tokens=tokens),
    )


async def story(
    cell: ThreadCell,
    model: Path,
    resident: HeldLayer,
    sequence_ids: Iterator[int],
    layer: int,
    event: str,
) -> None:
    first, second = row(sequence_ids, 20, 60, 0), row(sequence_ids, 21, 60, 2)
    joining, long = row(sequence_ids, 15, 10, 0, 2), row(sequence_ids, 48, 8, 1)
    answer = slices_at([0, 3, 7], (1, 2))
    shifted = (kv_slice.cut(kv_slice.span.shifted(48)) for kv_slice in answer)
    long = replace(long, answer=tuple(shifted))
    for request in (first, second):
        await decode(cell, request)
    await cell.reserve(joining)
    cell.submit(prefill_step([joining.chunk()], [0, 2]), joining.prompt)
    await cell.until_received(2 * cell.decode.tp, RankKvReceived, sequence_id=joining.sequence_id)
    await cell.reserve(long)
    resident.arm(layer)
    chunk = long.chunk(rows=laid_out("striped", 0, 48, EVERYONE))
    step = cell.submit(prefill_step([chunk], EVERYONE, strategy="ring_kv"), long.prompt)
    await resident.reached()
    cancelled = {"cancel it": long, "cancel another": first}.get(event)
    if cancelled is not None:
        cell.cancel(cancelled.sequence_id)
    elif event == "migrate":
        cell.move(first, placed(first), on(first, 2, 1))
    elif event == "scale up":
        wider = SequencePlacement(slices=first.slices, master=0, answer=turns(20, 60, (0, 1)))
        cell.move(first, placed(first), wider)
    elif event == "merge":
        await cell.join(joining)
    await cell.prefill.stats()  # the conductor has heard of it
    resident.go_on()
    await cell.prefilled(step)
    if event != "merge":
        await cell.join(joining)
    if cancelled is not long:
        await cell.join(long)
    for request in (first, second, joining, long):
        if request is cancelled:
            await cell.freed(request.sequence_id)
        else:
            await check_answer(cell, model, request)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tp", [1, 2])
async def test_tokens_are_the_models_whatever_happens_at_a_layers_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """Three instances compute a prompt, one stores it and two decode it, beside sequences that it
    preempts, which move, grow, merge, or end."""
    model, sequence_ids = make_checkpoint(tmp_path, num_hidden_layers=LAYERS), itertools.count(1)
    async with elastic_cell(model, 3, tp=tp, quantum_ms=0.0) as cell:
        resident = HeldLayer(monkeypatch)
        for layer, event in itertools.product(range(LAYERS), EVENTS):
            await story(cell, model, resident, sequence_ids, layer, event)
            cell.check_idle()
