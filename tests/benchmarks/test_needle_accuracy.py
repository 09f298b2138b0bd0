"""`benchmarks/needle_accuracy.py`: what it counts, and that it goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import needle_accuracy
import pytest

from csps.models.needle_prompts.haystack import KINDS


def run(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> dict[str, Any]:
    argv = ["needle_accuracy.py", "--json", str(file), "--fillers", "sentences", *options]
    monkeypatch.setattr(sys, "argv", argv)
    needle_accuracy.main()
    measured: dict[str, Any] = json.loads(file.read_text())
    return measured


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle_accuracy, "SHARED", {300: (2, 4)})
    monkeypatch.setattr(needle_accuracy, "OWN", {300: 3})


def test_every_kind_is_asked_as_often_and_the_replies_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = run(monkeypatch, tmp_path / "a.json")["sentences/last/300"]
    assert set(cell) == set(KINDS)
    for figures in cell.values():
        assert figures["questions"] == len(figures["replies"]) == 8
        assert figures["right"] + len(figures["wrong"]) in (8, figures["right"] + 5)
        low, high = figures["interval"]
        assert low <= figures["right"] / 8 <= high
        assert figures["of_another_fact"] <= 8 - figures["right"]
    assert cell["multi_key"]["right"] >= 7


def test_finished_measurements_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    run(monkeypatch, file)
    monkeypatch.setattr(needle_accuracy, "measure", lambda *_: {})
    measured = run(monkeypatch, file, "--place", "last")
    assert measured["sentences/last/300"]
    assert run(monkeypatch, file, "--place", "first")["sentences/first/300"] == {}


@pytest.mark.parametrize(
    ("right", "given", "another"),
    [
        ("falcon", " heron", True),
        ("falcon", " Question", False),
        ("Oslo is falcon, Rome is fig", " Oslo is falcon, Rome is heron", True),
        ("Oslo is falcon, Rome is fig", " Oslo is falcon, Rome is book, heron", False),
        ("falcon", " falcon, heron", False),
    ],
)
def test_a_wrong_reply_is_another_fact_s_by_its_first_wrong_word(
    right: str, given: str, another: bool
) -> None:
    values = frozenset({"falcon", "heron", "fig"})
    reply = needle_accuracy.Reply(right=right, given=given, values=values)
    assert reply.is_of_another_fact == another
