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
