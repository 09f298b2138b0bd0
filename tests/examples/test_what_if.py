"""The notebook `examples/what_if.ipynb` runs, and its answers are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "what_if.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_it_is_stored_without_results() -> None:
    for cell in CELLS:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


def test_every_cell_runs_and_the_figures_answer_its_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    said = capsys.readouterr().out
    assert said.count("P99 TTFT (s)") == 3
    assert all(run["completed"] == 200 for run in names["by_policy"].values())
    one, two = names["by_servers"].values()
    assert two["p99_ttft_ms"] < one["p99_ttft_ms"]
    few, many = (
        {part["input_length"]: part["p99_ttft_ms"] for part in run["by_input_length"]}
        for run in names["by_limit"].values()
    )
    assert many["4097-16384"] < few["4097-16384"] / 10
    assert many["262145-1048576"] < few["262145-1048576"] * 1.1
