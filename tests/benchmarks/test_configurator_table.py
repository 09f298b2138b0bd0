"""The configurator's targets beside its stored results, and what its regressors compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configurator import live_rows
from configurator_oracle import Nearest, Zeros
from configurator_simulator import pipelined
from configurator_table import table

from csps.configurator.regressors.direct import DirectSample, output_names, problem_features
from csps.configurator.regressors.saved import Description
from csps.configurator.search.search import SearchProblem
from csps.loadgen.planner.hardware_file import load_group
from csps.protocols.attention.plan import Objective

CLUSTER = Path(__file__).parents[2] / "benchmarks" / "needle-two-servers.yaml"
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
    for result in (
        {"benchmark": "configurator live", "length": 32_768, "rows": rows},
        {
            "benchmark": "configurator live",
            "rows": [{**row, "tokens": tokens} for tokens in (32_768, 8_192) for row in rows],
        },
    ):
        reached = [row.reached for row in table([result])]
        assert reached[:5] == [False, True, True, False, True]
        assert reached[5:] in ([], [False, True, None, False, True]), "8K tokens have no aim"


def test_overlap_is_told_apart_from_dropping() -> None:
    def row(ratio: float, micro: str, measured_s: float) -> dict[str, Any]:
        about = {"tokens": 8, "strategy": "tp", "ratio": ratio, "micro": micro}
        return {**about, "measured_s": measured_s, "predicted_s": 1.0}

    rows = [row(0.0, "(4,)", 1.0), row(0.0, "-", 2.0), row(0.9, "(4,)", 0.6), row(0.9, "-", 0.5)]
    exact, sparse = pipelined(rows)
    assert (exact["drops"], exact["measured"], exact["pairs"]) == (False, 0.5, 1)
    assert (sparse["drops"], sparse["measured"], sparse["pairs"]) == (True, 1.2, 1)


def test_runs_of_a_live_server_become_rows() -> None:
    about = {"strategy": "csa", "levels": 3, "ratio": 0.9, "pipelined": True, "loss": 0.0}
    runs = [
        {"tokens": 8, "wish": "ttft 1", "ttft_s": ttft_s, "predicted_s": 2.0, "bound_s": 2.5}
        | {**about, "said_met": True, "reason": ""}
        for ttft_s in (1.0, 2.0, 3.0)
    ]
    (of_wish,) = live_rows(runs)
    assert (of_wish["ttft_s"], of_wish["kept"], of_wish["ratio"]) == (2.0, 2 / 3, 0.9)


def test_the_nearest_learned_problem_answers() -> None:
    group = load_group(str(CLUSTER), instances=4)

    def problem(tokens: int) -> SearchProblem:
        return SearchProblem(group=group, tokens=tokens, objective=Objective(max_accuracy_loss=0.1))

    def sample(tokens: int, ratio: float) -> DirectSample:
        outputs = (0.0, 0.0, 3.0, ratio, 3.0, 1.0, 0.0, 0.0)
        return DirectSample(problem_features(problem(tokens), 1.0), outputs)

    description = Description(
        kind="ttft", trained_for={}, training_set="", samples=2, features=(), held_out={}
    )
    nearest = Nearest(description, {}, [sample(1024, 0.2), sample(65_536, 0.9)])
    assert nearest.predict(problem(2048), 1.0).ratios == (0.2,)
    assert nearest.predict(problem(32_768), 1.0).ratios == (0.9,)
    assert nearest.predict(problem(32_768), 1.0).micro == (8.0, 2.0, 1.0, 1.0)
    nothing = Zeros(description, {}, len(output_names(1))).predict(problem(2048), 1.0)
    assert (nothing.ratios, nothing.micro) == ((0.0,), (1.0,) * 4)


def test_every_output_of_the_regressors_was_compared() -> None:
    paths = sorted(RESULTS.glob("configurator-starts-*.json"))
    assert paths, "nothing was published"
    for path in paths:
        result = json.loads(path.read_text())
        assert {cell["output"] for cell in result["cells"]} == set(output_names(1))
        asked = [row for row in result["rows"] if row["start"] == "zeros"]
        assert len(asked) >= 100
