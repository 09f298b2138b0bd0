"""The comparison with the papers: verdicts, numbers that are kept, and the page."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import papers
import pytest

from csps.configurator.costs.fitting import StepMeasurement, fit_step


def row(**fields: Any) -> papers.Row:
    given = {"section": "A", "what": "b", "jobs": ("one",), "theirs": "1", **fields}
    return papers.Row(ours=lambda found: found["x"], **given)


@pytest.mark.parametrize(
    ("value", "fields", "verdict"),
    [
        (1.02, papers.near(1.0, 0.03), "within"),
        (1.04, papers.near(1.0, 0.03), "**outside**"),
        (0.96, papers.near(1.0, 0.03), "**outside**"),
        (2.0, {"low": 1.15}, "within"),
        (1.1, {"low": 1.15}, "**outside**"),
        (math.nan, {"low": 1.15}, "**outside**"),
        (9.0, {}, "reported"),
    ],
)
def test_a_verdict_follows_from_the_tolerance(
    value: float, fields: dict[str, Any], verdict: str
) -> None:
    assert row(**fields).judged({"one": {"x": value}})[1] == verdict
    assert row(**fields).judged({})[1] == "not run"


def test_every_row_names_jobs_that_there_are() -> None:
    rows = list(papers.rows())
    assert {job for row in rows for job in row.jobs} <= papers.JOBS.keys()
    assert len({row.what for row in rows}) == len(rows)
    assert all(row.tolerance for row in rows if row.low is not None or row.high is not None)


def test_analytic_rows_are_within_their_tolerances() -> None:
    """The rows that take no simulation, but for those that are known to be outside."""
    jobs = (
        *("tetris-table-1", "tetris-examples", "loongserve-times"),
        *("cp-rules", "cp-table-5", "cp-scaling", "cp-mfu"),
    )
    kept = {job: papers.JOBS[job](papers.QUICK) for job in jobs}
    outside = {
        row.what
        for row in papers.rows()
        if set(row.jobs) <= kept.keys() and row.judged(kept)[1] == "**outside**"
    }
    assert outside == {
        "Fig. 3, iteration, SP1 TP8: error at one sequence of 500K tokens",
        "Fig. 3, iteration, SP4 TP2: error at one sequence of 500K tokens",
        "Table 5: all-to-all 10.0% miss rate, us",
        "Tables 6, 7 and text: CP16, 128,000 tokens, s to the first",
    }


@pytest.mark.parametrize(("sp", "tp"), [(1, 8), (2, 4), (4, 2)])
def test_a_profile_of_fig_3_s_batches_is_fitted_within_its_tolerance(sp: int, tp: int) -> None:
    """Whoever measures these batches gets coefficients that predict them."""
    measured = {
        ((tokens, 0),) * batch: points[sp, tp][0] / 1e3
        for (batch, tokens), points in papers.FIG_3.items()
    }
    fitted = fit_step(
        [StepMeasurement(chunks=chunks, seconds=took_s) for chunks, took_s in measured.items()]
    )
    for chunks, took_s in measured.items():
        assert fitted.predict_batch_ns(chunks) / 1e9 == pytest.approx(took_s, rel=0.025)


def test_numbers_are_kept_row_by_row_and_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "results").mkdir()

    def job(name: str, effort: papers.Effort) -> dict[str, Any]:
        with ran.open("a") as file:
            file.write(f"{name} {effort.name}\n")
        if name == "bad":
            raise RuntimeError("no numbers")
        return {"tflops": 501.0}

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["papers.py", "--quick", "--jobs", "1", *words])
        papers.main()

    jobs = {name: papers.partial(job, name) for name in ("cp-mfu", "bad")}
    monkeypatch.setattr(papers, "JOBS", jobs)
    monkeypatch.setattr(papers, "HERE", tmp_path)
    monkeypatch.setattr(papers, "PAGE", tmp_path / "page.md")
    with pytest.raises(RuntimeError, match="no numbers"):
        run()
    kept = json.loads((tmp_path / "results" / "papers-quick.json").read_text())
    assert list(kept["jobs"]) == ["cp-mfu"]
    assert kept["jobs"]["cp-mfu"]["numbers"] == {"tflops": 501.0}
    run("--only", "cp")
    assert sorted(ran.read_text().split("\n")[:-1]) == ["bad quick", "cp-mfu quick"]
    run("--only", "cp", "--again")
    assert ran.read_text().count("cp-mfu") == 2
    text = (tmp_path / "page.md").read_text()
    assert "| 1M tokens in 77 s on 128 GPUs: TF/s of each | 502 | 501 | 1% | within |  |" in text
    assert "1 of 1 rows (100%) are within" in text
    assert "The aim of 80% is met." in text


def test_the_page_is_that_of_the_kept_numbers() -> None:
    """Whoever edits the page by hand loses it to the next run."""
    full, quick = (papers.HERE / "results" / name for name in ("papers.json", "papers-quick.json"))
    path = full if full.exists() else quick
    document = json.loads(path.read_text())
    kept = {name: job["numbers"] for name, job in document["jobs"].items()}
    effort = papers.FULL if path == full else papers.QUICK
    date = document["machine"]["date"][:10]
    assert papers.PAGE.read_text(encoding="utf-8") == papers.page(kept, effort, date)
