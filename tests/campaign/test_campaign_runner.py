"""The campaign's runner, with trials that break nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import campaign_runner
import pytest
from campaign_runner import SERVER_S, broad, expected_s, main, read_rows, run_trial
from campaign_trial import Outcome, Trial, all_trials


class NoBench:
    """Stands in for servers, which these trials do not need."""

    running = None
    closed = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        type(self).closed += 1


def goes_well(bench: object, trial: Trial) -> Outcome:
    return Outcome(tries=10, recovery_s=1.5)


def goes_wrong(bench: object, trial: Trial) -> Outcome:
    return Outcome(wrong=2, lost_slots=3, undocumented=["500"], green_lies=1, missed=["more"])


def hangs(bench: object, trial: Trial) -> Outcome:
    time.sleep(60)
    raise AssertionError("it was not ended")


def raises(bench: object, trial: Trial) -> Outcome:
    raise ValueError("no such thing")


def late(bench: object, trial: Trial) -> Outcome:
    return Outcome(recovery_s=1e6)


WELL = Trial(fault="nothing", target="no one", run=goes_well, about_s=1, quick=True)
WRONG = Trial(fault="everything", run=goes_wrong, about_s=1)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(campaign_runner, "Bench", NoBench)
    monkeypatch.setattr(campaign_runner, "all_trials", lambda: [WELL, WRONG])
    return tmp_path / "rows.jsonl"


def start(rows: Path, *options: str) -> int:
    return main(["--rows", str(rows), "--folder", str(rows.parent), *options])


def test_a_second_start_goes_on_where_the_first_one_ended(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(rows, "--only", "no-one") == 0
    assert start(rows) == 1  # one of the two failed
    assert "2 trials, 1 of them done before; the others take about 0 min" in capsys.readouterr().out
    assert start(rows) == 0
    assert "2 trials, 2 of them done before" in capsys.readouterr().out
    assert start(rows, "--failed") == 1
    assert [json.loads(line)["trial"] for line in rows.read_text().splitlines()] == [
        "nothing/no-one/0",
        "everything/0",
        "everything/0",
    ]


def test_rows_of_another_product_or_definition_are_made_again(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(rows)
    with monkeypatch.context() as patch:
        patch.setattr(campaign_runner, "product_digest", lambda: "another")
        start(rows, "--list")
        assert "2 trials, 0 of them done before" in capsys.readouterr().out
        start(rows, "--list", "--keep")
        assert "2 trials, 2 of them done before" in capsys.readouterr().out
    monkeypatch.setattr(Trial, "definition", "another")
    start(rows, "--list")
    assert "2 trials, 0 of them done before" in capsys.readouterr().out
    start(rows, "--list", "--keep")
    assert "2 trials, 2 of them done before" in capsys.readouterr().out


def test_the_short_form_runs_quick_trials_and_keeps_no_rows(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = campaign_runner.ROWS.read_bytes()
    assert main(["--budget", "120", "--folder", str(rows.parent)]) == 0
    assert "1 trials run" in capsys.readouterr().out
    assert campaign_runner.ROWS.read_bytes() == before


def test_the_budget_leaves_what_would_end_too_late(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(rows, "--budget", "700") == 1
    assert start(rows, "--budget", "1", "--again") == 0
    assert "0 trials run, 1 left by the budget" in capsys.readouterr().out
    assert len(read_rows(rows)) == 2


def test_one_trial_of_each_kind_without_a_good_row_comes_first() -> None:
    def trial(target: str, seed: int = 0, about_s: float = 20.0) -> Trial:
        return Trial(fault="hit", target=target, seed=seed, server="pair", run=goes_well,
                     about_s=about_s)  # fmt: skip

    old, deeper = trial("a"), trial("a", seed=1)
    new, new_too, long, other = trial("b"), trial("b", seed=1), trial("c", about_s=900), trial("d")
    failed = trial("e")
    rows = {
        one.name: {"fault": "hit", "target": one.target, "server": "pair", "missed": missed}
        for one, missed in ((old, []), (failed, ["its aim"]))
    }
    ordered = broad([old, deeper, new, new_too, long, other, failed], rows)
    assert ordered == [new, other, failed, long, deeper, new_too, old]
    assert expected_s(ordered) == 6 * 20 + 900 + SERVER_S


def test_a_row_names_everything_that_was_missed(tmp_path: Path) -> None:
    row = run_trial(NoBench(tmp_path), WRONG)
    assert row["missed"] == [
        "more",
        "2 wrong answers",
        "1 undocumented failures: 500",
        "3 slots lost",
        "1 requests failed after /health was green",
    ]
    good = run_trial(NoBench(tmp_path), WELL)
    assert (good["missed"], good["tries"], good["recovery_s"]) == ([], 10, 1.5)
    assert good["commit"]
    assert good["load"]


@pytest.mark.parametrize(
    ("run", "limit_s", "reason"),
    [
        (hangs, 0.2, "TrialTooLong: not over after 0 s"),
        (raises, 10.0, "ValueError: no such thing"),
        (late, 10.0, "recovered after 1000000.0 s, not 8"),
    ],
)
def test_a_trial_that_fails_has_a_row_and_a_new_server_comes_after_it(
    tmp_path: Path, run: object, limit_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_runner, "slowdown", lambda: 2.0)
    closed = NoBench.closed
    trial = Trial(fault="fails", run=run, limit_s=limit_s, recovery_limit_s=8.0)
    assert reason in run_trial(NoBench(tmp_path), trial)["missed"][0]
    assert NoBench.closed == closed + 1


def test_a_second_campaign_in_a_folder_is_refused(rows: Path) -> None:
    with campaign_runner._one_campaign(rows.parent), pytest.raises(SystemExit, match="another"):
        start(rows)


def test_every_process_is_hit_in_every_way() -> None:
    """Each kind of process is killed and frozen, and ranks and router in each state."""
    trials = all_trials()
    hit = {(trial.fault, trial.target) for trial in trials}
    processes = ["Registry", "Configurator", "HAProxy", "parser", "Serve controller", "Serve proxy"]
    ranks = ["PrefillGang 0", "PrefillGang 1", "DecodeGang 0", "DecodeGang 1", "Router"]
    for fault in ("kill", "freeze"):
        assert hit >= {(fault, process) for process in (*processes, *ranks)}
        for state in ("idle", "queued", "prefill", "transfer", "decode"):
            of_state = {(one.fault, one.target) for one in trials if one.state == state}
            assert of_state >= {(fault, rank) for rank in ranks}
        assert {one.state for one in trials if one.fault == fault} >= {"piggybacked", "migrate"}
    assert sum(trial.about_s for trial in trials if trial.quick) <= 120 - SERVER_S
