"""The dashboard and the alerts ask for metrics that exist, and the page names all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from csps.services.scheduling.core.scheduler import SchedulerCounts
from csps.services.telemetry.metrics import OF_VLLM, Metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD = DOCS / "monitoring" / "grafana-dashboard.json"
ALERTS = yaml.safe_load((DOCS / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
SUFFIXES = ("_bucket", "_sum", "_count")


class Load:
    counts = SchedulerCounts(running=0, waiting=0, prefill_kv=0.0, decode_kv=0.0, window_kv=0.0)
    ready = True


@pytest.fixture(scope="module")
def types() -> dict[str, str]:
    """Kind of each metric, under the name that `/metrics` has, without `csps:`."""
    metrics = Metrics("m")
    metrics.watch(Load())
    lines = re.findall(r"^# TYPE csps:(\S+) (\w+)$", metrics.render().decode(), re.MULTILINE)
    return {name: kind for name, kind in lines if not name.endswith("_created")}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_metric_of_the_dashboard_exists(types: dict[str, str]) -> None:
    asked = {name for expression in expressions() for name in re.findall(r"csps:(\w+)", expression)}
    histograms = {name for name, kind in types.items() if kind == "histogram"}
    plain = set(types) - histograms
    assert asked <= plain | {name + suffix for name in histograms for suffix in SUFFIXES}


def test_every_metric_of_the_alerts_exists_under_either_prefix(types: dict[str, str]) -> None:
    asked = {name for alert in ALERTS for name in re.findall(r"csps:(\w+)", alert["expr"])}
    plain = {name.removesuffix("_sum").removesuffix("_count") for name in asked}
    assert plain <= set(types)
    assert not {name.removesuffix("_total") for name in plain} & OF_VLLM


def test_the_page_says_what_to_do_about_every_alert() -> None:
    page = (DOCS / "metrics.md").read_text()
    named = re.findall(r"^\| `(Csps\w+)` \|", page, re.MULTILINE)
    assert named == [alert["alert"] for alert in ALERTS]


def test_the_page_names_every_metric_once(types: dict[str, str]) -> None:
    page, _, _ = (DOCS / "metrics.md").read_text().partition("## Alerts")
    rows = [line for line in page.splitlines() if line[:3] == "| `"]
    named = [
        name for row in rows for name in re.findall(r"`(\w+)(?:\{[^}]*\})?`", row.split(" | ")[0])
    ]
    assert sorted(named) == sorted(types)


def test_places_of_panels_do_not_overlap() -> None:
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])
        }
        assert not cells & taken
        taken |= cells


def test_the_scrape_configuration_asks_the_port_of_the_server() -> None:
    config = yaml.safe_load((DOCS / "monitoring" / "prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    assert (DOCS / "monitoring" / rules).is_file()
    (job,) = config["scrape_configs"]
    assert (job["metrics_path"], job["static_configs"]) == (
        "/metrics",
        [{"targets": ["127.0.0.1:8000"]}],
    )
