"""The schema knows every value, describes it, and refuses what is not one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_schema import definitions
from helm_python import Chart, HelmValuesError
from rendered_chart import CHART, EVERYTHING, GPUS, Values

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
AS_IN_KUBERNETES = {
    "affinity",
    "clients",
    "extraInitContainers",
    "extraVolumeMounts",
    "extraVolumes",
    "monitoring",
    "operator",
    "podSecurityContext",
    "securityContext",
    "valueFrom",
}
FREE = AS_IN_KUBERNETES | {"global", "scheduling", "tolerations"}
"""Objects whose keys are checked by Kubernetes, or by the application."""


def test_settings_are_those_of_the_application() -> None:
    """`tests/frozen_surface/record.py` writes them."""
    assert SCHEMA["definitions"] == definitions()


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object of the schema, with its dotted path."""
    if schema.get("type") == "object":
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from objects(child, f"{path}.{name}".strip("."))
    if "items" in schema:
        yield from objects(schema["items"], path)


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, schema in objects(SCHEMA):
        for name, child in schema.get("properties", {}).items():
            yield f"{path}.{name}".strip("."), child


def check(values: Values) -> None:
    Chart.load(CHART).validate_schema(values)


@pytest.mark.parametrize("values", [{}, EVERYTHING, GPUS], ids=["defaults", "everything", "gpus"])
def test_right_values_pass(values: Values) -> None:
    check(values)


def test_unknown_keys_are_refused_everywhere() -> None:
    for path, schema in objects(SCHEMA):
        if path.rpartition(".")[2] not in FREE:
            allowed = schema.get("additionalProperties")
            assert allowed is False or allowed == {"type": "string"}, path


def test_every_value_is_described() -> None:
    assert [path for path, schema in properties() if not schema.get("description")] == []


def test_schema_and_defaults_name_the_same_values() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, schema in objects(SCHEMA):
        here = defaults
        for part in path.split(".") if path else []:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict) and "properties" in schema:
            assert set(here) == set(schema["properties"]) - {"global"}, path


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"prefil": {}}, "prefil"),
        ({"prefill": {"instnaces": 4}}, "instnaces"),
        ({"model": {"volume": {"claim": "x"}}}, "claim"),
        ({"prefill": {"instances": 0}}, "instances"),
        ({"prefill": {"instances": "two"}}, "instances"),
        ({"decode": {"gpusPerRank": 2}}, "gpusPerRank"),
        ({"topology": {"prefill": ["0-0"]}}, "topology"),
        ({"topology": {"prefill": ["0-11-010"]}}, "topology"),
        ({"topology": {"podsAreServers": "yes"}}, "podsAreServers"),
        ({"telemetry": {"otlpEndpoint": "collector:4318"}}, "otlpEndpoint"),
        ({"telemetry": {"sample": 2}}, "sample"),
        ({"telemetry": {"timelineSample": -1}}, "timelineSample"),
        ({"pods": {"extraVolumes": [{"name": "model"}]}}, "extraVolumes"),
        ({"auth": {"apiKeys": ["short"]}}, "apiKeys"),
        ({"auth": {"apiKeys": ["two,keys-in-one-string"]}}, "apiKeys"),
        ({"extraSettings": {"default_max_token": 7}}, "default_max_token"),
        ({"extraSettings": {"decode": {"prefill_token_max": 7}}}, "prefill_token_max"),
        ({"extraSettings": {"auth": {"limits": {"kv_shares": 1}}}}, "kv_shares"),
        ({"extraSettings": {"kv_transfer": {"checksum": 2}}}, "checksum"),
        ({"extraSettings": {"num_replicas": 2}}, "num_replicas"),
        ({"prefill": {"kvSlots": "all"}}, "kvSlots"),
        ({"telemetry": {"metricsPrefix": "vllm:"}}, "metricsPrefix"),
        ({"model": {"download": {"revision": "main"}}}, "revision"),
        ({"model": {"download": {"token": "hf_x"}}}, "token"),
        ({"ray": {"version": "latest"}}, "version"),
        ({"service": {"type": "Loadbalancer"}}, "type"),
        ({"ingress": {"enabled": True}}, "host"),
        ({"fullnameOverride": "1-starts-with-a-digit"}, "fullnameOverride"),
    ],
)
def test_wrong_values_are_named(values: Values, complaint: str) -> None:
    with pytest.raises(HelmValuesError, match=complaint):
        check(values)


def test_every_setting_of_the_documentation_may_be_extra() -> None:
    """Sections of the settings are checked at render time; what a policy takes is the policy's."""
    extra = {"kv_reuse": {"max_share": 0.3}, "auth": {"overrides": {"alice": {"kv_share": 0.5}}}}
    check({"extraSettings": {**extra, "scheduling": {"overtaking_s": 5}, "slo": {"ttft_ms": 500}}})


def test_chart_can_be_packaged(tmp_path: Path) -> None:
    archive = Chart.load(CHART).save(tmp_path)
    assert {"README.md", "presets/cpu.yaml", "files/alerts.yaml"} <= {
        file["name"] for file in Chart.load(archive).files
    }
