"""The comparison with peers: ratios point one way, and a library answers in its own process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tiny_checkpoints import make_checkpoint

peers = pytest.importorskip("peers")


def test_ratios_are_above_one_where_ours_is_better() -> None:
    samples = {"ours": [1.0, 2.0, 9.0], "loop": [3.0]}
    time = peers._row("gap_ms", 7, samples, ["loop", "serve"])
    assert (time["ours"], time["loop"], time["loop_ratio"]) == (2.0, 3.0, 1.5)
    assert time["serve"] is time["serve_ratio"] is None
    rate = peers._row("tokens_per_s", 7, samples, ["loop", "serve"])
    assert rate["loop_ratio"] == 2.0 / 3.0
    assert time.keys() == rate.keys()


def test_all_take_turns_in_changing_order_after_a_warm_up() -> None:
    asked: list[str] = []

    def contender(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    found = peers._in_turns(
        {name: lambda _, name=name: contender(name) for name in ("ours", "loop")}, 3, rounds=2
    )
    assert asked == ["loop", "ours", "ours", "loop", "loop", "ours"]
    assert found == {"ours": [3.0, 6.0], "loop": [4.0, 5.0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "loop1", "generate1"])
def test_a_library_answers_with_the_time_of_each_token(tmp_path: Path, name: str) -> None:
    args = argparse.Namespace(environment={}, dtype="float32")
    model = make_checkpoint(tmp_path)
    with peers._library(name, model, args) as answer:
        for _ in range(2):
            stamps = answer(range(20), 5)
            assert len(stamps) == 5
            assert stamps[0] > 0
            assert sorted(stamps) == stamps
