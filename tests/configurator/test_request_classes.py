"""Every request that a client can make ends in a plan or in a documented error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from property_examples import examples
from pydantic import ValidationError
from test_predicted_options import PREDICTED, SHAPE, Loses

from csps.configurator.costs.cost_table import CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    RING_CLASSES,
    StrategyChoices,
    StrategyQuestions,
    parse_option,
)
from csps.protocols.core.topology import GroupShape
from csps.protocols.openai.csps_options import CspsRequestOptions, request_class
from csps.services.router.cost_table_service import CostTableService

VALUES: dict[str, list[Any]] = {
    "attention": ["auto", "exact", "csa"],
    "objective": ["ttft", "accuracy"],
    "max_accuracy_loss": [0, 0.01, 1],
    "max_ttft_ms": [0.001, 1e9],
    "levels": [1, 2, 4],
    "drop_ratio": [0, 0.9, [0, [0.5, 0.9]]],
    "coverage": [0.5, 1, [1, [0.5, 0.9]]],
    "micro_partitions": [1, [2, 1], 64],
    "strategy": ["ntp", "tp", "tp_flat", "ring_kv", "ring_q", "ring"],
    "nested": [False, True],
    "drop_queries": [False, True],
    "importance_window": [0, 1, 64, 1 << 24],
    "importance_layer": ["previous", "same"],
    "sinks": [0, 1 << 24],
    "tail": [0, 1 << 24],
    "pipelined": [False, True],
    "decode_kept_only": [False, True],
}
"""Each kind of value of each field of `csps` that has a say in attention."""
OPTIONS = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}
)
PAIR, TOKENS = GroupShape((1, 1)), 1_536


class Nothing(Loses):
    """F_Ad that loses nothing, so that whatever a client fixes is compared."""

    def _lost(self, configuration: CsaSettings) -> float:
        return 0.0


RULES = StrategyRules(
    SHAPE,
    predicted=replace(PREDICTED, accuracy=Nothing()),  # type: ignore[arg-type]
    accuracy=Nothing(),  # type: ignore[arg-type]
)


def test_all_fields_are_tried() -> None:
    assert set(VALUES) == set(CspsRequestOptions.model_fields) - {"unmet", "explain"}


async def answer(questions: StrategyQuestions) -> StrategyChoices:
    return RULES.answer(questions)


@settings(max_examples=examples(30))
@given(OPTIONS)
@example({"attention": "csa", "importance_window": 0, "max_accuracy_loss": 0.1})
@example({"attention": "csa", "importance_window": 0, "max_ttft_ms": 1e9})
@example({"attention": "csa", "strategy": "tp_flat", "max_accuracy_loss": 1})
@example({"attention": "csa", "micro_partitions": 64, "max_accuracy_loss": 1})
@example({"attention": "csa", "drop_queries": True, "strategy": "tp", "max_accuracy_loss": 1})
async def test_a_request_gets_an_option_at_the_first_attempt(csps: dict[str, Any]) -> None:
    try:
        cls = request_class(CspsRequestOptions.model_validate(csps))
    except ValidationError:
        return  # a 400 that names the field
    with pytest.MonkeyPatch.context() as patch:

        async def never(seconds: float) -> None:
            pytest.fail("the question was asked again")

        book = CostTableService(CostTable(latencies=SHIPPED), answer)
        told: list[Any] = []
        book.start(told.append)
        patch.setattr("csps.services.router.cost_table_service.asyncio.sleep", never)
        book.register_class(cls)
        missed = book.costs.best(cls.key, PAIR, 0, TOKENS).cache_miss
        assert missed == (cls.key not in RING_CLASSES)
        book.request_misses()
        if missed:
            assert book._asking is not None
            await book._asking
            (event,) = told
            book.costs.use(event.digest)
        best = book.costs.best(cls.key, PAIR, 0, TOKENS)
        assert not best.cache_miss
        assert parse_option(best.strategy).strategy
        assert book.costs.table.buckets or not missed
