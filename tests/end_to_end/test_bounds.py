"""A deployed server answers bounds by what was measured and learned for it: the first prompt of its
length exactly, later ones by what the configurator has found meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployed_server import DEADLINE_S, MODEL, POLL_S, Deployed, deployed
from measured_rows import accuracy_row, add_times
from tiny_checkpoints import make_checkpoint, random_tokens

from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.services.measured.identity import identity_of
from csps.services.profiling import train
from csps.services.settings.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LENGTH = 3_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("bounds")
    model = make_checkpoint(folder / "model", num_hidden_layers=4, max_position_embeddings=8_192)
    args: dict[str, Any] = {
        "scaling_information_base": str(folder / "sib.sqlite"),
        "scheduling": {"policy": "csps", "spt_tokens": 2_048, "short_tokens": 256},
    }
    settings = Settings.model_validate({"model": str(model), **args})
    with ScalingInformationBase.create(
        Path(settings.scaling_information_base), identity_of(settings)
    ) as base:
        for percent in range(2, 98, 4):
            base.add(accuracy_row(percent / 100, 100 if percent < 60 else 90))
        add_times(base)
    application = {"name": "csps", "import_path": "csps.services.app:build"}
    config = folder / "training.yaml"
    config.write_text(
        yaml.safe_dump({"applications": [{**application, "args": {"model": str(model), **args}}]})
    )
    train.main(["--config", str(config)])
    with deployed(model, folder, **args) as server:
        yield server


def plan_of(server: Deployed, seed: int, **wanted: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": random_tokens(LENGTH, seed=seed),
        "max_tokens": 2,
        "csps": {"explain": True, **wanted},
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    plan: dict[str, Any] = answer.json()["csps"]["plan"]
    return plan


def test_a_wider_bound_is_answered_by_what_was_learned(server: Deployed) -> None:
    deadline, seed = time.monotonic() + DEADLINE_S, 1
    plan = plan_of(server, seed, max_accuracy_loss=0.2)
    assert (plan["attention"], plan["bounds_met"]) == ("exact", True)
    while "predicted to take" not in plan["reason"]:
        assert time.monotonic() < deadline, "the configurator has found nothing"
        time.sleep(POLL_S)
        seed += 1
        plan = plan_of(server, seed, max_accuracy_loss=0.2)
    strict = plan_of(server, seed + 1, max_accuracy_loss=0)
    assert strict["predicted_accuracy_loss"] == 0.0
    assert "predicted to take" in strict["reason"]
    assert plan_of(server, seed + 2)["reason"].startswith("exact attention loses nothing")
    server.wait_gauge("prefill_prediction_error_ratio_count", seed + 2)


def test_unattainable_bounds_are_rejected_on_request(server: Deployed) -> None:
    body = {
        "model": MODEL,
        "prompt": random_tokens(LENGTH, seed=0),
        "csps": {"max_ttft_ms": 0.001, "unmet": "refuse"},
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "bound_not_met"
