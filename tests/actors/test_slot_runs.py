"""What decode reads of a pool: the prompt wherever it lies, and each token that it appends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.kv_cache.kv_pool import KvPool, ResidentRows, SlotsOfSequence
from csps.protocols.core.placement import Span

LAYERS, SLOTS = 2, 40


def make_pool() -> KvPool:
    return KvPool(
        layers=LAYERS, slots=SLOTS, kv_heads=1, head_dim=1, dtype=torch.float32, device="cpu"
    )


def write(pool: KvPool, sequence_id: int, start: int, stop: int) -> None:
    numbers = torch.arange(start, stop).float().view(-1, 1, 1)
    for layer in range(LAYERS):
        pool.write(layer, sequence_id, Span(start=start, stop=stop), numbers, -numbers)


def read(pool: KvPool, held: ResidentRows, layer: int) -> list[list[float]]:
    """By row: the numbers that its keys hold."""
    found: list[list[float]] = [[] for _ in held.sequences]
    for row, begin, end in held.runs(layer).runs:
        found[row] += pool.layer(layer)[0][begin:end].flatten().tolist()
    return found


@st.composite
def fragmented(draw: st.DrawFn) -> KvPool:
    pool = make_pool()
    sizes = draw(st.lists(st.integers(1, 5), max_size=5))
    for sequence_id, size in enumerate(sizes, start=100):
        pool.slots.allocate(sequence_id, [Span(start=0, stop=size)])
    for sequence_id in range(100, 100 + len(sizes), 2):
        pool.slots.free_sequence(sequence_id)
    return pool


@given(
    pool=fragmented(), prompts=st.lists(st.integers(0, 5), min_size=1, max_size=3), data=st.data()
)
def test_rows_see_the_prompt_and_all_that_was_appended(
    pool: KvPool, prompts: list[int], data: st.DataObject
) -> None:
    requests = []
    for sequence_id, length in enumerate(prompts):
        # As a rank reserves them: the prompt's share and the answer, which lie anywhere.
        pool.slots.allocate(
            sequence_id, [Span(start=0, stop=length), Span(start=length, stop=length + 3)]
        )
        write(pool, sequence_id, 0, length)
        answer = Span(start=length, stop=length + 3)
        prompt = Span(start=0, stop=length)
        requests.append(SlotsOfSequence(pool, sequence_id, range(LAYERS), [prompt], [answer]))
    held = ResidentRows(requests)
    expected = [[float(token) for token in range(length)] for length in prompts]
    assert read(pool, held, 0) == read(pool, held, 1) == expected
    hidden = data.draw(st.integers(-1, 8))
    near = ResidentRows(requests, [hidden] * len(requests))
    for step in range(3):
        slots_t = torch.tensor([request.append() for request in requests])
        held.grown()
        numbers = torch.tensor([[[float(length + step)]] for length in prompts])
        for layer in range(LAYERS):
            pool.write_slots(layer, slots_t, numbers, -numbers)
        for row, length in enumerate(prompts):
            expected[row].append(float(length + step))
        assert read(pool, held, 0) == read(pool, held, 1) == expected
        near.grown()
        behind = [[token for token in row if token > hidden] for row in expected]
        assert read(pool, near, 0) == behind
    with pytest.raises(IndexError):
        requests[0].append()
    pool.slots.check_integrity()


def test_a_prompt_and_its_answer_in_one_place_are_one_run() -> None:
    pool = make_pool()
    pool.slots.allocate(1, [Span(start=0, stop=6)])
    write(pool, 1, 0, 4)
    slots = SlotsOfSequence(pool, 1, range(LAYERS), [Span(0, 4)], [Span(start=4, stop=6)])
    assert [slots.append(), slots.append()] == [4, 5]
    assert ResidentRows([slots]).runs(0).runs == [(0, 0, 6)]
