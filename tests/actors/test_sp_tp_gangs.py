"""Whole gangs that prefill by SP-TP or with gathered weights, against transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from greedy_reference import greedy_tokens
from tiny_checkpoints import make_checkpoint
from uniform_plan import uniform_plan

from csps.protocols.gang.messages import SampledToken, Sampling

TOKENS, LAYERS = 4, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize(
    ("strategy", "prefill", "tp", "micro_partitions"),
    [
        ("sp_tp", 3, 1, None),
        ("sp_tp", 4, 1, 2),
        ("sp_tp", 2, 2, 2),
        ("sp_tp_flat", 4, 1, 2),
        ("gathered_weights", 2, 2, None),
    ],
)
async def test_greedy_tokens(
    model: Path, strategy: str, prefill: int, tp: int, micro_partitions: int | None
) -> None:
    locations = [f"0-{2 * index // prefill}-{index}" for index in range(prefill)]
    plan = None
    if micro_partitions is not None:
        plan = uniform_plan(locations, levels=2, layers=LAYERS, micro_partitions=micro_partitions)
    requests = [
        Request(
            sequence_id=sequence_id,
            prompt=prompt_of(length, sequence_id),
            slices=even_slices(length, range(1)),
            sampling=Sampling(temperature=0, max_tokens=TOKENS),
        )
        for sequence_id, length in enumerate((67, 9))
    ]
    async with thread_cell(model, prefill=prefill, prefill_tp=tp, decode=1) as cell:
        await asyncio.gather(*map(cell.reserve, requests))
        chunks = [request.chunk() for request in requests]
        step = prefill_step(chunks, range(prefill), strategy=strategy, csa=plan)
        cell.submit(step, np.concatenate([request.prompt for request in requests]))
        answers = await cell.answer(*requests)
        await cell.freed(*range(len(requests)))
        await cell.prefilled(*cell.steps)
        cell.check_idle()
    assert answers == [greedy_tokens(model, r.prompt.tolist(), TOKENS) for r in requests]


async def test_a_high_priority_step_runs_between_two_layers_while_weights_travel(
    model: Path,
) -> None:
    """Both steps gather weights, over the same ranks."""
    requests = [
        Request(
            sequence_id=sequence_id,
            prompt=prompt_of(length, sequence_id),
            slices=even_slices(length, range(1)),
        )
        for sequence_id, length in enumerate((90, 7), start=1)
    ]
    long, high_priority = (
        msgspec.structs.replace(
            prefill_step(
                [request.chunk()], group, strategy="gathered_weights", high_priority=group == [1]
            ),
            step_id=request.sequence_id,
        )
        for request, group in zip(requests, ([0, 1], [1]), strict=True)
    )
    async with thread_cell(model, prefill=2, prefill_tp=2, decode=1) as cell:
        await asyncio.gather(*map(cell.reserve, requests))
        for ranks in ([0, 1], [2, 3]):  # the long step pauses until all ranks have both steps
            for step, request in zip((long, high_priority), requests, strict=True):
                cell.submit(step, request.prompt, ranks=ranks)
            await cell.prefill.stats()
        answers = await cell.answer(*requests)
        await cell.freed(*(request.sequence_id for request in requests))
        await cell.prefilled(*cell.steps)
        cell.check_idle()
    first_tokens = [
        message.sequence_id
        for message in cell.order
        if isinstance(message, SampledToken) and message.index == 0
    ]
    assert first_tokens == [high_priority.step_id, long.step_id]
    for request, answer in zip(requests, answers, strict=True):
        assert answer == greedy_tokens(model, request.prompt.tolist(), len(answer))
