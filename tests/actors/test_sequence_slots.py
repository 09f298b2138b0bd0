"""Kept tokens in the pool, against the masks that they were picked by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given
from hypothesis import strategies as st
from rounded_reference import rounded
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.kv_cache.kv_pool import KvPool, ResidentRows, SlotsOfSequence
from csps.actors.kv_cache.sequence_slots import KeptKv
from csps.actors.kv_cache.slot_allocator import NotHeld
from csps.protocols.core.placement import Span, near_ring

KV_HEADS, GROUP, HEAD_DIM, SLOTS = 3, 2, 4, 64
SEQUENCE_ID = 1


def make_pool(*, eight_bits: bool = False) -> KvPool:
    pool = KvPool(
        layers=2,
        slots=SLOTS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float64,
        device="cpu",
        eight_bits=eight_bits,
    )
    nan = -1 if eight_bits else torch.nan  # four bytes of ones are a scale that is NaN
    pool.k.fill_(nan)  # what nobody wrote must show if somebody reads it
    pool.v.fill_(nan)
    return pool


def span(start: int, stop: int) -> Span:
    return Span(start=start, stop=stop)


@dataclass(frozen=True)
class Prompt:
    """Keys, values and masks of a prompt, and where it is cut."""

    k_thd: Tensor
    v_thd: Tensor
    kept_ht: Tensor
    cuts: tuple[int, ...]
    head_cuts: tuple[int, ...]
    """Cuts of the heads, for each span between two cuts of positions."""

    @property
    def tokens(self) -> int:
        return len(self.k_thd)

    def chunks(self) -> Iterator[tuple[Span, slice, KeptKv]]:
        """Yield chunks as they arrive: spans of positions by neighboring heads."""
        for (start, stop), head in zip(pairwise(self.cuts), self.head_cuts, strict=True):
            for heads in (slice(0, head), slice(head, KV_HEADS)):
                if heads.start < heads.stop:
                    yield span(start, stop), heads, self.part(slice(start, stop), heads)

    def part(self, rows: slice, heads: slice) -> KeptKv:
        kept = self.kept_ht[heads, rows]
        return KeptKv.of(self.k_thd[rows, heads], self.v_thd[rows, heads], kept)

    def dense(self, q_hd: Tensor, kept_ht: Tensor) -> Tensor:
        """Return (query heads, d) attention over the marked tokens only, head by head."""
        outs = []
        for head, q_d in enumerate(q_hd):
            kv = head // GROUP
            k, v = self.k_thd[kept_ht[kv], kv], self.v_thd[kept_ht[kv], kv]
            out, _ = dense_attention(
                q_d[None, None], k[:, None], v[:, None], q_positions=None, k_positions=None
            )
            outs.append(out[0, 0])
        return torch.stack(outs)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(st.integers(1, 20))
    torch.manual_seed(draw(st.integers(0, 1000)))
    k_thd, v_thd = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    kept_ht = torch.rand(KV_HEADS, tokens) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    if draw(st.booleans()):
        kept_ht[:] = kept_ht[0]  # as many for each head, which is the common case
    kept_ht[:, 0] = True
    cuts = tuple(sorted({0, tokens, *draw(st.sets(st.integers(0, tokens), max_size=3))}))
    heads = st.integers(0, KV_HEADS)
    head_cuts = tuple(draw(heads) for _ in cuts[1:])
    return Prompt(k_thd, v_thd, kept_ht, cuts, head_cuts)


@st.composite
def fragmented(draw: st.DrawFn, *, eight_bits: bool = False) -> KvPool:
    """Return a pool with holes."""
    pool = make_pool(eight_bits=eight_bits)
    sizes = draw(st.lists(st.integers(1, 6), max_size=8))
    for sequence_id, size in enumerate(sizes, start=100):
        pool.slots.allocate(sequence_id, [span(0, size)])
    for sequence_id in range(100, 100 + len(sizes), 2):
        pool.slots.free_sequence(sequence_id)
    return pool


def fill(pool: KvPool, prompt: Prompt, order: Any) -> None:
    """Write layer 1 of a sequence, in any order of arrival."""
    pool.slots.allocate(SEQUENCE_ID, [span(0, prompt.tokens + 2)])
    chunks = list(prompt.chunks())
    order.shuffle(chunks)
    for where, heads, kept in chunks:
        pool.write_kept(1, SEQUENCE_ID, where, kept, heads=heads)


def attended(pool: KvPool, q_hd: Tensor, slots: SlotsOfSequence | None = None) -> Tensor:
    """Return (query heads, d) attention by the engine."""
    spec = SimpleNamespace(scale=HEAD_DIM**-0.5)
    nothing = cast(Any, None)
    engine = Engine(
        network=cast(Any, SimpleNamespace(spec=spec)),
        pool=pool,
        mesh=nothing,
        layout=nothing,
        device=torch.device("cpu"),
    )
    held = ResidentRows([slots or SlotsOfSequence(pool, SEQUENCE_ID, [1], [])])
    return engine.attend_rows(1, q_hd[None], held)[0][0].double()


QUERY = torch.randn(KV_HEADS * GROUP, HEAD_DIM, dtype=torch.float64)


@given(prompt=prompts(), pool=fragmented(), order=st.randoms(use_true_random=False))
def test_attention_is_over_the_kept_tokens_of_each_head(
    prompt: Prompt, pool: KvPool, order: Any
) -> None:
    fill(pool, prompt, order)
    pool.slots.check_integrity()
    expected = prompt.dense(QUERY, prompt.kept_ht)
    torch.testing.assert_close(attended(pool, QUERY), expected, rtol=0, atol=1e-12)


@given(prompt=prompts(), pool=fragmented(eight_bits=True), order=st.randoms(use_true_random=False))
def test_kept_tokens_in_8_bits_are_seen_rounded(prompt: Prompt, pool: KvPool, order: Any) -> None:
    prompt = replace(prompt, k_thd=prompt.k_thd.float(), v_thd=prompt.v_thd.float())
    fill(pool, prompt, order)
    seen = replace(prompt, k_thd=rounded(prompt.k_thd), v_thd=rounded(prompt.v_thd))
    expected = seen.dense(QUERY, prompt.kept_ht)
    torch.testing.assert_close(attended(pool, QUERY), expected, rtol=0, atol=1e-12)


@given(prompt=prompts(), order=st.randoms(use_true_random=False))
def test_generated_tokens_are_always_seen(prompt: Prompt, order: Any) -> None:
    pool = make_pool()
    fill(pool, prompt, order)
    k_thd, v_thd = torch.randn(2, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    answer = span(prompt.tokens, prompt.tokens + 2)
    slots = SlotsOfSequence(pool, SEQUENCE_ID, [1], [span(0, prompt.tokens)], [answer])
    for row in range(2):
        own = slice(row, row + 1)
        pool.write_slots(1, torch.tensor([slots.append()]), k_thd[own], v_thd[own])
    pool.slots.check_integrity()
    longer = Prompt(
        torch.cat((prompt.k_thd, k_thd)), torch.cat((prompt.v_thd, v_thd)), prompt.kept_ht, (), ()
    )
    kept_ht = torch.cat((prompt.kept_ht, torch.ones(KV_HEADS, 2, dtype=torch.bool)), dim=1)
    expected = longer.dense(QUERY, kept_ht)
    torch.testing.assert_close(attended(pool, QUERY, slots), expected, rtol=0, atol=1e-12)


def test_a_sequence_with_kept_tokens_is_freed_as_a_whole() -> None:
    """Kept tokens of each head have moved up in its slots."""
    pool = filled()
    assert pool.slots.free_span(SEQUENCE_ID, span(1, 2)) == 4
    assert pool.slots.used == 0
    pool.slots.check_integrity()


def test_kept_tokens_are_not_shared() -> None:
    with pytest.raises(NotHeld):
        filled().slots.share_slots(SEQUENCE_ID + 1, SEQUENCE_ID, span(0, 2))


# --- layers apart ----------------------------------------------------------------------------


def filled() -> KvPool:
    """Return a sequence with one layer of each kind."""
    pool = make_pool()
    kept_ht = torch.tensor([[True, False, True, True]] * KV_HEADS)
    k_thd, v_thd = torch.randn(2, 4, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    pool.slots.allocate(SEQUENCE_ID, [span(0, 4)])
    pool.write(0, SEQUENCE_ID, span(0, 4), k_thd, v_thd)
    pool.write_kept(1, SEQUENCE_ID, span(0, 4), KeptKv.of(k_thd, v_thd, kept_ht))
    return pool


def test_a_layer_that_drops_nothing_is_read_as_ever() -> None:
    pool = filled()
    assert (pool.narrowed(0, SEQUENCE_ID), pool.narrowed(1, SEQUENCE_ID)) == (False, True)
    slots = SlotsOfSequence(pool, SEQUENCE_ID, range(2), [span(0, 4)])
    assert (slots.runs(0), slots.runs(1)) == ([range(4)], [])


def test_an_incomplete_layer_is_not_written_as_if_it_were_complete() -> None:
    pool = filled()
    with pytest.raises(AssertionError, match="kept tokens only"):
        pool.write(1, SEQUENCE_ID, span(0, 4), *torch.zeros(2, 4, KV_HEADS, HEAD_DIM))


def test_equal_heads_of_neighbouring_slots_are_one_slice_without_a_copy() -> None:
    pool = filled()
    (block,) = pool.kept_blocks(1, SEQUENCE_ID)
    assert (block.heads, len(block.k_thd)) == (slice(0, KV_HEADS), 3)
    pool.k.fill_(7.0)
    assert (block.k_thd == 7.0).all()


def test_the_next_owner_of_the_slots_sees_nothing() -> None:
    pool = filled()
    pool.slots.free_sequence(SEQUENCE_ID)
    pool.slots.allocate(SEQUENCE_ID, [span(0, 4)])
    assert not pool.narrowed(1, SEQUENCE_ID)


# --- layers with a window --------------------------------------------------------------------


@given(
    window=st.integers(1, 9),
    prompt=st.integers(1, 25),
    answer=st.integers(1, 40),
    taken=st.sets(st.integers(0, 19), max_size=11),
)
def test_a_ring_has_the_window_of_every_row(
    window: int, prompt: int, answer: int, taken: set[int]
) -> None:
    """Wherever slots are free, and although each token replaces one."""
    pool = KvPool(
        layers=3,
        slots=1,
        kv_heads=1,
        head_dim=1,
        dtype=torch.float64,
        device="cpu",
        windowed=frozenset({1, 2}),
        window_slots=20,
    )
    slots = pool.window_slots
    assert slots is not None
    for other in range(20):
        slots.allocate(100 + other, [span(0, 1)])
    for other in range(20):
        if other not in taken:
            slots.free_sequence(100 + other)
    positions = near_ring(window, prompt, prompt + answer)
    slots.allocate(SEQUENCE_ID, [positions])
    assert slots.used - len(taken) == min(window, answer + min(prompt, window - 1))
    ring = pool.ring(SEQUENCE_ID, positions, window)
    before = positions.intersection(span(0, prompt))
    values = torch.tensor(list(before.positions), dtype=torch.float64).view(-1, 1, 1)
    pool.write(2, SEQUENCE_ID, before, values, -values)
    for position in range(prompt, prompt + answer):
        value = torch.full((1, 1, 1), position, dtype=torch.float64)
        pool.write_slots(2, torch.tensor([ring.slot(position)]), value, -value)
        runs = ring.runs_behind(position - window)
        for tensor, sign in zip(pool.layer(2), (1, -1), strict=True):
            seen = torch.cat([tensor[run.start : run.stop] for run in runs]).flatten() * sign
            assert sorted(seen.tolist()) == list(range(max(0, position - window + 1), position + 1))
    slots.check_integrity()
