"""docs/reliability.md says what the campaign's rows say, and the rows name trials that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reliability import PAGE, page, read_rows


def row(name: str, **more: Any) -> dict[str, Any]:
    return {
        "trial": name,
        "fault": "kill",
        "target": "Router",
        "state": "decode",
        "tries": 70,
        "wrong": 0,
        "documented": 3,
        "lost_slots": 0,
        "green_lies": 0,
        "recovery_s": 4.25,
        "recovery_limit_s": 8.0,
        "missed": [],
        "at": "2026-11-23T18:00:00+00:00",
        "load": [0.5, 1.5],
        "commit": "abc",
        **more,
    }


def test_the_page_says_what_the_rows_say() -> None:
    """Run benchmarks/reliability.py after the campaign."""
    assert PAGE.read_text() == page(read_rows())


def test_a_line_stands_for_all_trials_of_a_fault() -> None:
    rows = [row("a"), row("b", state="idle", recovery_s=9.5, missed=["recovered late"], wrong=2)]
    text = page(rows)
    assert (
        "| kill | Router | decode, idle | 2 | 140 | 2 | 6 | 0 | 9.5 s | 8 s | 1.5 | "
        '`"--again --only kill/Router/"` |'
    ) in text
    assert "2 trials, 1 without anything missed**: 2 wrong answers" in text
    assert "- `b` (load 1.5): recovered late" in text


def test_the_newest_row_of_a_trial_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [row("a", tries=1), row("b"), row("a", tries=2)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert [(one["trial"], one["tries"]) for one in read_rows(file)] == [("b", 70), ("a", 2)]
    assert read_rows(tmp_path / "none.jsonl") == []
