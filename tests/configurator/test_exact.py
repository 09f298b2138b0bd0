"""The configurator without approximation is honest about it."""

from __future__ import annotations

import pytest

from csps.configurator.exact import ExactConfigurator
from csps.protocols.errors import InvalidRequest
from csps.protocols.plans import Objective, PlanRequest


@pytest.mark.parametrize("attention", ["auto", "exact"])
def test_everything_is_exact_and_loses_nothing(attention: str) -> None:
    request = PlanRequest(prompt_tokens=1_000_000, attention=attention)  # type: ignore[arg-type]
    plan = ExactConfigurator().plan(request)
    assert (plan.attention, plan.predicted_accuracy_loss) == ("exact", 0.0)


def test_a_ttft_bound_is_not_promised() -> None:
    objective = Objective(kind="accuracy", max_ttft_ms=10.0)
    plan = ExactConfigurator().plan(PlanRequest(prompt_tokens=10, objective=objective))
    assert plan.predicted_ttft_ms is None
    assert "was not predicted" in plan.reason


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ExactConfigurator().plan(PlanRequest(prompt_tokens=10, attention="csa"))
    assert refused.value.param == "csps.attention"
