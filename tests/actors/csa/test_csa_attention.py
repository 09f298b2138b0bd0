"""Sparse attention on ranks against the definition, for steps of any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from csa_cases import (
    SCALE,
    CsaCase,
    by_brute_force,
    cases,
    chunks,
    layers_by_brute_force,
    layers_on_ranks,
    on_ranks,
    prompt_rows,
)
from dense_reference import dense_attention
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from property_examples import examples
from rank_world import RankWorld

from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving, squaring

several = settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))

SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def two_servers(**fields: object) -> CsaCase:
    plan = CsaPlan(
        locations=SERVERS,
        levels=3,
        layer_groups=(
            LayerGroup(first=0, stop=4, drop_ratios=halving(0.4, 3), micro_partitions=(1, 2, 3)),
        ),
        importance_window=6,
        sinks=1,
        tail=3,
    )
    case = CsaCase(plan=plan, lengths=(50,), bounds=(0, 12, 25, 37, 50), heads=6, kv_heads=2)
    return case.with_plan(**fields) if fields else case


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor], atol: float = 1e-10) -> None:
    for layer, (actual, expected) in enumerate(zip(got, want, strict=True)):
        difference = float((actual.double() - expected).abs().max())
        assert difference < atol, f"layer {layer} is off by {difference}"


@several
@given(case=cases())
def test_equals_the_definition(world: RankWorld, case: CsaCase) -> None:
    assert_equal(on_ranks(world, case), by_brute_force(case))


@several
@given(case=chunks())
def test_chunks_equal_the_definition_with_all_history(world: RankWorld, case: CsaCase) -> None:
    assert_equal(on_ranks(world, case), by_brute_force(case))


@several
@given(case=chunks(dropping=False))
def test_chunks_are_exact_when_nothing_is_dropped(world: RankWorld, case: CsaCase) -> None:
    for layer, (got, qkv) in enumerate(zip(on_ranks(world, case), case.qkv(), strict=True)):
        for chunk, rows in zip(case.chunks, prompt_rows(case.lengths), strict=True):
            q_thd, k_thd, v_thd = (tensor[rows] for tensor in qkv)
            k_before, v_before = case.earlier(chunk.sequence_id)[layer]
            end = chunk.start + chunk.length
            want, _ = dense_attention(
                q_thd,
                torch.cat((k_before, k_thd)),
                torch.cat((v_before, v_thd)),
                q_positions=torch.arange(chunk.start, end),
                k_positions=torch.arange(end),
                scale=SCALE,
            )
            assert_equal([got[rows]], [want])


@several
@given(case=cases())
def test_decode_sees_the_last_spt_and_what_level_2_keeps(world: RankWorld, case: CsaCase) -> None:
    """The output of the step itself does not change, to the last bit."""
    narrowed = case.with_plan(decode_kept_only=True)
    got, want = layers_on_ranks(world, narrowed), layers_by_brute_force(narrowed)
    for actual, expected, exact in zip(got, want, on_ranks(world, case), strict=True):
        assert expected.seen_gt is not None
        assert torch.equal(actual.out_thd, exact)
        if actual.seen_gt is None:
            assert expected.seen_gt.all()
        else:
            assert torch.equal(actual.seen_gt, expected.seen_gt)


@several
@given(case=chunks())
def test_what_is_dropped_is_counted(world: RankWorld, case: CsaCase) -> None:
    """The members' sums are the share of attention that a prompt's last queries miss."""
    for got, want in zip(layers_on_ranks(world, case), layers_by_brute_force(case), strict=True):
        assert got.dropped.keys() == want.dropped.keys()
        for prompt, share_g in want.dropped.items():
            # Masses are sent in fp32.
            torch.testing.assert_close(got.dropped[prompt], share_g, atol=1e-6, rtol=1e-5)


def test_the_last_part_drops_nothing_that_its_own_queries_see(world: RankWorld) -> None:
    case = two_servers(tail=0)
    for got, want in zip(layers_on_ranks(world, case), layers_by_brute_force(case), strict=True):
        assert got.dropped.keys() == want.dropped.keys()
        for prompt, share_g in want.dropped.items():
            torch.testing.assert_close(got.dropped[prompt], share_g, atol=1e-6, rtol=1e-5)


@several
@given(case=cases())
def test_a_coverage_of_one_is_exact(world: RankWorld, case: CsaCase) -> None:
    (group,) = case.plan.layer_groups
    levels = case.plan.levels
    whole = replace(group, drop_ratios=(), coverages=((1.0,),) * (levels - 1))
    nothing = replace(group, drop_ratios=(), coverages=())
    covered, exact = (
        case.with_plan(layer_groups=(group,), nested=False) for group in (whole, nothing)
    )
    assert covered.plan.lossless
    for got, want in zip(on_ranks(world, covered), on_ranks(world, exact), strict=True):
        assert torch.equal(got, want)


@several
@given(case=cases(dropping=False), share=st.floats(0.01, 0.99))
def test_a_level_misses_no_more_than_its_coverage_leaves(
    world: RankWorld, case: CsaCase, share: float
) -> None:
    (group,) = case.plan.layer_groups
    levels = case.plan.levels
    covering = replace(group, coverages=squaring(share, levels))
    farthest = share ** (2 ** max(0, levels - 2))
    for layer in layers_on_ranks(world, case.with_plan(layer_groups=(covering,))):
        for shares_g in layer.dropped.values():
            assert float(shares_g.max()) <= 1 - farthest + 1e-6


@several
@given(case=cases(dropping=False))
def test_is_exact_when_nothing_is_dropped(world: RankWorld, case: CsaCase) -> None:
    case = replace(case, dtype=torch.float32)
    ends = [0, *(rows.stop for rows in prompt_rows(case.lengths))]
    positions = torch.cat([torch.arange(length) for length in case.lengths])
    want = [
        dense_attention(
            q_thd,
            k_thd,
            v_thd,
            q_positions=positions,
            k_positions=positions,
            scale=SCALE,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
        )[0]
        for q_thd, k_thd, v_thd in case.qkv()
    ]
    assert_equal(on_ranks(world, case), want, atol=1e-5)


@several
@given(case=cases())
def test_pipelining_changes_nothing(world: RankWorld, case: CsaCase) -> None:
    assume(case.members > 1)
    pipelined, one_by_one = (case.with_plan(pipelined=on) for on in (True, False))
    assert_equal(on_ranks(world, pipelined), on_ranks(world, one_by_one))


@pytest.mark.parametrize("window", [0, 1, 6, 20, 1000])
def test_every_window_equals_the_definition(world: RankWorld, window: int) -> None:
    """A window may span several members, or be longer than the prompt."""
    case = two_servers(importance_window=window)
    assert_equal(on_ranks(world, case), by_brute_force(case))


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_a_layer_may_score_itself(world: RankWorld, micro: int) -> None:
    group = LayerGroup(first=0, stop=4, drop_ratios=halving(0.4, 3), micro_partitions=(micro, 2, 1))
    case = two_servers(importance_layer="same", layer_groups=(group,))
    assert_equal(on_ranks(world, case), by_brute_force(case))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("drop_queries", [False, True])
def test_every_variant_equals_the_definition(
    world: RankWorld, nested: bool, drop_queries: bool
) -> None:
    case = two_servers(nested=nested, drop_queries=drop_queries)
    assert_equal(on_ranks(world, case), by_brute_force(case))


def test_nested_levels_count_near_tokens_twice_even_if_nothing_is_dropped(
    world: RankWorld,
) -> None:
    exact = on_ranks(world, two_servers(layer_groups=()))
    nested = on_ranks(world, two_servers(layer_groups=(), nested=True))
    assert (exact[0] - nested[0]).abs().max() > 0.1


def test_dropping_drops(world: RankWorld) -> None:
    """All layers but the first, which has no scores yet, differ from exact attention."""
    sparse, exact = on_ranks(world, two_servers()), on_ranks(world, two_servers(layer_groups=()))
    differences = [float((a - b).abs().max()) for a, b in zip(sparse, exact, strict=True)]
    assert differences[0] < 1e-12
    assert min(differences[1:]) > 0.01


def test_bfloat16_is_as_good_as_on_one_device(world: RankWorld) -> None:
    case = two_servers(layer_groups=())
    coarse = replace(case, dtype=torch.bfloat16)
    single = replace(coarse, bounds=(0, 50), plan=CsaPlan(locations=("0-0-0",), levels=1))
    want = [
        dense_attention(*qkv, q_positions=p, k_positions=p, scale=SCALE)[0]
        for qkv in coarse.qkv()
        for p in [torch.arange(50)]
    ]
    for got, alone, exact in zip(
        on_ranks(world, coarse), on_ranks(world, single), want, strict=True
    ):
        error, inherent = ((out.double() - exact).abs().max() for out in (got, alone))
        assert error <= 2.5 * inherent + 2e-3
