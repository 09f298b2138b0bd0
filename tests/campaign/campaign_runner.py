"""Runs trials one after the other, and writes a row for each as soon as it has ended.

A second start goes on where the first one ended: trials whose row was made with the same definition
and the same product are skipped. The newest row of a trial counts. What has no good row comes
first, one trial of each kind before the others, and long trials last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from campaign_bench import Bench, load_average
from campaign_trial import ROOT, Outcome, Trial, all_trials, product_digest
from deployed_server import slowdown

ROWS = ROOT / "benchmarks" / "results" / "reliability.jsonl"
FOLDER = ROOT / "run" / "campaign"
BUDGET_S = 4 * 3600.0
QUICK_S = 600.0
"""Budget below which only quick trials are run, and no row is kept."""
SERVER_S = 40.0
"""Expected time to start a server."""
LONG_S = 100.0
"""Expected time of a trial that others of its rank go before."""

Row = dict[str, Any]


class TrialTooLong(Exception):
    """A trial did not end within its limit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that the arguments choose; return 1 if one of them failed."""
    options = _parser().parse_args(arguments)
    quick = options.budget < QUICK_S
    only = options.only or [""]
    trials = [trial for trial in all_trials() if any(part in trial.name for part in only)]
    if quick and not options.only:
        trials = [trial for trial in trials if trial.quick]
    rows_file = options.rows or (None if quick else ROWS)
    rows = {} if options.again or rows_file is None else read_rows(rows_file)
    due = broad([trial for trial in trials if not _is_known(trial, rows, options)], rows)
    print(
        f"{len(trials)} trials, {len(trials) - len(due)} of them done before; "
        f"the others take about {expected_s(due) / 60:.0f} min",
        flush=True,
    )
    if options.list:
        for trial in due:
            print(f"{trial.about_s:5.0f} s  {trial.name}")
        return 0
    return _run_all(due, options.folder, rows_file, options.budget)


def read_rows(file: Path) -> dict[str, Row]:
    """Return the newest row of each trial, by its name."""
    if not file.exists():
        return {}
    rows = (json.loads(line) for line in file.read_text().splitlines() if line)
    return {row["trial"]: row for row in rows}


def broad(trials: Sequence[Trial], rows: dict[str, Row]) -> list[Trial]:
    """Order trials: first one of each kind that has no good row, then others without one, then
    those whose row is old. Those of one server stay together."""
    good = {name: row for name, row in rows.items() if not row["missed"]}
    kinds = {(row["fault"], row["target"], row["server"]) for row in good.values()}
    ranks = {}
    for trial in trials:
        kind = trial.fault, trial.target, trial.server or ""
        ranks[trial.name] = 2 if trial.name in good else 1 if kind in kinds else 0
        kinds.add(kind)
    return sorted(trials, key=lambda trial: (ranks[trial.name], trial.about_s >= LONG_S))


def expected_s(trials: Sequence[Trial]) -> float:
    """Return how long trials take in this order, with the servers that they need."""
    servers = [trial.server for trial in trials]
    starts = sum(after not in (None, before) for before, after in pairwise([None, *servers]))
    return sum(trial.about_s for trial in trials) + SERVER_S * starts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="campaign", description="Break a server on purpose.")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"begin no trial that would end later (default: four hours; below {QUICK_S:.0f} only "
        "quick trials, whose rows are not kept)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run trials with this in their name; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="print the trials that are due")
    parser.add_argument("--again", action="store_true", help="run trials that are done, too")
    parser.add_argument("--failed", action="store_true", help="run trials again that have failed")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="count rows of other versions of the product, or of the trial, as done",
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help=f"default: {ROWS.name}")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="for the server's files (default: run/campaign)"
    )
    return parser


def _is_known(trial: Trial, rows: dict[str, Row], options: argparse.Namespace) -> bool:
    row = rows.get(trial.name)
    if row is None or (options.failed and row["missed"]):
        return False
    made = row["definition"], row["product"]
    return bool(options.keep or made == (trial.definition, product_digest()))


def _run_all(trials: Sequence[Trial], folder: Path, rows_file: Path | None, budget_s: float) -> int:
    began, failed, left = time.monotonic(), [], 0
    # A campaign that is asked to end has a server to end before.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with _one_campaign(folder):
        bench = Bench(folder)
        try:
            for trial in trials:
                needed_s = trial.about_s + (0 if bench.running else SERVER_S)
                if time.monotonic() - began + needed_s > budget_s:
                    left += 1
                    continue
                row = run_trial(bench, trial)
                failed += [trial.name] if row["missed"] else []
                _print(row)
                if rows_file is not None:
                    with rows_file.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        finally:
            bench.close()
    print(f"{len(trials) - left} trials run, {left} left by the budget, {len(failed)} failed")
    for name in failed:
        print(f"failed: {name}")
    return bool(failed)


def run_trial(bench: Bench, trial: Trial) -> Row:
    """Run a trial and return its row. Whatever goes wrong is in `missed`."""
    before, began, at = load_average(), time.monotonic(), datetime.now(UTC)
    outcome, reason = Outcome(), ""
    try:
        with _limited(trial.limit_s):
            outcome = trial.run(bench, trial)
            if trial.server is not None and bench.running is not None:
                outcome.lost_slots += bench.lost_slots(bench.running)
    except (Exception, TrialTooLong) as error:  # the row says so, and the next trial is run
        reason = "".join(traceback.format_exception_only(error)).strip()
        traceback.print_exc()
    took_s = time.monotonic() - began
    missed = [*outcome.missed, *_missed(trial, outcome), *([reason] if reason else [])]
    if missed:
        bench.close()  # what the trial has left behind is no other trial's fault
    return {
        "trial": trial.name,
        "fault": trial.fault,
        "target": trial.target,
        "state": trial.state,
        "seed": trial.seed,
        "server": trial.server or "",
        **{name: value for name, value in asdict(outcome).items() if name != "missed"},
        "recovery_limit_s": trial.recovery_limit_s,
        "missed": missed,
        "took_s": round(took_s, 1),
        "at": at.isoformat(timespec="seconds"),
        "load": [before, load_average()],
        "cores": os.cpu_count(),
        "commit": _commit(),
        "product": product_digest(),
        "definition": trial.definition,
    }


def _missed(trial: Trial, outcome: Outcome) -> Iterator[str]:
    if outcome.wrong:
        yield f"{outcome.wrong} wrong answers"
    if outcome.undocumented:
        yield f"{len(outcome.undocumented)} undocumented failures: {outcome.undocumented[0]}"
    if outcome.lost_slots:
        yield f"{outcome.lost_slots} slots lost"
    if outcome.green_lies:
        yield f"{outcome.green_lies} requests failed after /health was green"
    recovery_s, limit_s = outcome.recovery_s, trial.recovery_limit_s
    if recovery_s is not None and limit_s is not None and recovery_s > limit_s:
        # Another load on the machine is no fault of the server.
        factor = slowdown()
        outcome.measured["slowdown"] = round(factor, 2)
        if recovery_s > limit_s * factor:
            yield f"recovered after {recovery_s:.1f} s, not {limit_s:.0f}"


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `TrialTooLong` in this thread, wherever it waits, when the time is over."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TrialTooLong(f"not over after {seconds:.0f} s")

    former = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@contextmanager
def _one_campaign(folder: Path) -> Iterator[None]:
    """Let no second campaign run in this folder: each would end the server of the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another campaign runs in {folder}") from None
        yield


def _commit() -> str:
    """Return the commit, with a mark if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


def _print(row: Row) -> None:
    recovery = "" if row["recovery_s"] is None else f", recovery {row['recovery_s']:.1f} s"
    verdict = "FAILED" if row["missed"] else "ok"
    print(
        f"{verdict:6} {row['trial']}: {row['tries']} tries, {row['wrong']} wrong, "
        f"{row['lost_slots']} slots lost{recovery}, {row['took_s']:.0f} s, load {row['load'][0]}",
        flush=True,
    )
    for reason in row["missed"]:
        print(f"       {reason}", file=sys.stderr, flush=True)
