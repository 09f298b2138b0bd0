"""The configurator that goes by rules: honest about what it does not know, exact unless asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from csps.configurator.expected_group import PartitionSizes
from csps.configurator.rules import RuleConfigurator
from csps.configurator.shapes import AttentionShape
from csps.protocols.csa_template import CsaTemplate, CsaVariant
from csps.protocols.errors import InvalidRequest
from csps.protocols.plans import CsaOptions, Objective, Plan, PlanRequest

NARROW = AttentionShape(hidden=1024, heads=16, kv_heads=4, head_dim=64, layers=8)
WIDE = replace(NARROW, head_dim=256)
"""Queries four times as wide as the hidden state, which is what SP-TP sends."""
LLAMA_8B = AttentionShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, layers=32)
TWO_SERVERS = ("0-1-1", "0-0-0", "0-1-0", "0-0-1")
SIZES = PartitionSizes(spt_tokens=2048, short_tokens=512)


def plan(shape: AttentionShape = NARROW, *, link_ratio: float = 1.0, **fields: Any) -> Plan:
    configurator = RuleConfigurator(shape, sizes=SIZES, link_ratio=link_ratio)
    return configurator.plan(PlanRequest(**{"prompt_tokens": 8192, **fields}))


def sparse(shape: AttentionShape = NARROW, **options: Any) -> Plan:
    csa = CsaOptions(**options)
    return plan(shape, attention="csa", locations=TWO_SERVERS, csa=csa)


@pytest.mark.parametrize("attention", ["auto", "exact"])
def test_without_being_asked_everything_is_exact_and_loses_nothing(attention: str) -> None:
    answer = plan(prompt_tokens=1_000_000, attention=attention)
    assert (answer.attention, answer.strategy, answer.csa) == ("exact", "ulysses", None)
    assert answer.predicted_accuracy_loss == 0.0
    assert "no prefill gang" in answer.reason


@pytest.mark.parametrize(
    ("tokens", "strategy", "instances"),
    [
        (500, "ulysses", "1 instance:"),
        (30_000, "gathered_weights", "2 instances:"),
        (29_000, "ulysses", "2 instances:"),
    ],
)
def test_exact_attention_on_a_tensor_parallel_gang_is_chosen_per_request(
    tokens: int, strategy: str, instances: str
) -> None:
    """From how many tokens on gathered weights pay, `test_strategy_choice` derives."""
    answer = plan(LLAMA_8B, prompt_tokens=tokens, tp=4, locations=("0-0-0", "0-0-4"))
    assert (answer.attention, answer.strategy, answer.csa) == ("exact", strategy, None)
    assert f"'{strategy}', because nothing moves less" in answer.reason
    assert instances in answer.reason
    for compared in ("'ulysses' ", "'gathered_weights' ", "'sp_tp' "):
        assert compared in answer.reason


def test_exact_sp_tp_is_told_where_its_group_stands() -> None:
    answer = plan(WIDE, attention="auto", locations=TWO_SERVERS)
    assert (answer.attention, answer.strategy) == ("exact", "sp_tp")
    assert answer.csa == CsaTemplate(levels=1, micro_partitions=((4,),))
    assert answer.predicted_accuracy_loss == 0.0


def test_a_short_prompt_has_nobody_to_exchange_with() -> None:
    answer = plan(WIDE, prompt_tokens=512, locations=TWO_SERVERS)
    assert answer.strategy == "ulysses"
    assert answer.reason.endswith("on one instance exchanges nothing")


def test_the_ratio_of_the_links_decides_with() -> None:
    shape = AttentionShape(hidden=1024, heads=32, kv_heads=4, head_dim=64, layers=8)
    places = tuple(f"0-{server}-{gpu}" for server in range(2) for gpu in range(4))
    fields: dict[str, Any] = {"prompt_tokens": 8 * 2048, "locations": places}
    assert plan(shape, **fields).strategy == "ulysses"
    slow = plan(shape, link_ratio=25.0, **fields)
    assert slow.strategy == "sp_tp"
    assert "one between servers as 25" in slow.reason


@pytest.mark.parametrize("attention", ["auto", "csa"])
def test_a_ttft_bound_is_not_promised(attention: str) -> None:
    objective = Objective(kind="accuracy", max_ttft_ms=10.0)
    answer = plan(objective=objective, attention=attention)
    assert answer.predicted_ttft_ms is None
    assert "was not predicted" in answer.reason


def test_what_the_client_fixes_is_planned() -> None:
    variant = CsaVariant(importance_window=0, sinks=1, tail=2, pipelined=False)
    fixed: dict[str, Any] = {
        "levels": 2,
        "drop_ratios": ((0.0,), (0.0, 0.25, 0.5, 0.75)),
        "micro_partitions": ((3,), (1, 2)),
    }
    answer = sparse(**fixed, strategy="ntp", variant=variant)
    assert (answer.attention, answer.strategy) == ("csa", "csa")
    assert answer.csa == CsaTemplate(**fixed, variant=variant)
    assert answer.predicted_accuracy_loss is None


def test_what_the_client_leaves_open_drops_nothing() -> None:
    answer = sparse()
    assert answer.csa is not None
    assert (answer.csa.levels, answer.csa.drop_ratios) == (3, ((0.0,),))
    assert answer.predicted_accuracy_loss == 0.0
    assert sparse(variant=CsaVariant(nested=True)).predicted_accuracy_loss is None


@pytest.mark.parametrize(("strategy", "engine"), [("tp", "sp_tp"), ("tp_flat", "sp_tp_flat")])
def test_sp_tp_computes_every_query_and_says_so(strategy: str, engine: str) -> None:
    answer = sparse(strategy=strategy)
    assert answer.strategy == engine
    assert answer.csa is not None
    assert not answer.csa.variant.drop_queries


@pytest.mark.parametrize(
    ("shape", "drop_ratio", "tp", "strategy"),
    [
        (NARROW, 0.0, 1, "csa"),
        (WIDE, 0.0, 1, "sp_tp"),
        (WIDE, 0.0, 2, "csa"),
        (WIDE, 0.5, 1, "csa"),
        (WIDE, 0.5, 2, "csa"),
    ],
)
def test_an_open_strategy_is_the_one_that_moves_less(
    shape: AttentionShape, drop_ratio: float, tp: int, strategy: str
) -> None:
    csa = CsaOptions(drop_ratios=((drop_ratio,),))
    answer = plan(shape, attention="csa", locations=TWO_SERVERS, csa=csa, tp=tp)
    assert answer.strategy == strategy
    assert "on 4 instances" in answer.reason


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"csa": CsaOptions(variant=CsaVariant(nested=True))}, "'nested'"),
        ({"csa": CsaOptions(variant=CsaVariant(importance_layer="same"))}, "'importance_layer'"),
        ({"csa": CsaOptions(variant=CsaVariant(decode_kept_only=True))}, "'decode_kept_only'"),
        ({"locations": ()}, "no prefill gang"),
    ],
)
def test_sp_ntp_where_there_is_no_choice(fields: dict[str, Any], why: str) -> None:
    answer = plan(WIDE, **{"attention": "csa", "locations": TWO_SERVERS, **fields})
    assert answer.strategy == "csa"
    assert why in answer.reason


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"levels": 4}, "levels", r"must be 1 to 3 here \(places 4, servers 2, racks 1\), not 4"),
        (
            {"micro_partitions": ((1,), (1, 11))},
            "micro_partitions",
            "must be 1 to 10, the tokens of the",
        ),
        ({"strategy": "tp", "variant": CsaVariant(nested=True)}, "strategy", "'ntp' with 'nested'"),
        (
            {"strategy": "tp", "variant": CsaVariant(decode_kept_only=True)},
            "strategy",
            "must be 'ntp' with 'decode_kept_only', not 'tp'",
        ),
        ({"micro_partitions": ((1,), (1,) * 4)}, "micro_partitions", "must be at most 3 by level"),
        ({"drop_ratios": ((0.5,),) * 9}, "drop_ratio", "must be at most 8 by layer"),
        ({"micro_partitions": ((1,),) * 9}, "micro_partitions", "must be at most 8 by layer"),
        (
            {"drop_ratios": ((0.5,), (0.5,) * 3)},
            "drop_ratio",
            "must be one a layer, or 4, one per KV head of the model, not 3",
        ),
        (
            {"strategy": "tp_flat", "variant": CsaVariant(importance_layer="same")},
            "strategy",
            "must be 'ntp' with 'importance_layer': 'same', not 'tp_flat'",
        ),
        (
            {"variant": CsaVariant(importance_layer="same", importance_window=0)},
            "importance_window",
            "must be 1 or more",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    fields: dict[str, Any], param: str, what: str
) -> None:
    csa = CsaOptions(**fields)
    with pytest.raises(InvalidRequest, match=what) as refused:
        plan(prompt_tokens=10, attention="csa", locations=TWO_SERVERS, csa=csa)
    assert refused.value.param == f"csps.{param}"
    assert str(refused.value).startswith(f"csps.{param}: ")


def test_limits_are_those_of_sparse_attention_only() -> None:
    assert (
        plan(prompt_tokens=1, csa=CsaOptions(levels=4, micro_partitions=((9,),))).attention
        == "exact"
    )


def test_without_a_gang_any_number_of_levels_may_be_asked_for() -> None:
    answer = plan(attention="csa", csa=CsaOptions(levels=4))
    assert answer.csa is not None
    assert answer.csa.levels == 4
