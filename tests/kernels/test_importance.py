"""Importance of keys against the fp64 column sums of the whole probability matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_reference import dense_attention, dense_importance
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from token_layouts import LAYOUTS, SMALL_LAYOUTS, batches, random_qkv
from torch import Tensor

from csps.kernels import cpu_attention
from csps.kernels.importance import column_sums, importance, seeing_queries

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(q: Tensor, k: Tensor, **kwargs: Any) -> None:
    lse_ht = dense_attention(q, k, k, **kwargs)[1].to(q.dtype)
    got = importance(q, k, lse_ht, **kwargs)
    assert got.dtype == q.dtype
    want = dense_importance(q, k, **kwargs)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[q.dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    q_positions, k_positions = LAYOUTS[layout]
    q, k, _ = random_qkv(3, len(q_positions), len(k_positions), dtype=dtype)
    check(q, k, q_positions=q_positions, k_positions=k_positions)


@settings(max_examples=examples(60))
@given(batches())
def test_variable_length_batches(batch: dict[str, Any]) -> None:
    q, k, _ = batch.pop("qkv")
    check(q, k, **batch)


def test_tile_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "TILE_ROWS", 14)
    monkeypatch.setattr(cpu_attention, "TILE_KEYS", 9)
    q, k, _ = random_qkv(4, 60, 90, heads=6)
    check(q, k, q_positions=torch.arange(30, 90), k_positions=torch.arange(90))


def test_column_sums_add_up_to_one_per_row_and_head() -> None:
    q, k, _ = random_qkv(5, 50, 50)
    positions: dict[str, Any] = {"q_positions": range(50), "k_positions": range(50)}
    lse_ht = dense_attention(q, k, k, q_positions=torch.arange(50), k_positions=torch.arange(50))[1]
    assert column_sums(q, k, lse_ht, **positions).sum() == pytest.approx(50 * 4)
    assert seeing_queries(q, k, **positions).tolist() == list(range(50, 0, -1))


def test_micro_partitions_of_the_queries_add_up() -> None:
    q, k, _ = random_qkv(6, 80, 80)
    lse_ht = dense_attention(q, k, k, q_positions=torch.arange(80), k_positions=torch.arange(80))[1]
    whole = column_sums(q, k, lse_ht, q_positions=range(80), k_positions=range(80))
    parts = [
        column_sums(
            q[a : a + 20],
            k,
            lse_ht[:, a : a + 20],
            q_positions=range(a, a + 20),
            k_positions=range(80),
        )
        for a in range(0, 80, 20)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize(("q_tokens", "k_tokens"), [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(q_tokens: int, k_tokens: int) -> None:
    q, k, _ = random_qkv(7, q_tokens, k_tokens)
    got = importance(q, k, torch.zeros(4, q_tokens), q_positions=None, k_positions=None)
    assert torch.equal(got, torch.zeros(2, k_tokens, dtype=torch.float64))


def test_an_lse_of_other_queries_is_refused() -> None:
    q, k, _ = random_qkv(8, 5, 5)
    with pytest.raises(ValueError, match="lse of shape"):
        importance(q, k, torch.zeros(4, 6), q_positions=None, k_positions=None)


@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_triton_layouts(layout: str, triton_device: str) -> None:
    q_positions, k_positions = SMALL_LAYOUTS[layout]
    q, k, _ = random_qkv(3, len(q_positions), len(k_positions), dtype=torch.float32)
    check_triton(triton_device, q, k, q_positions=q_positions, k_positions=k_positions)


@settings(max_examples=examples(16))
@given(batches(longest=70), st.booleans())
def test_triton_variable_length_batches(
    triton_device: str, batch: dict[str, Any], all_seen: bool
) -> None:
    q, k, _ = (tensor.float() for tensor in batch.pop("qkv"))
    if all_seen:
        batch |= {"q_positions": None, "k_positions": None}
    if len(q) and len(k):
        check_triton(triton_device, q, k, **batch)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(("queries", "earlier"), [(40, 150), (90, 7), (1, 129)])
def test_triton_keys_of_earlier_members(
    heads: int, queries: int, earlier: int, triton_device: str
) -> None:
    """Pass no positions and the LSE over more keys than are given, as importance scorers do."""
    from csps.kernels import triton_importance

    q, k, v = random_qkv(9, queries, earlier + queries, heads=heads, dtype=torch.float32)
    positions: dict[str, Any] = {
        "q_positions": torch.arange(earlier, earlier + queries),
        "k_positions": torch.arange(earlier + queries),
    }
    lse_ht = dense_attention(q, k, v, **positions)[1].float()
    k_tgd, _ = torch.cat([k, v], dim=-1)[:earlier].to(triton_device).chunk(2, dim=-1)
    sums_gt = triton_importance.column_sums(
        q.to(triton_device), k_tgd, lse_ht.to(triton_device), None, None, 0.25, None, None
    )
    want = dense_importance(q, k, **positions)[:, :earlier]
    torch.testing.assert_close(sums_gt.cpu().double() / queries, want, atol=1e-5, rtol=1e-5)


def check_triton(device: str, q: Tensor, k: Tensor, **kwargs: Any) -> None:
    from csps.kernels import triton_importance

    lse_ht = dense_attention(q, k, k, **kwargs)[1].float()
    positions = (kwargs["q_positions"], kwargs["k_positions"])
    sums_gt = triton_importance.column_sums(  # type: ignore[call-arg]
        q.to(device),
        k.to(device),
        lse_ht.to(device),
        *(None if position is None else position.to(device) for position in positions),
        kwargs.get("scale") or q.shape[2] ** -0.5,
        kwargs.get("cu_seqlens_q"),
        kwargs.get("cu_seqlens_k"),
    )
    got = sums_gt.cpu() / seeing_queries(q, k, **_without_scale(kwargs)).clamp_min(1)
    torch.testing.assert_close(got.double(), dense_importance(q, k, **kwargs), atol=1e-5, rtol=1e-5)


def _without_scale(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "scale"}
