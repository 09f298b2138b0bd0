"""Sparse attention as asked for becomes a valid plan for every group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uniform_plan import uniform_plan

from csps.protocols.attention.csa import MICRO_PARTITIONS, CsaSettings, LayerGroup
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Location, Topology
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")

KV_HEADS = 2


def tuples(items: st.SearchStrategy[Any], *, most: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(items, min_size=1, max_size=most).map(tuple)


LEVELS = st.one_of(st.none(), st.integers(1, 4))
MICRO = st.one_of(st.none(), tuples(tuples(st.integers(1, 64))))
SETTINGS = st.builds(
    CsaSettings,
    levels=LEVELS,
    drop_ratios=tuples(
        tuples(st.one_of(st.just(0.0), st.floats(0, 1, exclude_max=True)), most=KV_HEADS)
    ),
    micro_partitions=MICRO,
) | st.builds(
    CsaSettings,
    levels=LEVELS,
    coverages=tuples(tuples(st.floats(0, 1, exclude_min=True), most=KV_HEADS)),
    micro_partitions=MICRO,
)
LOCATIONS = st.sets(
    st.builds(Location, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=6,
).map(lambda places: tuple(map(str, sorted(places))))


def test_a_group_with_all_that_is_asked_for_has_it() -> None:
    settings = CsaSettings(
        levels=3,
        drop_ratios=((0.5,),),
        micro_partitions=((4,),),
        importance_window=0,
        importance_layer="previous",
        sinks=1,
        tail=2,
    )
    plan = settings.for_group(SERVERS, layers=8, longest_spt=100)
    uniform = uniform_plan(SERVERS, levels=3, layers=8, drop_ratio=0.5, micro_partitions=4)
    assert (plan.levels, plan.layer_groups) == (uniform.levels, uniform.layer_groups)
    assert (plan.importance_window, plan.sinks, plan.tail) == (0, 1, 2)
    assert not list(settings.shortfalls(plan))


def test_the_largest_drop_ratio_is_one_at_every_level() -> None:
    settings = CsaSettings(drop_ratios=((0.9999999999999999,),))
    plan = settings.for_group(SERVERS, layers=2, longest_spt=100)
    assert plan.levels == 3
    assert plan.layer_group(0).drop_ratio(3, 0) < 1


@given(SETTINGS, LOCATIONS, st.data())
def test_every_group_gets_a_plan_that_a_step_accepts(
    settings: CsaSettings, locations: tuple[str, ...], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(1, 100)) for _ in locations]
    plan = settings.for_group(locations, layers=3, longest_spt=max(lengths))
    PrefillStep(
        step_id=1,
        group=tuple(range(len(locations))),
        bounds=(0, *accumulate(lengths)),
        chunks=(PrefillChunk(sequence_id=1, start=0, length=sum(lengths)),),
        strategy="csa",
        csa=plan,
    ).check()
    told_apart = len(Topology.of(locations).granularities)
    assert plan.levels == min(settings.levels or told_apart, told_apart)
    less = settings.levels is not None and plan.levels < settings.levels
    less |= len(locations) == 1 and settings.levels is None
    micro_partitions = settings.micro_partitions or ((MICRO_PARTITIONS,),)
    for layer in range(3):
        group, ratios = plan.layer_group(layer), of(settings.drop_ratios, layer)
        for head in range(KV_HEADS if plan.levels > 1 else 0):
            assert group.drop_ratio(2, head) == pytest.approx(of(ratios, head))
            shares = of(settings.coverages or ((1.0,),), layer)
            assert group.coverage(2, head) == pytest.approx(of(shares, head))
        for level in range(plan.levels):
            asked = of(of(micro_partitions, layer), level)
            assert group.micro(level + 1) == min(asked, max(lengths))
            less |= settings.micro_partitions is not None and asked > max(lengths)
    assert bool(list(settings.shortfalls(plan))) == less


def of(numbers: Sequence[Any], index: int) -> Any:
    return [*numbers, *[numbers[-1]] * index][index]


def test_numbers_by_layer_and_by_level_end_with_that_of_all_further_ones() -> None:
    settings = CsaSettings(
        levels=3, drop_ratios=((0.0,), (0.0,), (0.9,)), micro_partitions=((1, 2),)
    )
    plan = settings.for_group(SERVERS, layers=6, longest_spt=100)
    ratios = [plan.layer_group(layer).drop_ratio(2, 0) for layer in range(6)]
    assert ratios == pytest.approx([0.0, 0.0, 0.9, 0.9, 0.9, 0.9])
    assert [(layer_group.first, layer_group.stop) for layer_group in plan.layer_groups] == [
        (0, 2),
        (2, 6),
    ]
    assert {layer_group.micro_partitions for layer_group in plan.layer_groups} == {(1, 2, 2)}
    shallow = settings.for_group(SERVERS, layers=2, longest_spt=100)
    assert [(layer_group.first, layer_group.stop) for layer_group in shallow.layer_groups] == [
        (0, 2)
    ]


def test_ratios_by_head_and_micro_partitions_by_layer() -> None:
    settings = CsaSettings(
        levels=3, drop_ratios=((0.0,), (0.5, 0.0)), micro_partitions=((1,), (1,), (2, 3))
    )
    plan = settings.for_group(SERVERS, layers=4, longest_spt=100)
    assert plan.layer_groups == (
        LayerGroup(first=0, stop=1, drop_ratios=((0.0,), (0.0,)), micro_partitions=(1, 1, 1)),
        LayerGroup(
            first=1, stop=2, drop_ratios=((0.5, 0.0), (0.75, 0.0)), micro_partitions=(1, 1, 1)
        ),
        LayerGroup(
            first=2, stop=4, drop_ratios=((0.5, 0.0), (0.75, 0.0)), micro_partitions=(2, 3, 3)
        ),
    )
    assert not settings.lossless


@pytest.mark.parametrize(
    ("locations", "longest", "said"),
    [
        (("0-0-0",), 100, ["the step has one instance, which attends exactly"]),
        (SERVERS[:2], 100, ["2 of 3 levels"]),
        (SERVERS, 3, ["3 of 4 micro-partitions"]),
        (SERVERS[1:3], 2, ["2 of 3 levels", "2 of 4 micro-partitions"]),
    ],
)
def test_shortfalls_of_a_group_are_named(
    locations: tuple[str, ...], longest: int, said: list[str]
) -> None:
    settings = CsaSettings(levels=3, drop_ratios=((0.5,),), micro_partitions=((4,),))
    plan = settings.for_group(locations, layers=4, longest_spt=longest)
    shortfalls = list(settings.shortfalls(plan))
    assert [text[: len(start)] for text, start in zip(shortfalls, said, strict=True)] == said


@pytest.mark.parametrize(
    "fields",
    [
        {"levels": 0},
        {"levels": 2, "drop_ratios": ((0.0,), (0.0, 1.0))},
        {"levels": 2, "drop_ratios": ()},
        {"levels": 2, "drop_ratios": ((0.0,), ())},
        {"levels": 2, "micro_partitions": ((1,), (2, 0))},
        {"levels": 2, "micro_partitions": ()},
        {"levels": 2, "micro_partitions": ((1,), ())},
        {"levels": 2, "coverages": ()},
        {"levels": 2, "coverages": ((0.5,), ())},
        {"levels": 2, "coverages": ((0.0,),)},
        {"levels": 2, "coverages": ((1.1,),)},
        {"levels": 2, "coverages": ((0.9,),), "drop_ratios": ((0.5,),)},
        {"levels": 2, "sinks": -1},
        {"levels": 2, "importance_layer": "same", "importance_window": 0},
        {"strategy": "tp", "nested": True},
        {"strategy": "tp_flat", "decode_kept_only": True},
    ],
)
def test_settings_that_no_group_could_run_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CsaSettings(**fields)
