"""Options of the cost table on real ranks, over HTTP.

An option that drops nothing answers like transformers. One that drops runs by its name, and its KV
stays within the bounds that it was computed in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from greedy_reference import greedy_tokens
from http_over_ranks import Served, served

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    BOUNDED,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestions,
    option_name,
)

LENGTH, TOKENS = 400, 4
WHOLE = StrategyChoice(strategy="ulysses", reason="whole")
BEHIND = StrategyChoice(strategy="ring_q", reason="behind history", permille=900)
PIPELINED = CsaSettings(levels=2, micro_partitions=((3, 2),), strategy="ntp")
SPARSE = CsaSettings(
    levels=2,
    drop_ratios=((0.0,), (0.6, 0.25), (0.0,)),
    micro_partitions=((4, 2), (4, 1), (4, 2)),
    importance_layer="same",
    strategy="ntp",
    tail=16,
)
GATHERED = CsaSettings(levels=2, drop_ratios=((0.5,),), micro_partitions=((2,),), strategy="tp")
OPTIONS = (
    WHOLE,
    StrategyChoice(strategy=option_name("levels", PIPELINED), reason="cut", permille=900),
    StrategyChoice(strategy=option_name("sp_tp", GATHERED), reason="tp", permille=800, loss=0.01),
    StrategyChoice(strategy=option_name("csa", SPARSE), reason="sparse", permille=100, loss=0.05),
)


async def configure(questions: StrategyQuestions) -> StrategyChoices:
    exact = {False: (WHOLE,), True: (BEHIND,)}
    return StrategyChoices(
        chosen=tuple(
            OPTIONS if question.bounded else exact[question.history > 0]
            for question in questions.asked
        )
    )


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * length + seed * place + place * place) % 251 for place in range(length)]


async def ask(server: Served, prompt: list[int], **wanted: Any) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "csps": {"explain": True, **wanted},
    }  # fmt: skip
    answer: httpx.Response = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def plan_of(told: dict[str, Any]) -> tuple[str, str, float | None, bool | None]:
    plan = told["csps"]["plan"]
    return (
        plan["attention"], plan["strategy"], plan["predicted_accuracy_loss"], plan["bounds_met"],
    )  # fmt: skip


def cached(told: dict[str, Any]) -> int:
    count: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_options_run_by_their_names(tiny_llama: Path) -> None:
    def said_by_transformers(prompt: list[int]) -> str:
        return Tokenizer(tiny_llama).decode(greedy_tokens(tiny_llama, prompt, TOKENS))

    async with served(tiny_llama, kv_slots=8192, configure=configure, reuse=True) as server:
        first = prompt_of(LENGTH, 1)
        told = await ask(server, first, max_accuracy_loss=0)
        assert plan_of(told) == ("exact", "ulysses", 0.0, True)  # nothing was compared yet
        assert any(bucket.row == BOUNDED for bucket in server.costs.costs.table.buckets)

        lossless = prompt_of(LENGTH, 2)
        told = await ask(server, lossless, max_accuracy_loss=0)
        assert plan_of(told) == ("exact", "levels", 0.0, True)
        assert told["csps"]["plan"]["csa"]["layer_groups"][0]["micro_partitions"] == [3, 2]
        assert told["choices"][0]["text"] == said_by_transformers(lossless)

        told = await ask(server, prompt_of(LENGTH, 5), max_accuracy_loss=0.02)
        assert plan_of(told) == ("csa", "sp_tp", 0.01, True)

        sparse = prompt_of(LENGTH, 3)
        told = await ask(server, sparse, max_accuracy_loss=0.1)
        assert plan_of(told) == ("csa", "csa", 0.05, True)
        layers = told["csps"]["plan"]["csa"]["layer_groups"]
        assert [(each["drop_ratios"], each["micro_partitions"]) for each in layers] == [
            ([[0.0]], [4, 2]),
            ([[0.6, 0.25]], [4, 1]),
            ([[0.0]], [4, 2]),
        ][: len(layers)]
        assert len(layers) >= 2
        assert told["csps"]["plan"]["csa"]["tail"] == 16

        told = await ask(server, [*sparse, *prompt_of(300, 4)], max_accuracy_loss=0.1)
        assert cached(told) >= 256
        assert plan_of(told)[0] == "exact"  # behind history
        for others in ({}, {"max_accuracy_loss": 0}):
            told = await ask(server, sparse, **others)
            assert cached(told) == 0
            assert told["choices"][0]["text"] == said_by_transformers(sparse)

        for seed in (7, 8):  # the first time nothing may have been compared yet
            going_on = [*sparse, *prompt_of(300, seed)]
            told = await ask(server, going_on)
            assert cached(told) >= 256
            assert told["choices"][0]["text"] == said_by_transformers(going_on)
        assert plan_of(told) == ("exact", "ring_q", 0.0, None)
        assert told["csps"]["plan"]["reason"].endswith("; behind history")
        rendered = server.metrics.render().decode()
        assert 'strategy="levels"' in rendered
        assert "#{" not in rendered, "labels of as many values as there are settings"
