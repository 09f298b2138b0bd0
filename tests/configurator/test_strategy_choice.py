"""The formulas at their thresholds, and against sums written out pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.configurator.strategy_choice import (
    AttentionShape,
    GroupShape,
    Traffic,
    attention_prefers_ntp,
    choose_strategy,
    ntp_traffic,
    paper_prefers_ntp,
    sp_tp_traffic,
)

LLAMA_8B = AttentionShape(hidden=4096, heads=32, kv_heads=8, head_dim=128)
MHA = AttentionShape(hidden=4096, heads=32, kv_heads=32, head_dim=128)


@pytest.mark.parametrize(
    ("hidden", "ranks", "threshold"),
    [(16384, 3, 98_304), (4096, 4, 16_384), (4096, 8, 4096 * 16 // 6)],
)
def test_papers_threshold(hidden: int, ranks: int, threshold: int) -> None:
    """L > 2 d N / (N - 2); the paper's own example is 96K tokens."""
    assert not paper_prefers_ntp(hidden=hidden, tokens=threshold, ranks=ranks)
    assert paper_prefers_ntp(hidden=hidden, tokens=threshold + 1, ranks=ranks)


@given(hidden=st.integers(1, 20_000), tokens=st.integers(1, 10**7))
def test_two_ranks_never_prefer_ntp_by_the_papers_inequality(hidden: int, tokens: int) -> None:
    assert not paper_prefers_ntp(hidden=hidden, tokens=tokens, ranks=2)


@given(hidden=st.integers(1, 20_000), tokens=st.integers(1, 10**7), ranks=st.integers(2, 64))
def test_papers_inequality_is_its_own_sums(hidden: int, tokens: int, ranks: int) -> None:
    n, d, length = ranks, hidden, tokens
    ntp = 4 * d * d * (n - 1) * n + 4 * length * d * (n - 1)  # both times N
    assert paper_prefers_ntp(hidden=d, tokens=length, ranks=n) == (
        ntp < 2 * length * d * (n - 1) * n
    )


@given(hidden=st.integers(1, 20_000), tokens=st.integers(1, 10**7), ranks=st.integers(2, 64))
def test_without_grouping_it_is_the_papers(hidden: int, tokens: int, ranks: int) -> None:
    ours = attention_prefers_ntp(hidden=hidden, tokens=tokens, ranks=ranks, heads=8, kv_heads=8)
    assert ours == paper_prefers_ntp(hidden=hidden, tokens=tokens, ranks=ranks)


def test_threshold_with_grouped_queries() -> None:
    """kappa = 1/4: L (1 - 1.25/N) > 1.25 d; at N = 4 and d = 4096 L > 7447.27."""
    sizes = {"hidden": 4096, "ranks": 4, "heads": 32, "kv_heads": 8}
    assert not attention_prefers_ntp(tokens=7447, **sizes)
    assert attention_prefers_ntp(tokens=7448, **sizes)


def test_two_ranks_with_few_kv_heads_may_prefer_ntp() -> None:
    """kappa = 1/8, N = 2: L (1 - 1.125/2) > 1.125 d."""
    sizes = {"hidden": 7, "ranks": 2, "heads": 8, "kv_heads": 1}
    assert not attention_prefers_ntp(tokens=18, **sizes)  # 18 * 0.4375 = 1.125 * 7
    assert attention_prefers_ntp(tokens=19, **sizes)


def test_engines_threshold_counts_the_mlps_rows() -> None:
    """One instance of 4: W + 2(1 + kappa) L d / N < L d, that is L > 2.5 d / (1 - 2.5/4)."""
    group = GroupShape(servers=(0,), tp=4)
    assert choose_strategy(LLAMA_8B, group, 27_306) == "sp_tp"
    assert choose_strategy(LLAMA_8B, group, 27_307) == "sp_ntp"


def test_without_tensor_parallelism_ntp_is_never_worse_inside_a_server() -> None:
    """App. A's text: nothing has to be gathered."""
    for instances in (2, 3, 4, 8):
        group = GroupShape(servers=(0,) * instances, tp=1)
        for tokens in (1, 1000, 10**6):
            assert choose_strategy(MHA, group, tokens) == "sp_ntp"


def test_slow_links_between_servers_are_weighed() -> None:
    """Ranks of two instances on two servers: weights travel inside, rows between."""
    group, tokens = GroupShape(servers=(0, 1), tp=4), 6000
    assert choose_strategy(LLAMA_8B, group, tokens) == "sp_tp"
    assert choose_strategy(LLAMA_8B, group, tokens, between_weight=20.0) == "sp_ntp"


@st.composite
def groups(draw: st.DrawFn) -> GroupShape:
    servers = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
    return GroupShape(servers=servers, tp=draw(st.integers(1, 4)))


def spread_by_hand(group: GroupShape, *, hierarchical: bool, past_instance: bool) -> Traffic:
    """Of one element per rank."""
    ranks = [(instance, server) for instance, server in enumerate(group.servers)] * group.tp
    inside = between = 0
    for index, (instance, server) in enumerate(ranks):
        others = [rank for i, rank in enumerate(ranks) if i != index]
        if past_instance:
            others = [rank for rank in others if rank[0] != instance]
        far = [other for _, other in others if other != server]
        crossing = len(set(far)) if hierarchical else len(far)
        between += crossing
        inside += len(others) - crossing
    return Traffic(inside=inside, between=between)


@given(group=groups(), hierarchical=st.booleans())
def test_sp_tp_traffic_pair_by_pair(group: GroupShape, hierarchical: bool) -> None:
    shape = AttentionShape(hidden=1, heads=1, kv_heads=1, head_dim=1)
    expected = (
        spread_by_hand(group, hierarchical=hierarchical, past_instance=True)
        + spread_by_hand(group, hierarchical=hierarchical, past_instance=False)
        + Traffic(inside=group.ranks * (group.tp - 1))
    )
    actual = sp_tp_traffic(shape, group, group.ranks, hierarchical=hierarchical)
    assert actual.inside == pytest.approx(expected.inside)
    assert actual.between == pytest.approx(expected.between)


@given(group=groups())
def test_ntp_traffic_pair_by_pair(group: GroupShape) -> None:
    shape = AttentionShape(hidden=3, heads=group.ranks * 2, kv_heads=group.ranks, head_dim=1)
    servers = [server for server in group.servers for _ in range(group.tp)]
    pairs = [(a, b) for i, a in enumerate(servers) for j, b in enumerate(servers) if i != j]
    far = sum(a != b for a, b in pairs)
    # One token a rank: two query heads, a key and a value there, two outputs back.
    actual = ntp_traffic(shape, group, group.ranks)
    weights = 2 * 3 * 3 * group.ranks * len(group.servers) * (group.tp - 1)
    rows = 3 * group.ranks * (group.tp - 1)
    assert actual.between == pytest.approx(6 * far)
    assert actual.inside == pytest.approx(6 * (len(pairs) - far) + weights + rows)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        choose_strategy(MHA, GroupShape(servers=(0,), tp=2), 0)
    with pytest.raises(ValueError, match="weight 0"):
        choose_strategy(MHA, GroupShape(servers=(0,), tp=2), 9, between_weight=0.5)
    with pytest.raises(ValueError, match="at least one"):
        GroupShape(servers=(), tp=1)
    with pytest.raises(ValueError, match="start at 1"):
        AttentionShape(hidden=1, heads=0, kv_heads=1, head_dim=1)
