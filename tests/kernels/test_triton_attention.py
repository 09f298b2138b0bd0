"""The Triton attention against the fp64 oracle: natively on a GPU, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from property_examples import examples
from token_layouts import SMALL_LAYOUTS, batches, random_qkv
from torch import Tensor

pytest.importorskip("triton")

from csps.kernels import triton_attention, triton_importance
from csps.kernels.arguments import Positions
from csps.kernels.triton_blocks import padded_dim


def on_device(device: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out_thd, lse_ht = triton_attention.attention(
        q.to(device),
        k.to(device),
        v.to(device),
        _to(device, kwargs["q_positions"]),
        _to(device, kwargs["k_positions"]),
        kwargs.get("scale") or q.shape[2] ** -0.5,
        kwargs.get("cu_seqlens_q"),
        kwargs.get("cu_seqlens_k"),
        kwargs.get("window"),
    )
    return out_thd.cpu().double(), lse_ht.cpu().double()


def _to(device: str, positions: Positions | None) -> Positions | None:
    return positions.to(device) if isinstance(positions, Tensor) else positions


def check(device: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    got = on_device(device, q, k, v, **kwargs)
    torch.testing.assert_close(got, dense_attention(q, k, v, **kwargs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_layouts(layout: str, triton_device: str) -> None:
    q_positions, k_positions = SMALL_LAYOUTS[layout]
    q, k, v = random_qkv(3, len(q_positions), len(k_positions), dtype=torch.float32)
    check(triton_device, q, k, v, q_positions=q_positions, k_positions=k_positions)


@pytest.mark.parametrize(
    "window", [7, pytest.param(1, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_windows(layout: str, window: int, triton_device: str) -> None:
    q_positions, k_positions = SMALL_LAYOUTS[layout]
    q, k, v = random_qkv(3, len(q_positions), len(k_positions), dtype=torch.float32)
    check(triton_device, q, k, v, q_positions=q_positions, k_positions=k_positions, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (6, 2), (40, 1)])
@pytest.mark.parametrize("dim", [16, 24, 80, 128, 256])
def test_groups_and_head_dims(heads: int, kv_heads: int, dim: int, triton_device: str) -> None:
    q, k, v = random_qkv(4, 9, 41, heads, kv_heads, dim, torch.float32)
    q_positions, k_positions = torch.arange(32, 41), torch.arange(41)
    check(triton_device, q, k, v, q_positions=q_positions, k_positions=k_positions)


def test_every_key_is_seen_without_positions(triton_device: str) -> None:
    q, k, v = random_qkv(5, 33, 70, dtype=torch.float32)
    check(triton_device, q, k, v, q_positions=None, k_positions=None)


@settings(max_examples=examples(12))
@given(batches(longest=70))
def test_variable_length_batches(triton_device: str, batch: dict[str, Any]) -> None:
    q, k, v = (tensor.float() for tensor in batch.pop("qkv"))
    if len(q) and len(k):
        check(triton_device, q, k, v, **batch)


@pytest.mark.parametrize("layout", ["decode", "decode of a few", "future only"])
def test_keys_are_split_when_queries_are_few(
    layout: str, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attention, "processors", lambda _: 64)
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_BLOCKS", 1)
    q_positions, k_positions = SMALL_LAYOUTS[layout]
    q, k, v = random_qkv(6, len(q_positions), len(k_positions), dtype=torch.float32)
    check(triton_device, q, k, v, q_positions=q_positions, k_positions=k_positions)


def test_ranges_are_positions(triton_device: str) -> None:
    q, k, v = random_qkv(7, 20, 50, dtype=torch.float32)
    got = on_device(triton_device, q, k, v, q_positions=range(30, 50), k_positions=range(50))
    want = dense_attention(q, k, v, q_positions=torch.arange(30, 50), k_positions=torch.arange(50))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_its_own_rounding(dtype: torch.dtype, triton_device: str) -> None:
    q, k, v = random_qkv(8, 50, 50, dim=64, dtype=dtype)
    positions = torch.arange(50)
    got = on_device(triton_device, q, k, v, q_positions=positions, k_positions=positions)
    want = dense_attention(q, k, v, q_positions=positions, k_positions=positions)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-3)


def test_fp64_is_refused(triton_device: str) -> None:
    with pytest.raises(ValueError, match="fp64"):
        on_device(triton_device, *random_qkv(9, 3, 3), q_positions=None, k_positions=None)


CARDS = {"L40": 99 * 1024, "A100": 163 * 1024, "H100": 227 * 1024}
"""Bytes of shared memory that a program may have."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 7, 32])
@pytest.mark.parametrize(
    "rows",
    [triton_attention.TOKEN_ROWS, triton_attention.SHORT_ROWS, triton_attention.LONG_ROWS],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("card", CARDS)
def test_a_tile_holds_whole_groups_and_fits_the_cards_shared_memory(
    dtype: torch.dtype, group: int, rows: int, head_dim: int, card: str
) -> None:
    tiling = triton_attention.choose_tiling(dtype, head_dim, group, rows, CARDS[card])
    assert tiling.block_m >= group
    assert tiling.block_n >= 16
    elements = padded_dim(head_dim) * (tiling.block_m + 2 * tiling.stages * tiling.block_n)
    assert elements * dtype.itemsize < CARDS[card]
    block_m, block_n = triton_importance.choose_blocks(dtype, head_dim, group, CARDS[card])
    assert min(block_m, block_n) >= max(16, group // 4)
    assert padded_dim(head_dim) * (2 * block_m + block_n) * dtype.itemsize < CARDS[card]


def test_a_larger_card_gets_the_larger_tile() -> None:
    """What is tuned for Hopper stays."""
    half, rows = torch.bfloat16, triton_attention.LONG_ROWS
    choose = triton_attention.choose_tiling
    assert choose(half, 128, 4, rows, CARDS["H100"]).block_n == 128
    assert choose(half, 128, 4, rows, CARDS["L40"]).block_n == 64
    assert choose(half, 256, 4, rows, CARDS["H100"]).block_n == 64
    assert choose(half, 256, 4, rows, CARDS["A100"]).block_n == 32
