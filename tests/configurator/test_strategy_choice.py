"""The formulas at their thresholds, and against sums written out pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from uniform_plan import uniform_plan

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.traffic import Traffic, gathered_weights_traffic, sp_tp_traffic
from csps.configurator.plan.strategy_rules import (
    LEVELS_LINK_RATIO,
    Strategy,
    exact_options,
    least,
    sparse_options,
)
from csps.protocols.core.topology import GroupShape

LLAMA_8B = AttentionShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, layers=32)
MHA = AttentionShape(hidden=4096, heads=32, kv_heads=32, head_dim=128, layers=32)
WIDE = AttentionShape(hidden=1024, heads=16, kv_heads=4, head_dim=256, layers=8)
"""Queries four times as wide as the hidden state, which is what SP-TP sends."""
TWO_SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def chosen(
    shape: AttentionShape, group: GroupShape, tokens: int, link_ratio: float = 1.0
) -> Strategy:
    return least(exact_options(shape, group, tokens), link_ratio=link_ratio)


@given(
    dim=st.integers(1, 1024),
    tokens=st.integers(1, 10**6),
    ranks=st.integers(2, 64),
    grouped=st.sampled_from([1, 2, 4, 8]),
)
@example(dim=1024, tokens=16_384, ranks=4, grouped=1)  # d = 4096: L > 2 d N / (N - 2)
@example(dim=1024, tokens=16_385, ranks=4, grouped=1)
@example(dim=256, tokens=7447, ranks=4, grouped=4)  # kappa = 1/4: L > 7447.27
@example(dim=256, tokens=7448, ranks=4, grouped=4)
def test_attention_alone_prefers_ntp_by_the_papers_inequality(
    dim: int, tokens: int, ranks: int, grouped: int
) -> None:
    """App. A: (1 + kappa) (d + L/N) < L, which without grouped queries is d/L < (1 - 2/N)/2; kappa
    is KV heads over query heads. The paper counts all rows of SP-TP's gather as attention's, and of
    gathered weights none for the MLP."""
    heads, kv_heads = ranks * grouped, ranks
    shape = AttentionShape(
        hidden=heads * dim, heads=heads, kv_heads=kv_heads, head_dim=dim, layers=2
    )
    group = GroupShape((1,), tp=ranks)
    for_the_mlp = tokens * shape.hidden * (ranks - 1)
    ntp = round(gathered_weights_traffic(shape, group, tokens).inside) - for_the_mlp
    tp = round(sp_tp_traffic(shape, group, tokens).inside)
    left = (grouped + 1) * (shape.hidden * ranks + tokens)
    right = tokens * ranks * grouped
    assert (ntp < tp) == (left < right)


@pytest.mark.parametrize(
    ("instances", "threshold"),
    [
        # One instance of 4: W + 2 (1 + kappa) L d / 4 + L d < 2 L d, with W = 2 (1 + kappa) d².
        (1, 27_306),
        # Two: 2 W + 2.5 L d 7/8 + L d against 2.5 L d / 2 + 2 L d, three times each but the all-
        # to-alls: 15 d² + 5.1875 L d < 7.25 L d.
        (2, 29_789),
    ],
)
def test_gathered_weights_pay_from_a_threshold_on(instances: int, threshold: int) -> None:
    """Against heads that are split as the weights are, whose outputs have to be summed."""
    group = GroupShape((instances,), tp=4)
    assert chosen(LLAMA_8B, group, threshold) == "ulysses"
    assert chosen(LLAMA_8B, group, threshold + 1) == "gathered_weights"


def test_two_ranks_never_pay_for_gathered_weights() -> None:
    """App. A's inequality at N = 2 says so: 1 + kappa of the rows against 1."""
    for tokens in (1, 10**6, 10**9):
        assert chosen(LLAMA_8B, GroupShape((1,), tp=2), tokens) == "ulysses"


@pytest.mark.parametrize("instances", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 1000, 10**6])
def test_without_tensor_parallelism_ntp_is_never_worse_inside_a_server(
    instances: int, tokens: int
) -> None:
    """App. A's text: nothing has to be gathered."""
    assert chosen(MHA, GroupShape((instances,)), tokens) == "ulysses"


def test_sp_tp_moves_less_where_queries_are_wider_than_what_they_are_made_of() -> None:
    assert chosen(WIDE, GroupShape((2, 2)), 8192) == "sp_tp"
    # Twice as many ranks spread rows inside servers as well; SP-TP spares the link between them.
    split = GroupShape((2, 2), tp=2)
    assert chosen(WIDE, split, 8192) == "ulysses"
    assert chosen(WIDE, split, 8192, link_ratio=2.0) == "sp_tp"


def test_slow_links_between_servers_are_weighed() -> None:
    """Queries twice as wide as the hidden state d, four instances on each of two servers. Of L d
    SP-NTP sends 5/2 between servers and 15/8 inside; SP-TP 2 between, once each way, and 12 inside.
    """
    shape = AttentionShape(hidden=1024, heads=32, kv_heads=4, head_dim=64, layers=8)
    group = GroupShape((4, 4))
    threshold = (12 - 15 / 8) / (5 / 2 - 2)
    assert chosen(shape, group, 8192, link_ratio=threshold) == "ulysses"
    assert chosen(shape, group, 8192, link_ratio=threshold + 0.01) == "sp_tp"


@pytest.mark.parametrize("servers", [(1, 1), (2, 2), (4, 4), (8, 8)])
@pytest.mark.parametrize("tp", [1, 2])
def test_levels_halve_traffic_between_two_servers(servers: tuple[int, ...], tp: int) -> None:
    """But for LSEs, which SP-NTP without levels has no need of: 1 or 2 elements a head and row."""
    group = GroupShape(servers, tp=tp)
    options = exact_options(LLAMA_8B, group, 8192, link_ratio=LEVELS_LINK_RATIO)
    half = options["ulysses"].between / 2
    assert half < options["levels"].between <= half * 1.02
    assert least(options, link_ratio=LEVELS_LINK_RATIO) == "levels"
    assert "levels" not in exact_options(LLAMA_8B, group, 8192, link_ratio=7.9)


@pytest.mark.parametrize(("drop_ratio", "expected"), [(0.0, "sp_tp"), (0.5, "csa")])
def test_dropping_is_counted_where_it_saves(drop_ratio: float, expected: str) -> None:
    """SP-TP sends what it drops, so sparse SP-NTP may move less where exact SP-NTP moves more."""
    plan = uniform_plan(TWO_SERVERS, levels=3, layers=8, drop_ratio=drop_ratio)
    options = sparse_options(WIDE, plan, tp=1, spts=(2048,) * 4)
    assert least(options) == expected
    group = GroupShape((2, 2))
    assert options["sp_tp"] == sp_tp_traffic(WIDE, group, 8192)


@st.composite
def groups(draw: st.DrawFn) -> GroupShape:
    servers = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return GroupShape(servers, tp=draw(st.integers(1, 4)))


def spread_by_hand(group: GroupShape, *, hierarchical: bool, past_instance: bool) -> Traffic:
    """Count the spread of one element per rank."""
    ranks = list(enumerate(group.instance_servers)) * group.tp
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
    heads = group.ranks
    shape = AttentionShape(hidden=1, heads=heads, kv_heads=heads, head_dim=1, layers=2)
    expected = (
        spread_by_hand(group, hierarchical=hierarchical, past_instance=True)
        + spread_by_hand(group, hierarchical=hierarchical, past_instance=False)
        + Traffic(inside=group.ranks * (group.tp - 1))
    )
    actual = sp_tp_traffic(shape, group, group.ranks, hierarchical=hierarchical)
    assert actual.inside == pytest.approx(expected.inside)
    assert actual.between == pytest.approx(expected.between)


@given(group=groups())
def test_gathered_weights_traffic_pair_by_pair(group: GroupShape) -> None:
    shape = AttentionShape(
        hidden=3, heads=group.ranks * 2, kv_heads=group.ranks, head_dim=1, layers=2
    )
    servers = [server for server in group.instance_servers for _ in range(group.tp)]
    pairs = [(a, b) for i, a in enumerate(servers) for j, b in enumerate(servers) if i != j]
    far = sum(a != b for a, b in pairs)
    # One token a rank: two query heads, a key and a value there, two outputs back.
    actual = gathered_weights_traffic(shape, group, group.ranks)
    weights = 2 * 3 * 3 * group.ranks * sum(group.servers) * (group.tp - 1)
    rows = 3 * group.ranks * (group.tp - 1)
    assert actual.between == pytest.approx(6 * far)
    assert actual.inside == pytest.approx(6 * (len(pairs) - far) + weights + rows)


def test_of_equals_the_first() -> None:
    rounded = Traffic(inside=3.0, between=1.0 - 1e-15)
    assert least({"ulysses": Traffic(inside=3.0, between=1.0), "sp_tp": rounded}) == "ulysses"


def test_invalid_ratios_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="link ratio 0"):
        least({"ulysses": Traffic()}, link_ratio=0.5)
    with pytest.raises(ValueError, match="must be at least 1"):
        AttentionShape(hidden=1, heads=0, kv_heads=1, head_dim=1, layers=1)
