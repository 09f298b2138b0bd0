"""The configurator that goes by rules: honest about what it does not know, exact unless asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from csps.configurator.rules import RuleConfigurator
from csps.configurator.strategy_choice import AttentionShape, GroupShape, choose_strategy
from csps.protocols.csa_template import CsaTemplate, CsaVariant
from csps.protocols.errors import InvalidRequest
from csps.protocols.plans import CsaOptions, Objective, Plan, PlanRequest

NARROW = AttentionShape(hidden=1024, heads=16, kv_heads=4, head_dim=64)
WIDE = replace(NARROW, head_dim=256)
"""Queries four times as wide as the hidden state, which is what SP-TP sends."""
TWO_SERVERS = ("0-1-1", "0-0-0", "0-1-0", "0-0-1")


def plan(shape: AttentionShape = NARROW, **fields: Any) -> Plan:
    return RuleConfigurator(shape).plan(PlanRequest(**{"prompt_tokens": 8192, **fields}))


def sparse(shape: AttentionShape = NARROW, **options: Any) -> Plan:
    csa = CsaOptions(**options)
    return plan(shape, attention="csa", locations=TWO_SERVERS, csa=csa)


@pytest.mark.parametrize("attention", ["auto", "exact"])
def test_without_being_asked_everything_is_exact_and_loses_nothing(attention: str) -> None:
    answer = plan(prompt_tokens=1_000_000, attention=attention)
    assert (answer.attention, answer.strategy, answer.csa) == ("exact", "ulysses", None)
    assert answer.predicted_accuracy_loss == 0.0


@pytest.mark.parametrize("attention", ["auto", "csa"])
def test_a_ttft_bound_is_not_promised(attention: str) -> None:
    objective = Objective(kind="accuracy", max_ttft_ms=10.0)
    answer = plan(objective=objective, attention=attention)
    assert answer.predicted_ttft_ms is None
    assert "was not predicted" in answer.reason


def test_what_the_client_fixes_is_planned() -> None:
    variant = CsaVariant(importance_window=0, sinks=1, tail=2, pipelined=False)
    answer = sparse(levels=2, drop_ratio=0.5, micro_partitions=3, strategy="ntp", variant=variant)
    assert (answer.attention, answer.strategy) == ("csa", "csa")
    assert answer.csa == CsaTemplate(levels=2, drop_ratio=0.5, micro_partitions=3, variant=variant)
    assert answer.predicted_accuracy_loss is None


def test_what_the_client_leaves_open_drops_nothing() -> None:
    answer = sparse()
    assert answer.csa is not None
    assert (answer.csa.levels, answer.csa.drop_ratio) == (3, 0.0)
    assert answer.predicted_accuracy_loss == 0.0
    assert sparse(variant=CsaVariant(nested=True)).predicted_accuracy_loss is None


@pytest.mark.parametrize(("strategy", "engine"), [("tp", "sp_tp"), ("tp_flat", "sp_tp_flat")])
def test_sp_tp_computes_every_query_and_says_so(strategy: str, engine: str) -> None:
    answer = sparse(strategy=strategy)
    assert answer.strategy == engine
    assert answer.csa is not None
    assert not answer.csa.variant.drop_queries


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_an_open_strategy_is_the_one_that_moves_less(shape: AttentionShape) -> None:
    answer = sparse(shape)
    group = GroupShape(servers=(0, 0, 1, 1), tp=1)
    chosen = choose_strategy(shape, group, 8192)
    assert answer.strategy == {"sp_ntp": "csa", "sp_tp": "sp_tp"}[chosen]
    assert "over all 4 instances" in answer.reason


def test_the_two_shapes_are_on_either_side() -> None:
    assert (sparse(NARROW).strategy, sparse(WIDE).strategy) == ("csa", "sp_tp")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"csa": CsaOptions(variant=CsaVariant(nested=True))}, "'nested'"),
        ({"csa": CsaOptions(variant=CsaVariant(importance_layer="same"))}, "'importance_layer'"),
        ({"tp": 2}, "tensor parallelism"),
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
        ({"micro_partitions": 11}, "micro_partitions", "must be 1 to 10, the tokens of the prompt"),
        ({"strategy": "tp", "variant": CsaVariant(nested=True)}, "strategy", "'ntp' with 'nested'"),
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
    assert plan(prompt_tokens=1, csa=CsaOptions(levels=4, micro_partitions=9)).attention == "exact"


def test_without_a_gang_any_number_of_levels_may_be_asked_for() -> None:
    answer = plan(attention="csa", csa=CsaOptions(levels=4))
    assert answer.csa is not None
    assert answer.csa.levels == 4
