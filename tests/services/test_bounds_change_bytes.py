"""A deployed server with the included model, its shipped losses and the configurator's rules: a
bound that allows a loss changes what ranks compute and send, and a bound of 0 does not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gang_threads import eventually
from http_over_ranks import Served, served
from prometheus_client.parser import text_string_to_metric_families

from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.plan.predicted_options import (
    DirectAnswerer,
    PredictedOptions,
    answered_space,
)
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.configurator.regressors.accuracy import shipped_accuracy
from csps.configurator.regressors.direct import Predicted
from csps.configurator.search.search import SearchProblem
from csps.configurator.search.space import LayerGroups
from csps.models.checkpoints.checkpoint import weights_digest
from csps.models.needle_prompts.haystack import ask, build_haystack, draw_facts
from csps.protocols.attention.plan import (
    BOUNDED,
    StrategyChoices,
    StrategyQuestions,
)
from csps.protocols.core.topology import Topology
from csps.services.deployments.configurator import attention_shape
from csps.services.settings.settings import Settings, shipped_models

NEEDLE = shipped_models() / "needle"
LENGTH = 2_500
"""Of two instances' prompts from 2,048 to 4,095 tokens, one of 400 answers was lost with anything
dropped, so that a bound of 0 is exact."""
SHAPE = attention_shape(Settings(model=str(NEEDLE)))
LINK = LinkSpeed(bytes_per_s=1e7, latency_s=1e-4)
PER_TOKEN = LinearTime(each=1e-7)
TIMES = PhaseTimes(
    qkv=PER_TOKEN,
    attention=AttentionTimes(call=2e-5, row=1e-8, pair=2e-9),
    linear=PER_TOKEN,
    rest=PER_TOKEN,
    select=LinearTime(each=1e-8),
    importance=LinearTime(each=2e-9),
    merge=LinearTime(each=1e-8),
    copy=LinearTime(each=1e-10),
)


class Says:
    """Regressors that always propose to drop nearly all."""

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        return Predicted(
            tensor_parallel=0.0, whole=0.0, levels=3.0, ratios=(0.9,), micro=(4.0, 1.0, 1.0, 1.0)
        )


def group_of(places: Sequence[str]) -> SimulatedGroup:
    """Return a group whose servers are joined by a slow link."""
    servers = [place.server_id for place in Topology.of(places).locations]
    return SimulatedGroup(
        shape=SHAPE,
        locations=tuple(places),
        times=TIMES,
        wiring=Wiring.of_servers(servers, inside=replace(LINK, bytes_per_s=1e9), between=LINK),
    )


def rules() -> StrategyRules:
    accuracy = shipped_accuracy(weights_digest(NEEDLE))
    assert accuracy is not None
    answerer = DirectAnswerer(
        space=answered_space(LayerGroups.alike(SHAPE.layers)),
        models={"ttft": Says(), "accuracy": Says()},  # type: ignore[dict-item]
    )
    predicted = PredictedOptions(answerer=answerer, accuracy=accuracy, group_of=group_of)
    return StrategyRules(SHAPE, accuracy=accuracy, predicted=predicted)


def sent_bytes(server: Served) -> float:
    families = text_string_to_metric_families(server.metrics.render().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("prefill_sent_bytes_total")
    )


async def asked(server: Served, seed: int, **wanted: Any) -> tuple[dict[str, Any], float]:
    """Ask for a hidden fact; return the plan and the bytes sent, once the answer was right."""
    rng = random.Random(seed)
    haystack = build_haystack(rng, LENGTH, draw_facts(rng, 4))
    question = ask(haystack, "multi_key", [1])
    before, behind = question.around("last")
    body = {
        "model": "tiny", "prompt": before + haystack.text + behind, "max_tokens": 8,
        "temperature": 0, "csps": {"explain": True, **wanted},
    }  # fmt: skip
    await server.settled()
    sent_before = sent_bytes(server)
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    await server.settled()
    assert told["choices"][0]["text"].split()[:1] == [question.answer], told["choices"]
    plan: dict[str, Any] = told["csps"]["plan"]
    return plan, sent_bytes(server) - sent_before


async def test_a_bound_changes_what_is_sent_and_a_bound_of_0_does_not() -> None:
    its = rules()

    async def configure(questions: StrategyQuestions) -> StrategyChoices:
        return its.answer(questions)

    options = {"kv_slots": 8_192, "prefill_servers": 2, "configure": configure}
    async with served(NEEDLE, **options) as server:  # type: ignore[arg-type]
        first, _ = await asked(server, 1, max_accuracy_loss=0.01)
        assert first["attention"] == "exact", "nothing was compared yet"
        await eventually(
            lambda: any(bucket.row == BOUNDED for bucket in server.costs.costs.table.buckets)
        )
        bytes_by: dict[str, list[float]] = {"exact": [], "0": [], "0.01": []}
        for seed in (2, 3):
            plan, sent = await asked(server, seed, attention="exact")
            assert plan["attention"] == "exact"
            bytes_by["exact"].append(sent)

            plan, sent = await asked(server, seed, max_accuracy_loss=0)
            assert (plan["attention"], plan["predicted_accuracy_loss"]) == ("exact", 0.0)
            assert plan["bounds_met"]
            bytes_by["0"].append(sent)

            plan, sent = await asked(server, seed, max_accuracy_loss=0.01)
            assert (plan["attention"], plan["strategy"], plan["bounds_met"]) == ("csa", "csa", True)
            assert 0 < plan["predicted_accuracy_loss"] <= 0.01
            csa = plan["csa"]
            ratios = [max(map(max, group["drop_ratios"] or [[0]])) for group in csa["layer_groups"]]
            assert csa["levels"] == 2
            assert max(ratios) >= 0.9
            bytes_by["0.01"].append(sent)
        exact, strict, loose = (np.mean(sent) for sent in bytes_by.values())
        assert strict == exact
        assert loose < 0.9 * exact
