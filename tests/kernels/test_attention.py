"""Attention against the fp64 oracle, over shapes and position layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from token_layouts import LAYOUTS, batches, random_qkv
from torch import Tensor

from csps.kernels.attention import attention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    out_thd, lse_ht = attention(q, k, v, **kwargs)
    want_thd, want_ht = dense_attention(q, k, v, **kwargs)
    atol = TOLERANCE[q.dtype]
    assert out_thd.shape == q.shape
    assert out_thd.dtype == lse_ht.dtype == q.dtype
    torch.testing.assert_close(out_thd.double(), want_thd, atol=atol, rtol=0)
    torch.testing.assert_close(lse_ht.double(), want_ht, atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    q_positions, k_positions = LAYOUTS[layout]
    q, k, v = random_qkv(3, len(q_positions), len(k_positions), dtype=dtype)
    check(q, k, v, q_positions=q_positions, k_positions=k_positions)


def test_positions_left_out_mean_everything_is_seen() -> None:
    check(*random_qkv(4, 40, 70), q_positions=None, k_positions=None)


@st.composite
def ranges(draw: st.DrawFn) -> range:
    start, step = draw(st.integers(0, 90)), draw(st.sampled_from([1, 1, 2]))
    return range(start, start + step * draw(st.integers(1, 90)), step)


@settings(max_examples=examples(60))
@given(q_positions=ranges(), k_positions=ranges())
def test_ranges_of_positions_mean_their_positions(q_positions: range, k_positions: range) -> None:
    q, k, v = random_qkv(9, len(q_positions), len(k_positions))
    out_thd, lse_ht = attention(q, k, v, q_positions=q_positions, k_positions=k_positions)
    q_at, k_at = torch.tensor(q_positions), torch.tensor(k_positions)
    want = dense_attention(q, k, v, q_positions=q_at, k_positions=k_at)
    torch.testing.assert_close((out_thd, lse_ht), want, atol=1e-10, rtol=1e-10)


@settings(max_examples=examples(60))
@given(batches())
def test_variable_length_batches(batch: dict[str, Any]) -> None:
    q, k, v = batch.pop("qkv")
    check(q, k, v, **batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["whole prompt", "chunk after history", "shuffled", "decode"])
def test_half_precision_stays_near_its_own_rounding(layout: str, dtype: torch.dtype) -> None:
    q_positions, k_positions = LAYOUTS[layout]
    q, k, v = random_qkv(5, len(q_positions), len(k_positions), dtype=dtype)
    out_thd, lse_ht = attention(q, k, v, q_positions=q_positions, k_positions=k_positions)
    want_thd, want_ht = dense_attention(q, k, v, q_positions=q_positions, k_positions=k_positions)
    assert out_thd.dtype == lse_ht.dtype == torch.float32
    torch.testing.assert_close(out_thd.double(), want_thd, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse_ht.double(), want_ht, atol=1e-3, rtol=0)


def test_strided_inputs_and_permuted_heads_are_read_where_they_lie() -> None:
    qkv = torch.randn(90, 8, 32, dtype=torch.float64)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    check(q, k, v, q_positions=torch.arange(90), k_positions=torch.arange(90))
    sparse = [tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1) for tensor in (q, k, v)]
    check(*sparse, q_positions=torch.arange(90), k_positions=torch.arange(90))


@pytest.mark.parametrize(("q_tokens", "k_tokens"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see_is_zero_and_minus_infinity(q_tokens: int, k_tokens: int) -> None:
    q, k, v = random_qkv(6, q_tokens, k_tokens, dtype=torch.float32)
    out_thd, lse_ht = attention(
        q, k, v, q_positions=torch.arange(q_tokens), k_positions=torch.arange(k_tokens)
    )
    assert torch.equal(out_thd, torch.zeros_like(q))
    assert torch.equal(lse_ht, torch.full((4, q_tokens), -torch.inf))


def test_cu_seqlens_may_be_a_tensor() -> None:
    q, k, v = random_qkv(7, 30, 30)
    positions = torch.cat([torch.arange(10), torch.arange(20)])
    offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
    got = attention(
        q, k, v, q_positions=positions, k_positions=positions,
        cu_seqlens_q=offsets, cu_seqlens_k=offsets,
    )  # fmt: skip
    want = attention(
        q, k, v, q_positions=positions, k_positions=positions,
        cu_seqlens_q=[0, 10, 30], cu_seqlens_k=[0, 10, 30],
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "positions"),
    [
        ([(3, 4, 8), (5, 3, 8)], "ff", (3, 5)),  # heads do not divide
        ([(3, 4, 8), (5, 2, 4)], "ff", (3, 5)),  # head dims differ
        ([(3, 4, 8), (5, 2, 8)], "fd", (3, 5)),  # dtypes differ
        ([(3, 4, 8), (5, 2, 8)], "ff", (3, 4)),  # a position short
        ([(3, 32), (5, 2, 8)], "ff", (3, 5)),  # heads not split
    ],
)
def test_arguments_that_do_not_match_are_refused(
    shapes: list[tuple[int, ...]], dtypes: str, positions: tuple[int, int]
) -> None:
    kinds = {"f": torch.float32, "d": torch.float64}
    q, k = (torch.zeros(s, dtype=kinds[d]) for s, d in zip(shapes, dtypes, strict=True))
    q_positions, k_positions = (torch.arange(count) for count in positions)
    with pytest.raises(ValueError, match=r"heads|dtype|positions|takes"):
        attention(q, k, k, q_positions=q_positions, k_positions=k_positions)


def test_offsets_must_cover_the_tokens() -> None:
    q, k, v = random_qkv(8, 3, 3)
    with pytest.raises(ValueError, match="cover 3 tokens"):
        attention(
            q, k, v, q_positions=None, k_positions=None, cu_seqlens_q=[0, 2], cu_seqlens_k=[0, 3]
        )


def test_one_sided_arguments_are_refused() -> None:
    q, k, v = random_qkv(8, 3, 3)
    with pytest.raises(ValueError, match="together"):
        attention(q, k, v, q_positions=torch.arange(3), k_positions=None)
    with pytest.raises(ValueError, match="together"):
        attention(q, k, v, q_positions=None, k_positions=None, cu_seqlens_q=[0, 3])


@pytest.mark.parametrize("window", [1, 7, 100, 300, 5000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows(layout: str, window: int) -> None:
    q_positions, k_positions = LAYOUTS[layout]
    q, k, v = random_qkv(3, len(q_positions), len(k_positions))
    check(q, k, v, q_positions=q_positions, k_positions=k_positions, window=window)


@settings(max_examples=examples(60))
@given(batch=batches(), window=st.integers(1, 220))
def test_windows_of_variable_length_batches(batch: dict[str, Any], window: int) -> None:
    q, k, v = batch.pop("qkv")
    check(q, k, v, **batch, window=window)


@settings(max_examples=examples(60))
@given(q_positions=ranges(), k_positions=ranges(), window=st.integers(1, 200))
def test_windows_over_ranges(q_positions: range, k_positions: range, window: int) -> None:
    q, k, v = random_qkv(9, len(q_positions), len(k_positions))
    got = attention(q, k, v, q_positions=q_positions, k_positions=k_positions, window=window)
    at = {"q_positions": torch.tensor(q_positions), "k_positions": torch.tensor(k_positions)}
    want = dense_attention(q, k, v, **at, window=window)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("window", "positions"), [(0, range(3)), (2, None)])
def test_windows_need_positions(window: int, positions: range | None) -> None:
    q, k, v = random_qkv(8, 3, 3)
    with pytest.raises(ValueError, match="window"):
        attention(q, k, v, q_positions=positions, k_positions=positions, window=window)
