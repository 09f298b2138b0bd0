"""The configurator's targets beside its stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configurator_table import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_all_kept_results_are_in_the_table() -> None:
    paths = sorted(RESULTS.glob("configurator-*.json"))
    assert len(paths) >= 4
    aims = list(table([json.loads(path.read_text()) for path in paths]))
    assert sum(aim.what.startswith("bound 0") for aim in aims) == 2
    assert sum(aim.what.startswith("simulator") for aim in aims) == 2
    assert len({aim.what for aim in aims}) == len(aims)


def test_a_server_that_misses_a_bound_is_reported() -> None:
    def row(wish: str, ttft_s: float, kept: float | None = None) -> dict[str, Any]:
        return {"wish": wish, "ttft_s": ttft_s, "kept": kept}

    rows = [
        row("unpipelined", 4.0),
        row("exact", 2.0),
        *(row(f"loss {bound}", 1.0 + 2 * (bound == "0.05")) for bound in ("0", "0.01", "0.05")),
        row("ttft 0.6", 1.0, kept=0.9),
        row("ttft 0.8", 1.0, kept=1.0),
    ]
    result = {"benchmark": "configurator live", "length": 8, "rows": rows}
    assert [row.reached for row in table([result])] == [False, True, True, False, True]
