"""KV in 8 bits against its definition: one head at a time, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from rounded_reference import rounded, whole_numbers
from torch import Tensor

from csps.kernels import cpu_attention
from csps.kernels.arguments import ChunkRuns, SlotRuns
from csps.kernels.attention import chunk_attention, decode_attention
from csps.kernels.quantized_kv import INT8, dequantized, quantized, round_kv, row_width

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def keys(draw: st.DrawFn) -> Tensor:
    """Draw keys or values whose heads differ in size by up to ten orders of magnitude."""
    tokens, heads = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    dim, dtype = draw(st.sampled_from([1, 2, 6, 16, 32, 128])), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    x_thd = torch.randn(tokens, heads, dim, generator=generator)
    x_thd *= 10 ** torch.empty(tokens, heads, 1).uniform_(-6, 3, generator=generator)
    if draw(st.booleans()):  # ties: whole multiples of half a scale
        x_thd = (x_thd * 254 / x_thd.abs().amax(-1, keepdim=True)).round()
    if tokens and draw(st.booleans()):
        x_thd[draw(st.integers(0, tokens - 1))] = 0.0
    return x_thd.to(dtype)


@settings(max_examples=examples(300), deadline=None)
@given(x_thd=keys())
def test_numbers_and_scales_are_those_of_the_definition(x_thd: Tensor) -> None:
    x_thb, dim = quantized(x_thd), x_thd.shape[2]
    assert (x_thb.dtype, x_thb.shape) == (INT8, (*x_thd.shape[:2], row_width(dim, INT8)))
    whole, scales = whole_numbers(x_thd)
    assert np.array_equal(x_thb[..., :dim].numpy(), whole)
    stored = x_thb[..., dim:].numpy().tobytes()
    assert np.array_equal(np.frombuffer(stored, "<f4").reshape(scales.shape), scales)


@settings(max_examples=examples(300), deadline=None)
@given(x_thd=keys())
def test_rounding_equals_storing_and_happens_once(x_thd: Tensor) -> None:
    found = x_thd.clone()
    round_kv(found)
    assert torch.equal(found, rounded(x_thd))
    assert torch.equal(found, dequantized(quantized(x_thd), x_thd.dtype))
    again = found.clone()
    round_kv(again)
    assert torch.equal(again, found)
    assert torch.equal(dequantized(quantized(found), x_thd.dtype), found)
    largest = x_thd.float().abs().amax(-1, keepdim=True)
    few_bits = torch.finfo(x_thd.dtype).eps + 2**-24 / largest.clamp_min(2**-24)
    assert ((found.float() - x_thd.float()).abs() <= largest * (0.5 / 127 + few_bits)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_of_the_heads_are_rounded_in_place(dtype: torch.dtype) -> None:
    """The rows of a block of tokens lie apart in the tensor of keys and values."""
    kv_2thd = torch.randn(2, 9, 3, 16).to(dtype)
    before = kv_2thd.clone()
    round_kv(kv_2thd[:, 2:5])
    assert torch.equal(kv_2thd[:, 2:5], rounded(before[:, 2:5]))
    assert torch.equal(kv_2thd[:, :2], before[:, :2])
    assert torch.equal(kv_2thd[:, 5:], before[:, 5:])


def test_no_number_is_hidden_by_rounding() -> None:
    x_thd = torch.randn(2, 2, 8)
    x_thd[0, 0, 3], x_thd[1, 1, 2] = torch.nan, torch.inf
    round_kv(x_thd)
    assert not x_thd[0, 0].isfinite().any()
    assert not x_thd[1, 1].isfinite().any()
    assert x_thd[0, 1].isfinite().all()
    assert x_thd[1, 0].isfinite().all()


@settings(max_examples=examples(60), deadline=None)
@given(
    heads=st.sampled_from([(2, 1, 6), (4, 2, 32), (3, 3, 16)]),
    block=st.sampled_from([3, 64, 4096]),
    seed=st.integers(0, 1000),
)
def test_torchs_kernel_reads_it_where_nothing_is_compiled(
    heads: tuple[int, int, int], block: int, seed: int
) -> None:
    """Runs of rows, a row without keys, and chunks of prompts, in small blocks and whole."""
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(7, query_heads, dim, generator=generator)
    k, v = (torch.randn(90, kv_heads, dim, generator=generator) for _ in range(2))
    stored = quantized(k), quantized(v)
    rows = {0: [(3, 50)], 2: [(0, 1), (10, 90)], 3: [(7, 8)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "DEQUANTIZED_KEYS", block)
        patch.setattr(cpu_attention, "prepared", lambda *_: None)
        runs = SlotRuns(4, [(row, *run) for row, own in rows.items() for run in own])
        out, lse = decode_attention(q[:4], *stored, runs)
        chunks = ChunkRuns([3, 4], [[range(5, 60)], [range(9), range(30, 31)]])
        chunk_out, chunk_lse = chunk_attention(q, *stored, chunks)

    def expected(row: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        seen = rounded(k[slots]), rounded(v[slots])
        of_row, lse_h1 = dense_attention(q[[row]], *seen, q_positions=None, k_positions=None)
        return of_row[0], lse_h1[:, 0]

    for row, own in rows.items():
        by_definition = expected(row, [slot for run in own for slot in range(*run)])
        near((out[row], lse[row]), by_definition)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    for row in range(7):
        slots = [*range(5, 60)] if row < 3 else [*range(9), 30]
        near((chunk_out[row], chunk_lse[:, row]), expected(row, slots))


def near(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["width", "heads", "other"])
def test_tensors_that_do_not_match_are_refused(wrong: str) -> None:
    q, k = torch.randn(1, 4, 8), quantized(torch.randn(5, 3 if wrong == "heads" else 2, 8))
    v = torch.randn(5, 2, 12) if wrong == "other" else k
    if wrong == "width":
        q = torch.randn(1, 4, 12)
    with pytest.raises(ValueError, match=r"attention takes q|query heads"):
        decode_attention(q, k, v, SlotRuns(1, [(0, 0, 5)]))
