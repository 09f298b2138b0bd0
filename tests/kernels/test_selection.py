"""Selection of tokens against sorting in Python: ascending, nested, reproducible."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csps.kernels.importance import gather_kept, select
from csps.kernels.merge import merge_into, nothing_seen

SCORES = st.sampled_from([0.0, 0.5, 0.5, 1.0, 2.0, 1e30])  # few values: ties are the rule


def best(scores: list[float], keep: int, always: list[bool]) -> list[int]:
    """Rank `always` first, then high before low, then early before late."""
    ranked = sorted(range(len(scores)), key=lambda t: (not always[t], -scores[t], t))
    return sorted(ranked[:keep])


@st.composite
def score_tables(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    tokens, heads = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    row = st.lists(SCORES, min_size=tokens, max_size=tokens)
    table = draw(st.lists(row, min_size=heads, max_size=heads))
    always = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return torch.tensor(table), torch.tensor(always)


@given(score_tables(), st.data())
def test_selects_the_best(table: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    scores_gt, always = table
    keep = data.draw(st.integers(int(always.sum()), len(always)))
    kept_gk = select(scores_gt, keep, always_t=always)
    want = [best(row.tolist(), keep, always.tolist()) for row in scores_gt]
    assert kept_gk.dtype == torch.int64
    assert kept_gk.tolist() == want


@given(score_tables())
def test_kept_sets_are_nested(table: tuple[Tensor, Tensor]) -> None:
    scores_gt, _ = table
    tokens = scores_gt.shape[1]
    sets = [[set(row) for row in select(scores_gt, keep).tolist()] for keep in range(tokens + 1)]
    for smaller, larger in pairwise(sets):
        assert all(a < b for a, b in zip(smaller, larger, strict=True))


@pytest.mark.parametrize("keep", [-1, 1, 6])
def test_a_keep_out_of_range_is_refused(keep: int) -> None:
    always = torch.tensor([True, False, False, False, True])
    with pytest.raises(ValueError, match="from 2 to 5"):
        select(torch.rand(2, 5), keep, always_t=always)


@pytest.mark.parametrize("heads", [2, 6])
def test_kept_rows_are_each_heads_own(heads: int) -> None:
    x_thd = torch.randn(30, heads, 8)
    kept_gk = select(torch.rand(2, 30), 7)
    x_khd = gather_kept(x_thd, kept_gk)
    for head in range(heads):
        assert torch.equal(x_khd[:, head], x_thd[kept_gk[head // (heads // 2)], head])


def test_gathered_rows_merge_back_where_they_came_from() -> None:
    x_thd, lse_ht = torch.randn(30, 6, 8), torch.randn(6, 30)
    kept_gk = select(torch.rand(2, 30), 7)
    out_thd, out_ht = nothing_seen(x_thd)
    kept_hk = kept_gk.repeat_interleave(3, dim=0)
    merge_into(out_thd, out_ht, gather_kept(x_thd, kept_gk), lse_ht.gather(1, kept_hk), kept_gk)
    is_kept_ht = torch.zeros(6, 30, dtype=torch.bool).scatter_(1, kept_hk, True)
    assert torch.equal(out_ht, lse_ht.masked_fill(~is_kept_ht, -torch.inf))
    assert torch.equal(out_thd, x_thd.masked_fill(~is_kept_ht.T[..., None], 0.0))


@pytest.mark.parametrize("kind", ["distinct", "ties", "signed", "infinite"])
@pytest.mark.parametrize(("tokens", "keep"), [(300, 100), (300, 1), (5, 5), (400, 399), (9, 0)])
def test_triton_selects_the_best(kind: str, tokens: int, keep: int, triton_device: str) -> None:
    from csps.kernels import triton_importance

    generator = torch.Generator().manual_seed(tokens + keep)
    scores_gt = torch.rand(3, tokens, generator=generator)
    scores_gt = {
        "distinct": scores_gt,
        "ties": (scores_gt * 4).floor(),
        "signed": scores_gt - 0.5,
        "infinite": scores_gt.masked_fill(scores_gt[0] < 0.2, torch.inf),
    }[kind]
    got = triton_importance.top_tokens(scores_gt.to(triton_device), keep)
    assert got.tolist() == [best(row.tolist(), keep, [False] * tokens) for row in scores_gt]


def test_triton_selects_over_several_blocks(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from csps.kernels import triton_importance

    monkeypatch.setattr(triton_importance, "BLOCK", 64)
    scores_gt = (torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) * 9).floor()
    for keep in (64, 130):
        got = triton_importance.top_tokens(scores_gt.to(triton_device), keep)
        assert got.tolist() == [best(row.tolist(), keep, [False] * 200) for row in scores_gt]
