"""Traces of a request on its ranks: the cost of scaling down, where its KV lies, and how long
queries blocked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gang_driver import Request, even_slices, laid_out, prefill_step, prompt_of
from gang_threads import elastic_cell
from greedy_reference import greedy_tokens
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_cancelled_traces import TIMELINE

from csps.actors.engine.decode_batch import ANSWER_FROM, ANSWER_TOKENS, PROMPT_TOKENS
from csps.actors.timing.timeline import (
    COMMUNICATION_S,
    EXCHANGE_S,
    LAST_LAYER_S,
    PLACING_S,
    PLACING_STORED_S,
    PLACING_WAITED_S,
    RANK,
)
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import Sampling

LENGTH, DRAWN, FIRST = 60, 24, 10
"""Tokens of the prompt and of the answer, and those of the answer that lie with the prompt."""


async def test_an_answer_scales_up_when_it_comes_to_slots_of_another_instance(
    tiny_llama: Path, exported: InMemorySpanExporter
) -> None:
    """Three instances prefill the prompt; one decodes it, and two from the answer's eleventh token
    on. Holders of later tokens are not asked before."""
    last = LENGTH + DRAWN - 1
    answer = (
        KvSlice(1, LENGTH, LENGTH + FIRST),
        KvSlice(2, LENGTH + FIRST, last),
    )
    request = Request(
        sequence_id=1,
        prompt=prompt_of(LENGTH),
        slices=even_slices(LENGTH, [1]),
        master=1,
        sampling=Sampling(temperature=0, max_tokens=DRAWN),
        answer=answer,
        trace=TIMELINE,
    )
    # Plain gloo tells how long exchanges took.
    async with elastic_cell(tiny_llama, 3, data_group=None) as cell:
        ranks = cell.prefill_gang.ranks
        await cell.reserve(request)
        rows = laid_out("striped", 0, LENGTH, [0, 1, 2])
        chunk = request.chunk(rows=rows)
        step = prefill_step([chunk], [0, 1, 2], strategy="ring_kv", trace=TIMELINE)
        await cell.prefilled(cell.submit(step, request.prompt))
        before = [list(rank.engine.mesh.bytes_sent) for rank in ranks]
        assert await cell.answer(request) == [
            greedy_tokens(tiny_llama, request.prompt.tolist(), DRAWN)
        ]
        await cell.freed(1)
        spec = ranks[1].engine.spec
        sent = [
            [now - then for now, then in zip(rank.engine.mesh.bytes_sent, was, strict=True)]
            for rank, was in zip(ranks, before, strict=True)
        ]
    # Keys and values of a token go to who keeps it, its queries after them.
    heads = 2 * spec.kv_heads + spec.heads
    asked = (last - LENGTH - FIRST) * spec.layers
    assert sent[1] == [0, 0, asked * heads * spec.head_dim * 4]
    assert sent[2] == [0, asked * spec.heads * (spec.head_dim + 1) * 4, 0]
    assert sent[0] == [0, 0, 0]
    check_scale_down(of_ranks(exported, "prefill.compute"))
    figures = of_ranks(exported, "decode.rank")
    assert {rank: lies(sequence) for rank, sequence in figures.items()} == {
        0: (0, 0, None),
        1: (LENGTH, FIRST, 0),
        2: (0, DRAWN - 1 - FIRST, FIRST),
    }
    master = figures.pop(1)
    assert 0 < master[COMMUNICATION_S] < master[EXCHANGE_S]
    assert all(
        not figure[COMMUNICATION_S] and not figure[EXCHANGE_S] for figure in figures.values()
    )


def of_ranks(exported: InMemorySpanExporter, name: str) -> dict[int, dict[str, Any]]:
    """Return the attributes of this span on each rank."""
    return {
        int(get_finished_span.attributes[RANK]): dict(get_finished_span.attributes)
        for get_finished_span in exported.get_finished_spans()
        if get_finished_span.name == name and get_finished_span.attributes is not None
    }


def check_scale_down(figures: dict[int, dict[str, Any]]) -> None:
    """Check that only the second rank stores rows that pass it; all ranks move some in the last
    layer."""
    assert [figures[rank][PLACING_STORED_S] > 0 for rank in range(3)] == [False, True, False]
    for figure in figures.values():
        parts = figure[PLACING_STORED_S] + figure[PLACING_WAITED_S]
        assert 0 < parts < figure[PLACING_S]
        assert figure[PLACING_WAITED_S] < figure[LAST_LAYER_S]


def lies(attributes: dict[str, Any]) -> tuple[int, int, int | None]:
    """Return tokens of the prompt, tokens of the answer, and the first of these."""
    return attributes[PROMPT_TOKENS], attributes[ANSWER_TOKENS], attributes.get(ANSWER_FROM)
