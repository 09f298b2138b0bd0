"""Strategies by rules: what moves least on the very group, and what the client has fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from csps.configurator.model.attention_shape import AttentionShape, check_csa
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import StrategyChoice, StrategyQuestion, StrategyQuestions
from csps.protocols.core.errors import InvalidRequest
from csps.protocols.core.topology import Topology

NARROW = AttentionShape(hidden=1024, heads=16, kv_heads=4, head_dim=64, layers=8)
WIDE = replace(NARROW, head_dim=256)
"""Queries four times as wide as the hidden state, which is what SP-TP sends."""
LLAMA_8B = AttentionShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, layers=32)
TWO_SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def choose(
    shape: AttentionShape = NARROW,
    csa: CsaSettings | None = None,
    *,
    places: tuple[str, ...] = TWO_SERVERS,
    tp: int = 1,
    tokens: int = 8192,
    link_ratio: float = 1.0,
) -> StrategyChoice:
    rules = StrategyRules(shape, link_ratio=link_ratio)
    return rules.choose(csa, group=Topology.of(places), tp=tp, tokens=tokens)


@pytest.mark.parametrize(
    ("tokens", "places", "strategy", "instances"),
    [
        (500, 1, "ulysses", "1 instance:"),
        (30_000, 2, "gathered_weights", "2 instances:"),
        (29_000, 2, "ulysses", "2 instances:"),
    ],
)
def test_exact_attention_on_a_tensor_parallel_gang(
    tokens: int, places: int, strategy: str, instances: str
) -> None:
    """`test_strategy_choice` derives the number of tokens from which gathered weights pay."""
    answer = choose(LLAMA_8B, tokens=tokens, tp=4, places=("0-0-0", "0-0-4")[:places])
    assert answer.strategy == strategy
    assert f"'{strategy}', because nothing moves less" in answer.reason
    assert instances in answer.reason
    for compared in ("'ulysses' ", "'gathered_weights' ", "'sp_tp' "):
        assert compared in answer.reason


def test_one_instance_exchanges_nothing() -> None:
    answer = choose(WIDE, places=("0-0-0",))
    assert answer.strategy == "ulysses"
    assert answer.reason.endswith("on one instance exchanges nothing")


def test_the_ratio_of_the_links_decides_with() -> None:
    shape = AttentionShape(hidden=1024, heads=32, kv_heads=4, head_dim=64, layers=8)
    places = tuple(f"0-{server}-{gpu}" for server in range(2) for gpu in range(4))
    assert choose(shape, places=places, tokens=8 * 2048).strategy == "ulysses"
    slow = choose(shape, places=places, tokens=8 * 2048, link_ratio=25.0)
    assert slow.strategy == "levels"
    assert "one between servers as 25" in slow.reason
    few_heads = replace(shape, head_dim=32)
    assert choose(few_heads, places=places, link_ratio=7.9).strategy == "ulysses"


def test_levels_are_for_groups_of_several_servers() -> None:
    for places in (("0-0-0",), TWO_SERVERS[:2]):
        answer = choose(places=places, link_ratio=100.0)
        assert answer.strategy == "ulysses"
        assert "levels" not in answer.reason


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
    answer = choose(shape, CsaSettings(drop_ratios=((drop_ratio,),)), tp=tp)
    assert answer.strategy == strategy
    assert "on 4 instances" in answer.reason


def test_scoring_by_the_same_layer_is_compared_as_well() -> None:
    by_itself = CsaSettings(drop_ratios=((0.5,),), importance_layer="same")
    assert choose(WIDE, by_itself).strategy == "csa"
    assert choose(WIDE, replace(by_itself, drop_ratios=((0.0,),))).strategy == "sp_tp"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (CsaSettings(nested=True), "'nested'"),
        (CsaSettings(decode_kept_only=True), "'decode_kept_only'"),
    ],
)
def test_sp_ntp_where_there_is_no_choice(settings: CsaSettings, why: str) -> None:
    answer = choose(WIDE, settings)
    assert answer.strategy == "csa"
    assert why in answer.reason


@pytest.mark.parametrize(
    ("strategy", "engine"), [("ntp", "csa"), ("tp", "sp_tp"), ("tp_flat", "sp_tp_flat")]
)
def test_a_strategy_that_the_client_fixed_is_taken(strategy: Any, engine: str) -> None:
    answer = choose(WIDE, CsaSettings(strategy=strategy))
    assert (answer.strategy, answer.reason) == (engine, f"strategy '{strategy}' as asked")


def test_buckets_are_answered_in_their_order_and_for_their_groups() -> None:
    rules = StrategyRules(WIDE)
    asked = StrategyQuestions(
        asked=(
            StrategyQuestion(csa=None, servers=(2, 2), tp=1, tokens=8192),
            StrategyQuestion(csa=None, servers=(1,), tp=1, tokens=8192),
            StrategyQuestion(csa=CsaSettings(), servers=(2, 2), tp=1, tokens=1),
        )
    )
    answer = rules.answer(asked)
    assert [choice.strategy for (choice,) in answer.chosen[:2]] == ["sp_tp", "ulysses"]
    assert answer.chosen[0] == (choose(WIDE),)
    assert len(answer.chosen) == 3


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"levels": 4}, "levels", r"must be 1 to 3 here \(places 4, servers 2, racks 1\), not 4"),
        (
            {"micro_partitions": ((1,), (1, 11))},
            "micro_partitions",
            "must be 1 to 10, the tokens of the",
        ),
        ({"micro_partitions": ((1,), (1,) * 4)}, "micro_partitions", "must be at most 3 by level"),
        ({"drop_ratios": ((0.5,),) * 9}, "drop_ratio", "must be at most 8 by layer"),
        ({"micro_partitions": ((1,),) * 9}, "micro_partitions", "must be at most 8 by layer"),
        (
            {"drop_ratios": ((0.5,), (0.5,) * 3)},
            "drop_ratio",
            "must be one a layer, or 4, one per KV head of the model, not 3",
        ),
    ],
)
def test_impossible_options_are_refused_with_the_allowed_ones(
    fields: dict[str, Any], param: str, what: str
) -> None:
    with pytest.raises(InvalidRequest, match=what) as refused:
        check_csa(CsaSettings(**fields), prompt_tokens=10, locations=TWO_SERVERS, shape=NARROW)
    assert refused.value.param == f"csps.{param}"
    assert str(refused.value).startswith(f"csps.{param}: ")


def test_without_a_gang_any_number_of_levels_may_be_asked_for() -> None:
    check_csa(CsaSettings(levels=4), prompt_tokens=10, locations=(), shape=NARROW)
