"""Chunks of a prompt on growing groups, with history moved by Tetris' policy.

Chains of chunks give the same tokens as one chunk. History is even before the attention of each
layer, and only the KV that has to move is sent.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang_driver import Request, even_slices, laid_out, prompt_of
from gang_threads import ThreadCell, eventually, thread_cell
from greedy_reference import greedy_tokens
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rank_kv import held_positions
from test_cancelled_traces import TIMELINE
from test_chunked_prefill import Prefill, check_holdings, finish, reserved, run_step, spans_of
from test_yielding import sending_goes_on

from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.timing.timeline import BYTES, LAYER, PHASE, RANK
from csps.protocols.core.placement import Span
from csps.services.scheduling.policies.tetris.policy import balancing_moves


@dataclass(frozen=True)
class Chunk:
    """End of the next chunk, and the group that computes it."""

    stop: int
    group: tuple[int, ...]


def random_chain(rng: random.Random, length: int, instances: int) -> list[Chunk]:
    """Return chunks on random groups, each of which contains the groups before it."""
    order = rng.sample(range(instances), instances)
    count = rng.randint(2, 4)
    sizes = sorted(rng.randint(1, instances) for _ in range(count))
    stops = [*sorted(rng.sample(range(1, length), count - 1)), length]
    return [
        Chunk(stop, tuple(rng.sample(order[:size], size)))
        for stop, size in zip(stops, sizes, strict=True)
    ]


def run_chunk(
    cell: ThreadCell, prefill: Prefill, planned: Chunk, layout: str, **fields: Any
) -> tuple[int, Counter[tuple[int, int]]]:
    """Send a chunk to the ranks; return its step, and the history tokens to move by instances."""
    before = prefill.owners[: prefill.done].copy()
    stored = [kv_slice for kv_slice in spans_of(before) if kv_slice.tokens]
    moves = balancing_moves(stored, planned.group)
    rows = laid_out(layout, prefill.done, planned.stop, planned.group)
    chunk = prefill.chunk(planned.stop, (*rows, *moves) if moves else (), rows=rows)
    step = run_step(cell, [prefill], [chunk], planned.group, **fields)
    after = prefill.owners[: len(before)]
    counts = np.bincount(after, minlength=max(planned.group) + 1)[list(planned.group)]
    assert counts.max() - counts.min() <= 1, "history is not even"
    changed = np.flatnonzero(before != after)
    pairs = zip(before[changed].tolist(), after[changed].tolist(), strict=True)
    return step, Counter(pairs)


class MovedBytes:
    """Counts the bytes that ranks send to move KV, from rank to rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()
        counting, start = threading.Lock(), Mesh.start_exchange

        def counted(mesh: Mesh, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> Any:
            if tag == Tag.KV_MOVE:
                with counting:
                    for peer, tensor in sends:
                        self.sent[mesh.rank, peer] += tensor.nbytes
            return start(mesh, sends, recvs, tag)

        patch.setattr(Mesh, "start_exchange", counted)


def grown(length: int, groups: Sequence[Sequence[int]]) -> list[Chunk]:
    """Return chunks of even length on the given groups."""
    return [
        Chunk(length * number // len(groups), tuple(group))
        for number, group in enumerate(groups, 1)
    ]


__all__ = ["sending_goes_on"]
OTHER = 10**6
"""Sequence of another request."""
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
"""Bytes of a token's keys and values in a layer, over the ranks of an instance."""


GANGS = ((4, 1), (2, 2))
"""Prefill instances and tensor parallelism of both gangs: four ranks and two."""


@pytest.mark.parametrize("gangs", GANGS)
async def test_a_chain_gives_the_tokens_of_one_chunk(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, gangs: tuple[int, int]
) -> None:
    await check_chain(tiny_llama, monkeypatch, gangs, seed=sum(gangs))


@pytest.mark.slow
@pytest.mark.parametrize("gangs", GANGS)
@pytest.mark.parametrize("seed", range(60))
async def test_any_chain_gives_the_tokens_of_one_chunk(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, gangs: tuple[int, int], seed: int
) -> None:
    await check_chain(tiny_llama, monkeypatch, gangs, seed)


async def check_chain(
    model: Path, patch: pytest.MonkeyPatch, gangs: tuple[int, int], seed: int
) -> None:
    """Compare a chain with the same prompt in one chunk; cancel another between two chunks."""
    rng, (instances, tp) = random.Random(seed), gangs
    moved, moved_tokens = MovedBytes(patch), Counter[tuple[int, int]]()
    async with thread_cell(
        model, prefill=instances, prefill_tp=tp, decode=2 // tp, decode_tp=tp
    ) as cell:
        prompt = prompt_of(rng.randint(20, 120), seed)
        chained, whole, cancelled = await reserved(cell, prompt, prompt, prompt)
        for prefill in (chained, cancelled):
            layout = rng.choice(("zigzag", "striped"))
            strategy = rng.choice(("ring_kv", "ring_q", "ulysses"))
            for chunk in random_chain(rng, len(prompt), instances):
                if prefill is cancelled and prefill.done:
                    cell.cancel(prefill.request.sequence_id)
                    break
                step, tokens = run_chunk(cell, prefill, chunk, layout, strategy=strategy)
                await cell.prefilled(step)
                moved_tokens += tokens
                if prefill.done < len(prompt):
                    check_holdings(cell, prefill)
        run_step(cell, [whole], [whole.chunk(len(prompt))], range(instances))
        await cell.freed(cancelled.request.sequence_id)
        await finish(cell, model, [chained, whole])
        assert cell.tokens(chained.request.sequence_id) == cell.tokens(whole.request.sequence_id)
    by_instance = Counter[tuple[int, int]]()
    for (sender, receiver), sent in moved.sent.items():
        assert sender % tp == receiver % tp
        by_instance[sender // tp, receiver // tp] += sent
    assert by_instance == {
        pair: tokens * LAYERS * TOKEN_BYTES for pair, tokens in moved_tokens.items()
    }


async def test_a_layers_history_travels_during_the_one_before(
    tiny_llama: Path, exported: InMemorySpanExporter
) -> None:
    """In the trace, the moved history of a layer has arrived when its attention begins, and the
    history of the next layer is on its way. KV is sent to the decode gang by layer as well."""
    prefill = Prefill(Request(sequence_id=1, prompt=prompt_of(60), slices=even_slices(60, [0])))
    async with thread_cell(tiny_llama, prefill=2, decode=1, data_group=None) as cell:
        await cell.reserve(prefill.request)
        for chunk in grown(60, ([1], [1, 0])):
            _, tokens = run_chunk(
                cell, prefill, chunk, "zigzag", strategy="ring_kv", trace=TIMELINE
            )
        assert tokens == {(1, 0): 15}
        await finish(cell, tiny_llama, [prefill])
    spans = [span for span in exported.get_finished_spans() if attribute(span, PHASE)]
    for rank, sent in ((0, 0), (1, 15 * TOKEN_BYTES)):
        first, second = (of(spans, "balancing", rank, layer) for layer in range(LAYERS))
        attention = of(spans, "attention", rank, 0)
        assert first.end_time <= attention.start_time
        assert second.start_time <= attention.start_time
        assert second.end_time <= of(spans, "last rows", rank, 1).start_time
        assert attribute(first, BYTES) == attribute(second, BYTES) == sent
    transfers = [span for span in spans if attribute(span, PHASE) == "kv transfer"]
    for layer in range(LAYERS):
        of_layer = [span for span in transfers if attribute(span, LAYER) == layer]
        sent = sum(int(str(attribute(span, BYTES))) for span in of_layer)
        assert sent == 60 * TOKEN_BYTES


async def test_moved_kv_keeps_its_old_slots_until_it_is_sent(
    tiny_llama: Path, sending_goes_on: threading.Event
) -> None:
    """Another sequence takes all free slots, and writes into them, before any KV is sent."""
    prefill = Prefill(Request(sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0])))
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_slots=64) as cell:
        await cell.reserve(prefill.request)
        for chunk in grown(40, ([0], [0, 1])):
            _, tokens = run_chunk(cell, prefill, chunk, "zigzag", strategy="ring_q")
        assert tokens == {(0, 1): 10}
        rank = cell.prefill_gang.ranks[0]
        pool, kept = rank.engine.pool, np.flatnonzero(prefill.owners == 0).tolist()
        await eventually(lambda: held_positions(pool.slots, 1, 40) == kept)
        assert (len(kept), pool.slots.used) == (20, 30)
        room = Span(0, pool.slots.free)
        pool.slots.allocate(OTHER, [room])
        for layer in range(LAYERS):
            nan = torch.full((room.length, KV_HEADS, HEAD_DIM), torch.nan)
            pool.write(layer, OTHER, room, nan, nan)
        sending_goes_on.set()
        answers = await cell.answer(prefill.request)
        assert answers == [
            greedy_tokens(tiny_llama, prefill.request.prompt.tolist(), len(answers[0]))
        ]
        pool.slots.free_sequence(OTHER)
        await cell.freed(1)
        await cell.idle()


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes.get(name)


def of(spans: list[ReadableSpan], phase: str, rank: int, layer: int) -> ReadableSpan:
    """Return a rank's first span of a phase in a layer of the last step."""
    wanted = (phase, rank, layer)
    found = [
        span
        for span in spans
        if tuple(attribute(span, key) for key in (PHASE, RANK, LAYER)) == wanted
    ]
    last = max(found, key=start_of).parent
    return min((span for span in found if span.parent == last), key=start_of)


def start_of(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time
