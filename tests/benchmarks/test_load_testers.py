"""The calls of guidellm and aiperf, and the parsing of their reports.

Fake programs record their arguments. The real ones run with `make guidellm` and `make aiperf`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from load_testers import TOOLS, Load

ROOT = Path(__file__).resolve().parents[2]
LOAD = Load(url="http://127.0.0.1:8000", model="needle", rate=2.0, requests=30)
_MS = {"mean": 2.0, "median": 1.5, "percentiles": {"p99": 9.0}}
GUIDELLM = {
    "time_to_first_token_ms": {"successful": _MS},
    "inter_token_latency_ms": {"successful": {"mean": 0.5}},
    "request_latency": {"successful": {"mean": 0.004}},
    "request_totals": {"successful": 29, "errored": 1, "incomplete": 0, "total": 30},
}
AIPERF = {
    "time_to_first_token": {"avg": 2.0, "p50": 1.5, "p99": 9.0},
    "inter_token_latency": {"avg": 0.5},
    "request_latency": {"avg": 4.0},
    "request_count": {"avg": 29.0},
    "error_request_count": {"avg": 1.0},
}
REPORTS = {
    "guidellm": ("guidellm.json", {"benchmarks": [{"metrics": GUIDELLM}]}),
    "aiperf": ("aiperf/profile_export_aiperf.json", AIPERF),
}


@pytest.mark.parametrize("tool", REPORTS)
def test_a_report_is_read(tool: str, tmp_path: Path) -> None:
    name, report = REPORTS[tool]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report))
    program = tmp_path / "bin" / tool
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$HF_HUB_OFFLINE" "$HF_HOME" "$@" > asked\n')
    program.chmod(0o755)
    found = TOOLS[tool](LOAD, tmp_path, program.parent)
    assert (found.completed, found.failed) == (29, 1)
    assert (found.mean_ttft_ms, found.median_ttft_ms, found.p99_ttft_ms) == (2.0, 1.5, 9.0)
    assert (found.mean_itl_ms, found.mean_e2el_ms) == (0.5, 4.0)
    offline, home, *words = (tmp_path / "asked").read_text().split("\n")
    assert offline == "1"
    assert any("127.0.0.1:8000" in word for word in words)
    if tool == "aiperf":
        entry = Path(home) / "hub" / "models--csps--needle"
        revision = (entry / "refs" / "main").read_text()
        assert (entry / "snapshots" / revision / "tokenizer.json").is_file()


def test_their_versions_are_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pins = extras["bench"]
    assert all(re.fullmatch(r"[a-z]+==[0-9.]+", pin) for pin in pins)
    assert {pin.partition("==")[0] for pin in pins} == set(TOOLS)
    guide = (ROOT / "docs" / "load-testing.md").read_text()
    assert all(pin.replace("==", " ") in guide for pin in pins)
