"""Requests on a tensor-parallel gang over HTTP, on real ranks.

The strategy that the deployed configurator chooses runs, answers like transformers, and is named
with its reason. Sparse attention runs as asked, and transfers less.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gang_threads import eventually
from greedy_reference import greedy_tokens
from http_over_ranks import Served, served
from prometheus_client.parser import text_string_to_metric_families
from ring_traffic import ring_kv_traffic, ring_q_traffic
from tiny_checkpoints import make_checkpoint

from csps.configurator.model.traffic import csa_traffic, gathered_weights_traffic, instance_sums
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.attention.csa import CsaPlan, LayerGroup
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.core.topology import GroupShape
from csps.services.deployments.configurator import attention_shape, make_rules
from csps.services.router.cost_table_service import Configure
from csps.services.settings.settings import PrefillSettings, Settings, TopologySettings

TOKENS = 4
SPT, SHORT = 512, 32
FP32 = 4

NARROW: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 4}
"""Model for which two instances of two ranks pay for 2 x 20480 weights from 853 tokens on.

That many heads' rows cost (1 + 1/4) 3/2 + 1 of 64 elements each, split heads' rows 1 + 1/4 + 2.
"""
WIDE: dict[str, Any] = {**NARROW, "hidden_size": 32, "num_attention_heads": 8, "head_dim": 16}
"""Model with queries four times as wide as the rows that SP-TP sends."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("narrow"), num_hidden_layers=3, **NARROW)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("wide"), num_hidden_layers=3, **WIDE)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with three layers that may drop, between two that may not."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), num_hidden_layers=5, **NARROW)


def by_rules(model: Path, *, link_ratio: float = 1.0) -> Configure:
    settings = Settings(
        model=str(model),
        prefill=PrefillSettings(tp=2),
        topology=TopologySettings(link_ratio=link_ratio),
    )
    rules = make_rules(settings)

    async def configure(questions: StrategyQuestions) -> StrategyChoices:
        return rules.answer(questions)

    return configure


def deployed(model: Path, *, servers: int = 1, link_ratio: float = 1.0) -> Any:
    return served(
        model,
        kv_slots=4096,
        prefill_tp=2,
        prefill_servers=servers,
        options={"spt_tokens": SPT, "short_tokens": SHORT},
        configure=by_rules(model, link_ratio=link_ratio),
    )


def prompt_of(length: int) -> list[int]:
    return [(7 * length + place * place) % 251 for place in range(length)]


async def ask(server: Served, length: int, **options: Any) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": prompt_of(length), "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "csps": {"explain": True, **options},
    }  # fmt: skip
    answer: httpx.Response = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def bytes_between_ranks(server: Served) -> int:
    """Return the bytes that prefill has sent so far, without the sums over instances."""
    return sum(sum(rank.engine.mesh.bytes_sent) for rank in server.gangs[0].ranks)


def metric(server: Served, name: str) -> float:
    """Return the sum of a metric's series."""
    families = text_string_to_metric_families(server.metrics.render().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == f"csps:{name}")


def said_by_transformers(model: Path, length: int) -> str:
    return Tokenizer(model).decode(greedy_tokens(model, prompt_of(length), TOKENS))


def check(told: dict[str, Any], model: Path, length: int, strategy: str) -> None:
    plan = told["csps"]["plan"]
    assert (plan["attention"], plan["strategy"]) == ("exact", strategy)
    assert f"'{strategy}', because nothing moves less" in plan["reason"]
    assert told["usage"]["completion_tokens"] == TOKENS
    assert told["choices"][0]["text"] == said_by_transformers(model, length)


@dataclass(frozen=True)
class Sparse:
    """An answer, and the bytes that its prefill's ranks sent each other."""

    told: dict[str, Any]
    sent: int


async def sparsely(
    server: Served, length: int, groups: Sequence[LayerGroup], **asked: Any
) -> Sparse:
    """Answer by a plan of these layer groups."""
    before = bytes_between_ranks(server)
    told = await ask(server, length, attention="csa", strategy="ntp", levels=2, **asked)
    await server.settled()
    assert told["usage"]["completion_tokens"] == TOKENS
    plan = told["csps"]["plan"]
    assert (plan["attention"], plan["strategy"]) == ("csa", "csa")
    assert (plan["csa"]["locations"], plan["csa"]["levels"]) == (["0-0-0", "0-1-2"], 2)
    assert plan["csa"]["layer_groups"] == json.loads(
        json.dumps([asdict(group) for group in groups])
    )
    return Sparse(told, bytes_between_ranks(server) - before)


def counted_bytes(model: Path, length: int, groups: Sequence[LayerGroup]) -> float:
    """Return the bytes by the configurator's formula, over all layers that exchange together."""
    shape = attention_shape(Settings(model=str(model)))
    plan = CsaPlan(locations=("0-0-0", "0-1-2"), levels=2, layer_groups=tuple(groups))
    traffic = csa_traffic(shape, plan, tp=2, spts=[length // 2] * 2)
    return traffic.cost(1.0) * (shape.layers - 1) * FP32


async def test_each_prompt_runs_by_the_strategy_that_transfers_least(narrow: Path) -> None:
    """All at once: long prompts by gathered weights, middling and short ones by split heads.

    Each runs on both instances, except the short ones, which run inside the others.
    """
    wanted = {1030: "gathered_weights", 20: "ulysses", 700: "ulysses", 1100: "gathered_weights"}
    async with deployed(narrow) as server:
        answers = await asyncio.gather(*(ask(server, length) for length in wanted))
        for told, (length, strategy) in zip(answers, wanted.items(), strict=True):
            check(told, narrow, length, strategy)
            assert len(told["csps"]["placement"]["group"]) == (1 if length <= SHORT else 2)
        await server.settled()


async def test_exact_sp_tp_knows_the_servers_of_its_group(wide: Path) -> None:
    async with deployed(wide, servers=2, link_ratio=5.0) as server:
        told = await ask(server, 600)
        check(told, wide, 600, "sp_tp")
        csa = told["csps"]["plan"]["csa"]
        assert csa["locations"] == ["0-0-0", "0-1-2"]
        assert csa["levels"] == 1
        assert "one between servers as 5" in told["csps"]["plan"]["reason"]
        check(await ask(server, 20), wide, 20, "ulysses")
        await server.settled()


async def test_levels_where_the_link_between_servers_is_slow(narrow: Path) -> None:
    async with deployed(narrow, servers=2, link_ratio=10.0) as server:
        told = await ask(server, 600)
        check(told, narrow, 600, "levels")
        csa = told["csps"]["plan"]["csa"]
        assert (csa["locations"], csa["levels"]) == (["0-0-0", "0-1-2"], 2)
        check(await ask(server, 20), narrow, 20, "ulysses")
        await server.settled()


async def test_transferred_bytes_are_those_of_the_formula(narrow: Path) -> None:
    """Besides them, each layer begins with a few words, and the last one computes one row's
    attention."""
    shape = attention_shape(Settings(model=str(narrow)))
    counted = gathered_weights_traffic(shape, GroupShape((2,), tp=2), 1100).cost(1.0)
    async with deployed(narrow) as server:
        check(await ask(server, 1100), narrow, 1100, "gathered_weights")
        await server.settled()
        sent = bytes_between_ranks(server)
        await eventually(lambda: metric(server, "prefill_steps_total") == 1)
        assert metric(server, "prefill_sent_bytes_total") == pytest.approx(sent, rel=0.01)
        kv_mb = 1100 * shape.layers * 2 * shape.kv_heads * shape.head_dim * FP32 / 1e6
        assert metric(server, "kv_transfer_total_mb_sum") == pytest.approx(kv_mb)
    assert sent == pytest.approx(counted * (shape.layers - 1) * FP32, rel=0.01)


async def test_rings_run_as_asked(narrow: Path) -> None:
    """Rings run on two instances, in zigzag, with the bytes of the formulas; and on one."""
    length, shape = 1000, attention_shape(Settings(model=str(narrow)))
    formulas = {"ring_kv": ring_kv_traffic, "ring_q": ring_q_traffic}
    async with deployed(narrow) as server:
        for strategy, formula in formulas.items():
            before = bytes_between_ranks(server)
            told = await ask(server, length, strategy=strategy)
            await server.settled()
            sent = bytes_between_ranks(server) - before
            plan = told["csps"]["plan"]
            assert (plan["attention"], plan["strategy"]) == ("exact", strategy)
            assert told["choices"][0]["text"] == said_by_transformers(narrow, length)
            counted = formula(shape, GroupShape((2,), tp=2), length)
            sums = instance_sums(shape, GroupShape((2,), tp=2), length)
            assert sent == pytest.approx(
                (counted.cost(1.0) - sums.cost(1.0)) * (shape.layers - 1) * FP32, rel=0.01
            )
            assert plan["reason"].endswith(f"; strategy '{strategy}' as asked")
            told = await ask(server, 20, strategy=strategy)
            assert told["csps"]["plan"]["strategy"] == strategy
            assert told["choices"][0]["text"] == said_by_transformers(narrow, 20)


async def test_the_better_ring_is_chosen(narrow: Path) -> None:
    async with deployed(narrow) as server:
        told = await ask(server, 600, strategy="ring", attention="exact")
        plan = told["csps"]["plan"]
        assert (plan["attention"], plan["strategy"]) == ("exact", "ring_kv")
        assert "as the better ring" in plan["reason"]
        assert told["choices"][0]["text"] == said_by_transformers(narrow, 600)
        await server.settled()


def layers(first: int, stop: int, ratios: Sequence[float], *micro_partitions: int) -> LayerGroup:
    return LayerGroup(
        first=first, stop=stop, drop_ratios=(tuple(ratios),), micro_partitions=micro_partitions
    )


BY_HEAD = [0.0, 0.25, 0.5, 0.75]
SPARSE: list[tuple[dict[str, Any], list[LayerGroup]]] = [
    ({"drop_ratio": 0.5, "micro_partitions": [3, 2]}, [layers(0, 5, [0.5], 3, 2)]),
    (
        {"drop_ratio": [0, 0, BY_HEAD], "micro_partitions": [4, 4, [1, 2]]},
        [layers(0, 2, [0.0], 4, 4), layers(2, 5, BY_HEAD, 1, 2)],
    ),
]
"""Options that requests ask for, and the layer groups of their plans."""


async def test_dropped_keys_are_not_transferred(deep: Path) -> None:
    """Two servers, three of five layers drop; all else is the same at any ratio."""
    length, none = 900, [layers(0, 5, [0.0], 4, 4)]
    async with deployed(deep, servers=2) as server:
        exact = await sparsely(server, length, none, drop_ratio=0)
        assert exact.told["choices"][0]["text"] == said_by_transformers(deep, length)
        for asked, groups in SPARSE:
            sparse = await sparsely(server, length, groups, **asked)
            by_formula = counted_bytes(deep, length, none) - counted_bytes(deep, length, groups)
            assert sparse.sent < exact.sent
            assert exact.sent - sparse.sent == by_formula
