"""The Serve configuration inside the RayService is one that the application accepts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmValuesError
from rendered_chart import (
    ELASTIC,
    EVERYTHING,
    GPUS,
    PRESETS,
    Values,
    container,
    environment,
    render,
)

from csps.protocols.core.errors import ConfigError
from csps.services.app import ONE_LOOP
from csps.services.http.header_deadline import HOOK
from csps.services.launch.deploy_config import IMPORT_PATH, read_config
from csps.services.launch.ray_head import FORCE_STOP
from csps.services.launch.reverse_proxy import (
    HEALTH_CHECK_PERIOD_S,
    HEALTH_CHECK_TIMEOUT_S,
    reverse_proxy_environment,
)
from csps.services.settings.hub import is_hub_id
from csps.services.settings.settings import Settings


def settings(values: Values | None = None) -> Settings:
    return Settings.model_validate(render(values).application["args"])


@pytest.mark.parametrize("values", [{}, GPUS, ELASTIC], ids=["defaults", "gpus", "elastic"])
def test_check_config_accepts_it(values: Values, tmp_path: Path) -> None:
    """The application's own check rejects every key that Serve or the settings do not know."""
    path = tmp_path / "serve.yaml"
    path.write_text(render(values).serve_config_text)
    config = read_config(path)
    assert (config.host, config.port) == ("0.0.0.0", 8000)


def test_workers_have_a_proxy_of_their_own() -> None:
    """KubeRay sends traffic to every ready pod, not to the head alone."""
    assert yaml.safe_load(render().serve_config_text)["proxy_location"] == "EveryNode"
    assert render().application["import_path"] == IMPORT_PATH


def test_half_sent_headers_have_a_deadline_on_every_pod() -> None:
    for group in render().groups.values():
        variables = {name: variable.get("value") for name, variable in environment(group).items()}
        assert variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == HOOK
        period = float(variables["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"])
        assert period == HEALTH_CHECK_PERIOD_S
        timeout = float(variables["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"])
        assert timeout == HEALTH_CHECK_TIMEOUT_S


def test_a_frozen_router_is_killed_as_under_make_serve() -> None:
    for group in render().groups.values():
        variables = {name: variable.get("value") for name, variable in environment(group).items()}
        assert variables.items() >= FORCE_STOP.items()


def test_the_router_has_one_event_loop() -> None:
    """The chart's options of a deployment's actor replace the code's."""
    options = {
        deployment["name"]: deployment["ray_actor_options"]
        for deployment in render().application["deployments"]
    }
    assert options["Router"]["runtime_env"] == {"env_vars": ONE_LOOP}


def test_replicas_cannot_be_asked_for() -> None:
    for deployment in render(EVERYTHING).application["deployments"]:
        assert not {"num_replicas", "autoscaling_config"} & set(deployment)
    with pytest.raises(HelmValuesError, match="num_replicas"):
        settings({"extraSettings": {"num_replicas": 2}})


def test_defaults_are_those_of_the_application() -> None:
    chart, own = settings({"auth": {"requireApiKey": False}}), Settings()
    only_here: Any = {"prefill": {"num_cpus"}, "decode": {"num_cpus"}, "telemetry": True}
    assert chart.model_dump(exclude=only_here) == own.model_dump(exclude=only_here)
    assert chart.prefill.num_cpus == chart.prefill.threads


def test_every_value_arrives() -> None:
    gang = {"instances": 3, "tp": 2, "threads": 5, "kvSlots": 1000}
    location = [f"0-0-{rank}" for rank in range(6)]
    got = settings(
        {
            "model": {"path": "/models/m", "servedName": "m", "maxPositions": 2_000_000},
            "prefill": gang,
            "decode": gang,
            "scheduling": {"policy": "fixed_sp", "sp": 1, "spread_tokens": 13, "max_batch": 14},
            "queue": {"maxWaiting": 15, "maxWaitingTokens": 100_000_000, "maxAttempts": 16},
            "topology": {"prefill": location, "decode": location, "linkRatio": 12.5},
            "telemetry": {"sample": 0.25, "timelineSample": 0.125, "project": "p"},
            "drainSeconds": 17,
        }
    )
    assert (got.model, got.served_model_name, got.max_positions) == ("/models/m", "m", 2_000_000)
    for section in (got.prefill, got.decode):
        assert (section.ranks, section.tp, section.threads, section.kv_slots) == (6, 2, 5, 1000)
    assert got.scheduling.policy == "fixed_sp"
    assert got.scheduling.options == {"sp": 1, "spread_tokens": 13, "max_batch": 14}
    given = {"max_waiting", "max_waiting_tokens", "max_attempts"}
    assert got.queue.model_dump(include=given) == {
        "max_waiting": 15,
        "max_waiting_tokens": 100_000_000,
        "max_attempts": 16,
    }
    assert got.topology.prefill == got.topology.decode == tuple(location)
    assert got.topology.link_ratio == 12.5
    telemetry = got.telemetry
    assert (telemetry.sample, telemetry.timeline_sample, telemetry.project) == (0.25, 0.125, "p")
    assert got.drain_s == 17


def test_tracing_goes_to_an_endpoint_or_nowhere() -> None:
    assert settings().telemetry.enabled is False
    traced = settings(EVERYTHING).telemetry
    assert traced.enabled is True
    assert traced.otlp_endpoint == EVERYTHING["telemetry"]["otlpEndpoint"]


def test_further_settings_pass_but_cannot_contradict_the_pods() -> None:
    further = {"default_max_tokens": 7, "prefill": {"instances": 99}}
    got = settings({"extraSettings": further})
    assert got.default_max_tokens == 7
    assert got.prefill.instances == 2


def test_misspelled_options_of_a_policy_are_found_by_the_application() -> None:
    """All others are refused when the chart is rendered: `test_helm_values.py`."""
    with pytest.raises(ConfigError, match="overtaking_s"):
        settings({"scheduling": {"policy": "csps", "overtaking": 7}})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_name_says(preset: str) -> None:
    values = PRESETS[preset]
    got = settings(values)
    assert got.dtype == "bfloat16"
    assert is_hub_id(got.model)
    on_gpus = got.prefill.num_gpus + got.decode.num_gpus > 0
    assert on_gpus == ("gpus" in preset)
    if on_gpus:
        assert sum(gang.ranks * gang.num_gpus for gang in got.gangs.values()) == 8
        assert got.prefill.kv_slots == got.decode.kv_slots == "auto"


def test_haproxy_runs_as_under_make_serve(tmp_path: Path) -> None:
    """With the same variables; its program lies where an init container writes it."""
    reference = reverse_proxy_environment(
        tmp_path, tmp_path, ports=[8404, 9101, 8500], host="127.0.0.1"
    )
    expected = {
        name: value.replace(str(tmp_path), "/run/csps") for name, value in reference.items()
    }
    for group in render().groups.values():
        variables = {name: variable.get("value") for name, variable in environment(group).items()}
        assert {name: variables.get(name) for name in expected} == expected
        (writes,) = group["template"]["spec"]["initContainers"]
        (mount,) = writes["volumeMounts"]
        assert mount in container(group)["volumeMounts"]
        assert mount["mountPath"] == str(Path(expected["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent)
        assert writes["command"][-1] == mount["mountPath"]
    without = render({"haproxy": {"enabled": False}}).groups["head"]
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment(without)
    assert "initContainers" not in without["template"]["spec"]


def test_the_init_container_writes_a_program_that_runs(tmp_path: Path) -> None:
    """It knows no rule for single addresses, and so answers a scraper's."""
    (writes,) = render().groups["head"]["template"]["spec"]["initContainers"]
    words = [sys.executable, *writes["command"][1:-1], str(tmp_path)]
    subprocess.run(words, check=True, timeout=60)
    program = tmp_path / "haproxy"
    assert os.access(program, os.X_OK)
    text = program.read_text()
    assert "timeout http-request" in text
    assert "router-lost.http" in text
    assert "/metrics" not in text
    assert "sc0_conn_cur" not in text
