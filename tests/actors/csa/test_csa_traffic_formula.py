"""The configurator's formula for sparse attention, against the bytes that the ranks count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from csa_cases import DIM, CsaCase, cases, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from rank_world import RankWorld
from uniform_plan import uniform_plan

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.traffic import Traffic, _content, _layer, csa_traffic
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan


@st.composite
def one_prompt(draw: st.DrawFn) -> CsaCase:
    """Return a case that the formula covers: one prompt, of which every member has tokens."""
    case = draw(cases(covering=False))
    lengths = draw(
        st.lists(st.integers(4, 24), min_size=case.members, max_size=case.members), label="SPTs"
    )
    bounds = tuple(sum(lengths[:end]) for end in range(len(lengths) + 1))
    by_itself = case.plan.importance_window != ALL_QUERIES and draw(st.booleans())
    return CsaCase(
        plan=replace(case.plan, nested=False, importance_layer="same" if by_itself else "previous"),
        lengths=(bounds[-1],),
        bounds=bounds,
        heads=case.heads,
        kv_heads=case.kv_heads,
        layers=case.layers,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


def shape_of(case: CsaCase) -> AttentionShape:
    return AttentionShape(
        hidden=1,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=DIM,
        layers=case.layers,
        lse=4 // case.dtype.itemsize,
    )


def layer_traffic(shape: AttentionShape, plan: CsaPlan, spts: Sequence[int], layer: int) -> Traffic:
    """Return the traffic of one layer, which is not the last."""
    drops, scores, _ = _content(shape, plan, layer)
    dropping = layer if drops else None
    return _layer(shape, plan, tp=1, spts=spts, dropping=dropping, scores=scores)


def spts_of(case: CsaCase) -> list[int]:
    return [stop - start for start, stop in pairwise(case.bounds)]


def measured(world: RankWorld, case: CsaCase) -> Traffic:
    """Return the traffic of all layers but the last."""
    before = [list(mesh.bytes_sent) for mesh in world.meshes]
    on_ranks(world, case)
    places = case.plan.topology.locations
    total = Traffic()
    for sender, (mesh, old) in enumerate(zip(world.meshes, before, strict=True)):
        for receiver, (now, then) in enumerate(zip(mesh.bytes_sent, old, strict=True)):
            if elements := (now - then) / case.dtype.itemsize:
                here, there = places[sender], places[receiver]
                near = (here.rack, here.server) == (there.rack, there.server)
                total += Traffic(inside=elements) if near else Traffic(between=elements)
    return total


@settings(max_examples=examples(20))
@given(case=one_prompt())
def test_counts_what_the_ranks_send(world: RankWorld, case: CsaCase) -> None:
    shape, spts = shape_of(case), spts_of(case)
    by_layer = [layer_traffic(shape, case.plan, spts, layer) for layer in range(case.layers - 1)]
    total = sum(by_layer, Traffic())
    assert total == measured(world, case)
    mean = csa_traffic(shape, case.plan, tp=1, spts=spts) * len(by_layer)
    assert (mean.inside, mean.between) == pytest.approx((total.inside, total.between))


def two_by_two(drop_ratio: float = 0.0, levels: int = 3) -> CsaPlan:
    places = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
    return uniform_plan(places, levels=levels, layers=4, drop_ratio=drop_ratio)


SHAPE = AttentionShape(hidden=1, heads=8, kv_heads=4, head_dim=64, layers=4)
SPTS = (1024,) * 4
QUERIES, KEYS = 1024 * 8 * 64, 2 * 1024 * 4 * 64
OUTPUTS = 1024 * 8 * 65


def test_levels_halve_the_traffic_between_two_servers() -> None:
    """Three levels send keys one way, queries the other and outputs back; one level sends all both
    ways."""
    three = layer_traffic(SHAPE, two_by_two(), SPTS, 0)
    one = layer_traffic(SHAPE, two_by_two(levels=1), SPTS, 0)
    assert three.between == KEYS + QUERIES + OUTPUTS
    assert one.between == 2 * three.between


def test_a_ratio_reduces_the_traffic_of_the_layers_that_drop() -> None:
    """A ratio of 1/2 at level 2 keeps a quarter at level 3, besides sinks and tail."""
    plan = two_by_two(0.5)
    first, middle = (layer_traffic(SHAPE, plan, SPTS, i) for i in (0, 2))
    window = plan.importance_window * SHAPE.heads
    assert first.between == KEYS + QUERIES + OUTPUTS + window * (2 * 64 + 2 * 4)
    assert middle.between == pytest.approx((KEYS + QUERIES + OUTPUTS) / 4, rel=0.01)


def test_a_layer_that_scores_itself_sends_as_much_as_one_that_scores_for_the_next() -> None:
    """There are as many layers that drop as layers before these."""
    plan = two_by_two(0.5)
    before, itself = (
        csa_traffic(SHAPE, replace(plan, importance_layer=by), tp=1, spts=SPTS)
        for by in ("previous", "same")
    )
    assert (itself.inside, itself.between) == pytest.approx((before.inside, before.between))


def test_heads_split_over_ranks_send_as_much_and_sum_outputs() -> None:
    """Take as many KV heads as members, so that none goes to two members."""
    shape = replace(SHAPE, kv_heads=8)
    whole, split = (csa_traffic(shape, two_by_two(0.5), tp=tp, spts=SPTS) for tp in (1, 2))
    assert split.between == pytest.approx(whole.between)
    assert split.inside == pytest.approx(whole.inside + 2 * sum(SPTS) * shape.hidden)
