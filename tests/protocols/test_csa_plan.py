from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from uniform_plan import uniform_plan

from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving, kept_tokens, squaring
from csps.protocols.core.errors import ConfigError, ProtocolError
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc import schema

SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def test_each_level_keeps_half_of_the_tokens_of_the_one_before() -> None:
    kept = [1 - ratio for (ratio,) in halving(0.22, 4)]
    assert kept == pytest.approx([0.78, 0.39, 0.195])


def test_ratio_zero_is_exact_at_every_level() -> None:
    assert halving(0.0, 3) == ((0.0,), (0.0,))


@pytest.mark.parametrize(
    ("tokens", "ratio", "always", "kept"),
    [(10, 0.0, 0, 10), (10, 0.5, 0, 5), (10, 0.9, 0, 1), (10, 0.99, 0, 1), (10, 0.99, 4, 4)],
)
def test_kept_tokens(tokens: int, ratio: float, always: int, kept: int) -> None:
    assert kept_tokens(tokens, ratio, always) == kept


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_ratios_outside_zero_to_one_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="allowed are 0 to less than 1"):
        halving(ratio, 3)
    with pytest.raises(ConfigError, match="allowed are 0 to less than 1"):
        LayerGroup(first=1, stop=2, drop_ratios=((ratio,),))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"drop_ratios": ((0.5,), (0.4,))}, "may not keep what a nearer one drops"),
        ({"drop_ratios": ((0.5, 0.1), (0.5, 0.0))}, "may not keep what a nearer one drops"),
        ({"drop_ratios": ((0.5, 0.1), (0.5, 0.5, 0.5))}, "2 drop ratios of one level, 3"),
        ({"drop_ratios": ((),)}, "one for all KV heads"),
        ({"coverages": ((0.5,), (0.6,))}, "may not keep what a nearer one drops"),
        ({"coverages": ((0.5, 0.1), (0.5, 0.2))}, "may not keep what a nearer one drops"),
        ({"coverages": ((0.5, 0.1), (0.5, 0.5, 0.5))}, "2 coverages of one level, 3"),
        ({"coverages": ((),)}, "one for all KV heads"),
        ({"coverages": ((0.0,),)}, "allowed are more than 0 to 1"),
        ({"coverages": ((0.5,),), "drop_ratios": ((0.5,),)}, "not both"),
        ({"micro_partitions": (1, 0)}, "allowed are 1 and more"),
        ({"stop": 1}, "are not a range of layers"),
    ],
)
def test_layer_groups_check_themselves(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        LayerGroup(**{"first": 1, "stop": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"levels": 4}, r"must be 1 to 3 here \(places 4, servers 2, racks 1\), not 4"),
        ({"locations": ("0-0-1", "0-0-0")}, "allowed is ascending order"),
        ({"locations": ("0-0-1", "0-0-1")}, "puts both 0 and 1 at 0-0-1"),
        ({"locations": ()}, "at least one location"),
        ({"layer_groups": (LayerGroup(first=1, stop=3), LayerGroup(first=2, stop=4))}, "overlap"),
        ({"layer_groups": (LayerGroup(first=1, stop=3, drop_ratios=((0.5,),)),)}, "need 2, or"),
        ({"layer_groups": (LayerGroup(first=1, stop=3, micro_partitions=(1,)),)}, "need 3, or"),
        ({"importance_layer": "same", "importance_window": 0}, "window of 1 or more"),
        ({"sinks": -1}, "sinks -1: allowed are 0 and more"),
    ],
)
def test_plans_check_themselves(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        CsaPlan(**{"locations": SERVERS, "levels": 3, **fields})


def test_layers_of_no_group_drop_nothing() -> None:
    group = LayerGroup(first=1, stop=3, drop_ratios=((0.5,), (0.75,)), micro_partitions=(1, 2, 3))
    plan = CsaPlan(locations=SERVERS, levels=3, layer_groups=(group,))
    assert [plan.layer_group(layer).drop_ratio(3, 0) for layer in range(4)] == [0, 0.75, 0.75, 0]
    assert [plan.layer_group(layer).micro(2) for layer in range(4)] == [1, 2, 2, 1]


def test_ratios_per_head_are_those_of_the_model() -> None:
    group = LayerGroup(first=1, stop=3, drop_ratios=((0.5, 0.2), (0.75, 0.6)))
    plan = CsaPlan(locations=SERVERS, levels=3, layer_groups=(group,))
    plan.check_kv_heads(2)
    with pytest.raises(ConfigError, match="allowed are one for all KV heads, or 4"):
        plan.check_kv_heads(4)


def test_each_farther_level_covers_the_square_of_the_share_before() -> None:
    assert squaring((0.9, 1.0), 4) == (
        (0.9, 1.0),
        (pytest.approx(0.81), 1.0),
        (pytest.approx(0.6561), 1.0),
    )
    assert all(share > 0 for (share,) in squaring(1e-200, 4))


def test_a_plan_of_coverages_is_exact_only_if_all_are_one() -> None:
    def plan(*shares: float) -> CsaPlan:
        group = LayerGroup(first=1, stop=3, coverages=squaring(shares, 3))
        return CsaPlan(locations=SERVERS, levels=3, layer_groups=(group,))

    assert plan(1.0, 1.0).lossless
    assert not plan(1.0, 0.99).lossless
    with pytest.raises(ConfigError, match=r"2 coverages of one level; .* or 4"):
        plan(1.0, 0.9).check_kv_heads(4)


def step(plan: CsaPlan | None, **fields: Any) -> PrefillStep:
    chunk = PrefillChunk(sequence_id=1, start=0, length=40)
    return PrefillStep(
        **{
            "step_id": 1,
            "group": (0, 1, 2, 3),
            "bounds": (0, 10, 20, 30, 40),
            "chunks": (chunk,),
            "strategy": "csa",
            "csa": plan,
            **fields,
        }
    )


def test_a_step_with_a_plan_crosses_the_wire() -> None:
    plan = uniform_plan(SERVERS, levels=3, layers=8, drop_ratio=0.3, micro_partitions=2)
    assert schema.unpack(PrefillStep, schema.pack(step(plan))) == step(plan)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"csa": None}, "'csa' needs a CsaPlan"),
        ({"strategy": "levels", "csa": None}, "'levels' needs a CsaPlan"),
        (
            {
                "strategy": "levels",
                "csa": uniform_plan(SERVERS, levels=3, layers=8, drop_ratio=0.1),
            },
            "'levels' is exact, but its plan drops",
        ),
        ({"group": (0, 1), "bounds": (0, 20, 40)}, "4 locations for a group of 2"),
        ({"bounds": (0, 1, 2, 3, 4)}, r"longest SPT has 1 tokens; allowed are 1 to 1"),
    ],
)
def test_a_step_that_does_not_fit_its_plan_is_refused(fields: dict[str, Any], what: str) -> None:
    plan = uniform_plan(SERVERS, levels=3, layers=8, micro_partitions=2)
    with pytest.raises(ValueError, match=what):
        step(plan, **fields).check()


@pytest.mark.parametrize(
    "chunk",
    [
        PrefillChunk(
            sequence_id=1,
            start=5,
            length=40,
            history=(KvSlice(0, 0, 5),),
        ),
        PrefillChunk(sequence_id=1, start=0, length=40, last=False),
    ],
)
def test_chunks_may_be_sparse_but_not_for_decode(chunk: PrefillChunk) -> None:
    plan = uniform_plan(SERVERS, levels=3, layers=8, micro_partitions=2)
    step(plan, chunks=(chunk,)).check()
    with pytest.raises(ConfigError, match="decode_kept_only requires whole prompts"):
        step(replace(plan, decode_kept_only=True), chunks=(chunk,)).check()


def test_a_wrong_plan_is_the_senders_mistake() -> None:
    data = schema.pack(step(CsaPlan(locations=SERVERS, levels=3)))
    data["csa"]["levels"] = 5
    with pytest.raises(ProtocolError, match="must be 1 to 3 here"):
        schema.unpack(PrefillStep, data)
