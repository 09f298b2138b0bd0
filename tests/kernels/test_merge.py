"""Merging: attention over parts equals attention over the whole, whatever the parts."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge, merge_into

Part = tuple[Tensor, Tensor]
LSE = st.sampled_from([-torch.inf, -1e4, -3.0, 0.0, 2.5, 1e4])


def part(lses: list[float], seed: int) -> Part:
    """One part of one head; a row that saw nothing has out 0."""
    lse_ht = torch.tensor([lses], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    out_thd = torch.randn(len(lses), 1, 4, generator=generator, dtype=torch.float64)
    return out_thd.masked_fill((lse_ht == -torch.inf).T[..., None], 0.0), lse_ht


def merged(parts: list[Part]) -> Part:
    return merge([out for out, _ in parts], [lse for _, lse in parts])


def assert_same(a: Part, b: Part) -> None:
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-12)


@st.composite
def part_lists(draw: st.DrawFn, least: int = 1) -> list[Part]:
    rows = draw(st.integers(1, 4))
    lses = draw(st.lists(st.lists(LSE, min_size=rows, max_size=rows), min_size=least, max_size=5))
    return [part(row, seed) for seed, row in enumerate(lses)]


@given(part_lists(), st.randoms(use_true_random=False))
def test_order_does_not_matter(parts: list[Part], random: Random) -> None:
    shuffled = random.sample(parts, len(parts))
    assert_same(merged(parts), merged(shuffled))


@given(part_lists(least=2), st.data())
def test_grouping_does_not_matter(parts: list[Part], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(parts) - 1))
    assert_same(merged([merged(parts[:cut]), merged(parts[cut:])]), merged(parts))


@given(part_lists())
def test_a_part_that_saw_nothing_changes_nothing(parts: list[Part]) -> None:
    rows = parts[0][1].shape[1]
    nothing = part([-torch.inf] * rows, 0)
    assert_same(merged([nothing, *parts, nothing]), merged(parts))
    assert_same(merged(parts[:1]), parts[0])


@given(part_lists())
def test_accumulating_in_place_is_the_same(parts: list[Part]) -> None:
    out_thd, lse_ht = (x.clone() for x in parts[0])
    for other_thd, other_ht in parts[1:]:
        merge_into(out_thd, lse_ht, other_thd, other_ht)
    assert_same((out_thd, lse_ht), merged(parts))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_the_keys_equal_the_whole(shift: float, dtype: torch.dtype) -> None:
    """Key 0 is aligned with the queries so that scores move by +-1e4 where it is asked."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(50, 2, 16, generator=generator, dtype=dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 100.0, shift / 100.0
    positions = torch.arange(50)
    parts = [
        attention(q, k[a:b], v[a:b], q_positions=positions, k_positions=positions[a:b], scale=1.0)
        for a, b in pairwise([0, 7, 7, 30, 50])
    ]
    want = dense_attention(q, k, v, q_positions=positions, k_positions=positions, scale=1.0)
    out_thd, lse_ht = merged(parts)
    atol = 1e-10 if dtype is torch.float64 else (2e-2 if shift else 1e-4)
    torch.testing.assert_close(out_thd.double(), want[0], atol=atol, rtol=0)
    torch.testing.assert_close(lse_ht.double(), want[1], atol=atol, rtol=1e-6)


@pytest.mark.parametrize("lse", [1e4, -1e4])
def test_weights_sum_to_one_however_large_the_lse(lse: float) -> None:
    ones = torch.ones(4, 1, 8)
    lses = [torch.full((1, 4), lse), torch.full((1, 4), lse - 0.3), torch.full((1, 4), lse - 1)]
    out_thd, lse_ht = merge([ones] * 3, lses)
    torch.testing.assert_close(out_thd, ones, atol=1e-6, rtol=0)
    merge_into(out_thd, lse_ht, ones, lses[0])
    torch.testing.assert_close(out_thd, ones, atol=1e-6, rtol=0)


def test_merge_refuses_unequal_lists() -> None:
    with pytest.raises(ValueError, match="as many"):
        merge([], [])
    with pytest.raises(ValueError, match="as many"):
        merge([torch.zeros(1, 1, 1)], [])


def test_parts_may_come_in_half_precision() -> None:
    """As they do over the wire."""
    parts = [some_rows(9, seed) for seed in range(3)]
    want = merged([(out.bfloat16().float(), lse) for out, lse in parts])
    halves = [(out.bfloat16(), lse) for out, lse in parts]
    torch.testing.assert_close(merged(halves), want, atol=1e-6, rtol=1e-6)
    out_thd, lse_ht = halves[0][0].float(), halves[0][1]
    for part in halves[1:]:
        merge_into(out_thd, lse_ht, *part)
    torch.testing.assert_close((out_thd, lse_ht), want, atol=1e-6, rtol=1e-6)


def some_rows(rows: int, seed: int) -> Part:
    """Six heads of 24, of which a third saw nothing."""
    generator = torch.Generator().manual_seed(seed)
    lse_ht = torch.randn(6, rows, generator=generator)
    lse_ht[torch.rand(6, rows, generator=generator) < 0.3] = -torch.inf
    out_thd = torch.randn(rows, 6, 24, generator=generator)
    return out_thd.masked_fill((lse_ht == -torch.inf).T[..., None], 0.0), lse_ht


def kept_rows(rows: int, keep: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(rows, generator=generator)[:keep] for _ in range(3)])


def test_a_part_with_rows_for_some_tokens_leaves_the_others_alone() -> None:
    out_thd, lse_ht = some_rows(40, seed=0)
    part_khd, part_hk = some_rows(11, seed=1)
    kept_gk = kept_rows(40, 11)
    spread_thd, spread_ht = torch.zeros_like(out_thd), torch.full_like(lse_ht, -torch.inf)
    for head in range(6):
        spread_thd[kept_gk[head // 2], head] = part_khd[:, head]
        spread_ht[head, kept_gk[head // 2]] = part_hk[head]
    want = merged([(out_thd, lse_ht), (spread_thd, spread_ht)])
    merge_into(out_thd, lse_ht, part_khd, part_hk, kept_gk)
    torch.testing.assert_close((out_thd, lse_ht), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("keep", [None, 11])
def test_triton_merges_into_the_same(keep: int | None, triton_device: str) -> None:
    from csps.kernels import triton_merge

    running = some_rows(40, seed=2)
    part = some_rows(keep or 40, seed=3)
    kept_gk = None if keep is None else kept_rows(40, keep)
    got = [x.to(triton_device, copy=True) for x in running]
    part_khd, part_hk = (x.to(triton_device) for x in part)
    kept = None if kept_gk is None else kept_gk.to(triton_device)
    triton_merge.merge_into(got[0], got[1], part_khd, part_hk, kept)
    merge_into(*running, *part, kept_gk)
    torch.testing.assert_close([x.cpu() for x in got], list(running), atol=1e-6, rtol=1e-6)


def test_triton_merges_stacked_parts_the_same(triton_device: str) -> None:
    from csps.kernels import triton_merge

    parts = [some_rows(21, seed) for seed in range(4)]
    outs, lses = (torch.stack(x).to(triton_device) for x in zip(*parts, strict=True))
    got = [x.cpu() for x in triton_merge.merge_stacked(outs, lses)]
    torch.testing.assert_close(got, list(merged(parts)), atol=1e-6, rtol=1e-6)
