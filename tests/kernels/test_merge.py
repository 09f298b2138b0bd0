"""Merging: attention over any parts of the keys equals attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge, merge_into, merge_rows

Part = tuple[Tensor, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LSE = st.sampled_from([-torch.inf, -1e4, -3.0, 0.0, 2.5, 1e4])


def part(lses: list[float], seed: int) -> Part:
    """Return one part of one head; a row that saw nothing has out 0."""
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
    out_thd, lse_ht = (tensor.clone() for tensor in parts[0])
    for other_thd, other_ht in parts[1:]:
        merge_into(out_thd, lse_ht, other_thd, other_ht)
    assert_same((out_thd, lse_ht), merged(parts))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_the_keys_equal_the_whole(shift: float, dtype: torch.dtype) -> None:
    """Align dimension 0 of queries and keys so that all scores move by `shift`."""
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
    parts = [some_rows(9, seed) for seed in range(3)]
    want = merged([(out.bfloat16().float(), lse) for out, lse in parts])
    halves = [(out.bfloat16(), lse) for out, lse in parts]
    torch.testing.assert_close(merged(halves), want, atol=1e-6, rtol=1e-6)
    out_thd, lse_ht = halves[0][0].float(), halves[0][1]
    for part in halves[1:]:
        merge_into(out_thd, lse_ht, *part)
    torch.testing.assert_close((out_thd, lse_ht), want, atol=1e-6, rtol=1e-6)


def some_rows(rows: int, seed: int) -> Part:
    """Return six heads of dim 24; a third of the rows saw nothing."""
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


def block(x_thd: Tensor, x_ht: Tensor, device: str) -> tuple[Part, Part]:
    """Copy a part into a block of rows and heads; return the block and the whole around it."""
    tokens, heads, dim = x_thd.shape
    rows, owned = slice(3, 3 + tokens), slice(2, 2 + heads)
    whole_thd = torch.full((tokens + 10, heads + 3, dim), 7.0)
    whole_ht = torch.full((heads + 3, tokens + 10), 7.0)
    whole_thd[rows, owned], whole_ht[owned, rows] = x_thd.float(), x_ht.float()
    whole = whole_thd.to(device), whole_ht.to(device)
    return (whole[0][rows, owned], whole[1][owned, rows]), whole


def assert_nothing_beside(part: Part, whole: Part) -> None:
    """Check that nothing around the block has changed."""
    for inside, around in zip(part, whole, strict=True):
        inside.fill_(7.0)
        assert (around == 7.0).all()


def dense_parts(cuts: list[int], shift: float = 0.0) -> tuple[list[Part], Part]:
    """Attend 50 queries in fp64, of which the first five see nothing, over parts of the keys (the
    last part first) and over all keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = (50, 6, 24), (50, 3, 24), (50, 3, 24)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q[..., 0], k[..., 0] = 100.0, shift / 100.0
    q_positions, k_positions = torch.arange(50), torch.arange(5, 55)
    *parts, whole = (
        dense_attention(
            q, k[a:b], v[a:b], q_positions=q_positions, k_positions=k_positions[a:b], scale=1.0
        )
        for a, b in [*reversed(list(pairwise(cuts))), (0, 50)]
    )
    return parts, whole


def assert_near_fp64(got: Sequence[Tensor], want: Sequence[Tensor], shift: float = 0.0) -> None:
    atol = 2e-2 if shift else 1e-5  # at |lse| = 1e4 fp32 has three decimals
    found = [tensor.cpu().double() for tensor in got]
    torch.testing.assert_close(found, list(want), atol=atol, rtol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_triton_merges_parts_of_the_keys_into_a_block(shift: float, triton_device: str) -> None:
    from csps.kernels import triton_merge

    (first, *others), want = dense_parts([0, 7, 7, 30, 50], shift)
    running, whole = block(*first, triton_device)
    for other in others:
        triton_merge.merge_into(*running, *block(*other, triton_device)[0], None)
    assert_near_fp64(running, want, shift)
    assert_nothing_beside(running, whole)


def test_triton_merges_rows_of_some_tokens_into_a_block(triton_device: str) -> None:
    from csps.kernels import triton_merge

    ((late_thd, late_ht), (early_thd, early_ht)), (all_thd, all_ht) = dense_parts([0, 30, 50])
    kept_gk = kept_rows(50, 11)
    kept_hk = kept_gk.repeat_interleave(2, dim=0)
    part_khd, part_hk = early_thd[kept_hk.T, torch.arange(6)], early_ht.gather(1, kept_hk)
    running, whole = block(late_thd, late_ht, triton_device)
    part, _ = block(part_khd, part_hk, triton_device)
    triton_merge.merge_into(*running, *part, kept_gk.to(triton_device))
    is_kept_ht = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, kept_hk, True)
    want_thd = torch.where(is_kept_ht.T[..., None], all_thd, late_thd)
    assert_near_fp64(running, (want_thd, torch.where(is_kept_ht, all_ht, late_ht)))
    assert_nothing_beside(running, whole)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_triton_merges_stacked_parts_of_the_keys(shift: float, triton_device: str) -> None:
    from csps.kernels import triton_merge

    parts, want = dense_parts([0, 7, 7, 30, 50], shift)
    outs, lses = (torch.stack(side).float().to(triton_device) for side in zip(*parts, strict=True))
    assert_near_fp64(triton_merge.merge_stacked(outs, lses), want, shift)


PartsOfRows = tuple[list[int], list[list[float]], int]
"""Row of each part, LSEs of each part by head, and number of rows; some may have no part."""


@st.composite
def parts_of_rows(draw: st.DrawFn) -> PartsOfRows:
    rows = draw(st.integers(1, 5))
    row_n = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=40))
    heads = draw(st.integers(1, 3))
    lses = [draw(st.lists(LSE, min_size=heads, max_size=heads)) for _ in row_n]
    return row_n, lses, rows


@settings(max_examples=examples(30), deadline=None)
@given(parts_of_rows())
def test_parts_of_rows_are_merged_row_by_row(
    case: tuple[list[int], list[list[float]], int],
) -> None:
    """Merge on the CPU, and in Triton by one kernel."""
    from csps.kernels import triton_merge

    rows_of_parts, lses, rows = case
    row_n, lse_nh = torch.tensor(rows_of_parts), torch.tensor(lses, dtype=torch.float64)
    generator = torch.Generator().manual_seed(len(lses))
    out_nhd = torch.randn(*lse_nh.shape, 4, generator=generator, dtype=torch.float64)
    out_nhd.masked_fill_((lse_nh == -torch.inf)[..., None], 0.0)
    out_rhd, lse_rh = merge_rows(out_nhd, lse_nh, row_n, rows)
    for row in range(rows):
        own = [part for part, row_of_part in enumerate(rows_of_parts) if row_of_part == row]
        if not own:
            assert (lse_rh[row] == -torch.inf).all()
            assert not out_rhd[row].any()
            continue
        want = merge([out_nhd[part][None] for part in own], [lse_nh[part][:, None] for part in own])
        assert_same((out_rhd[row][None], lse_rh[row][:, None]), want)
    got = triton_merge.merge_rows(
        out_nhd.float().to(DEVICE), lse_nh.float().to(DEVICE), row_n.to(DEVICE), rows
    )
    found = [tensor.cpu().double() for tensor in got]
    torch.testing.assert_close(found, [out_rhd, lse_rh], atol=2e-3, rtol=1e-5)
