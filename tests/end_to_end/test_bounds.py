"""A deployed server of the included model answers bounds by what was measured and learned for it: a
bound that allows a loss changes what ranks compute and send between servers, a bound of 0 does not.

Times are planted before `csps train`, which makes the link between two servers slow. Losses are
those that ship with the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployed_server import DEADLINE_S, MODEL, POLL_S, Deployed, deployed
from measured_rows import add_phases, link_rows

from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.models.needle_prompts.haystack import ask, build_haystack, draw_facts
from csps.services.measured.identity import identity_of
from csps.services.profiling import train
from csps.services.settings.settings import Settings, shipped_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEEDLE = shipped_models() / "needle"
LENGTH = 2_500
"""On two instances, prompts from 2,048 to 4,095 tokens lost one of 400 answers with anything
dropped, so that a bound of 0 is exact."""
PLACES = ["0-0-0", "0-1-0"]
SETTINGS: dict[str, Any] = {
    "model": str(NEEDLE),
    "prefill": {"instances": 2, "kv_slots": 8_192},
    "decode": {"instances": 1, "kv_slots": 8_192},
    "topology": {"prefill": PLACES},
    "scheduling": {"policy": "csps", "spt_tokens": 1_024, "short_tokens": 256},
}
TOO_SOON: dict[str, Any] = {"objective": "accuracy", "max_ttft_ms": 0.001, "unmet": "refuse"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("bounds")
    args = {**SETTINGS, "scaling_information_base": str(folder / "sib.sqlite")}
    settings = Settings.model_validate(args)
    with ScalingInformationBase.create(
        Path(settings.scaling_information_base), identity_of(settings)
    ) as base:
        for row in link_rows(*PLACES, s_per_byte=1e-7):
            base.add(row)
        add_phases(base)
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": args}
    config = folder / "training.yaml"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    train.main(["--config", str(config)])
    del args["model"]
    with deployed(NEEDLE, folder, **args) as server:
        yield server


def posted(server: Deployed, seed: int, **wanted: Any) -> tuple[httpx.Response, str]:
    """Ask for a hidden fact; return the response and the fact."""
    rng = random.Random(seed)
    haystack = build_haystack(rng, LENGTH, draw_facts(rng, 4))
    question = ask(haystack, "multi_key", [1])
    before, behind = question.around("last")
    body = {
        "model": MODEL,
        "prompt": before + haystack.text + behind,
        "max_tokens": 8,
        "temperature": 0,
        "csps": {"explain": True, **wanted},
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    return response, question.answer


def asked(server: Deployed, seed: int, **wanted: Any) -> tuple[dict[str, Any], float]:
    """Return the plan of a right answer, and the bytes that ranks sent to each other for it."""
    before = server.gauge("prefill_sent_bytes_total")
    response, fact = posted(server, seed, **wanted)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"][0]["text"].split()[:1] == [fact], answer["choices"]
    server.assert_only_cache_left()
    plan: dict[str, Any] = answer["csps"]["plan"]
    return plan, server.gauge("prefill_sent_bytes_total") - before


def wait_compared(server: Deployed) -> None:
    """Wait until the configurator has found what loses accuracy and is faster.

    Refused requests run no steps. Measured times would correct the planted ones after sixteen.
    """
    deadline = time.monotonic() + DEADLINE_S
    while "a loss of accuracy" not in posted(server, 0, **TOO_SOON)[0].text:
        assert time.monotonic() < deadline, "the configurator has found nothing"
        time.sleep(POLL_S)


def test_a_bound_changes_what_is_sent_and_a_bound_of_0_does_not(server: Deployed) -> None:
    plan, _ = asked(server, 1, max_accuracy_loss=0.01)
    assert (plan["attention"], plan["bounds_met"]) == ("exact", True), "nothing was compared yet"
    wait_compared(server)
    for seed in (2, 3):
        exact, exact_bytes = asked(server, seed, attention="exact")
        assert exact["attention"] == "exact"
        assert exact["reason"].startswith("the client asked for exact attention")

        for bounds in (
            {"max_accuracy_loss": 0},
            {"objective": "accuracy", "max_ttft_ms": 1e6},  # exact attention fits
        ):
            plan, sent = asked(server, seed, **bounds)
            assert (plan["attention"], plan["predicted_accuracy_loss"]) == ("exact", 0.0)
            assert (plan["strategy"], plan["bounds_met"]) == (exact["strategy"], True)
            assert sent == exact_bytes

        plan, sent = asked(server, seed, max_accuracy_loss=0.01)
        assert (plan["attention"], plan["strategy"], plan["bounds_met"]) == ("csa", "csa", True)
        assert 0 < plan["predicted_accuracy_loss"] <= 0.01
        assert plan["csa"]["levels"] == 2
        (ratios,) = [group["drop_ratios"] for group in plan["csa"]["layer_groups"]]
        assert min(map(min, ratios)) >= 0.9
        assert 0 < sent < exact_bytes / 2  # of four layers, two drop

    plan, sent = asked(server, 4, objective="accuracy", max_ttft_ms=1)
    assert (plan["attention"], plan["bounds_met"]) == ("csa", False)
    assert sent < exact_bytes / 2
    plan, _ = asked(server, 5)
    assert plan["reason"].startswith("exact attention loses nothing")
    server.wait_gauge("prefill_prediction_error_ratio_count", 11)


def test_unattainable_bounds_are_rejected_on_request(server: Deployed) -> None:
    response, _ = posted(server, 0, **TOO_SOON)
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "bound_not_met"
