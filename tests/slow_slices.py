"""Slices of the slow suite, so that CI runs about ten minutes of it with each commit.

`python tests/slow_slices.py report.xml` records durations from a JUnit report of the slow suite
(`make test-slow ARGS=--junitxml=report.xml`) in `slow_durations.json`. Slices hold the functions of
this file. One without a duration was never seen to pass beside others within a slice's time:
`make test-slow` alone runs it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

RECORDED = Path(__file__).parent / "slow_durations.json"
SLICE_S = 900
"""Test seconds of a slice: two workers need about ten minutes for them."""


def function_of(nodeid: str) -> str:
    """Return a test's file and function, without parameters."""
    return nodeid.split("[")[0]


def slices_of(functions: Iterable[str], durations: Mapping[str, float]) -> dict[str, int]:
    """Return the slice of each function with a duration: all take about `SLICE_S` seconds.

    The longest function goes first into the shortest slice. A function that takes longer than a
    slice has one for itself.
    """
    seconds = {name: durations[name] for name in set(functions) if name in durations}
    lengths = [0.0] * max(1, round(sum(seconds.values()) / SLICE_S))
    found = {}
    for function in sorted(seconds, key=lambda name: (-seconds[name], name)):
        shortest = lengths.index(min(lengths))
        lengths[shortest] += seconds[function]
        found[function] = shortest
    return found


def in_slice(nodeids: Iterable[str], commits: int) -> set[str]:
    """Return the test functions that run with the commit of this number."""
    found = slices_of(map(function_of, nodeids), json.loads(RECORDED.read_text()))
    chosen = commits % (1 + max(found.values(), default=0))
    return {function for function, number in found.items() if number == chosen}


def record(reports: Iterable[Path]) -> None:
    """Add the durations of tests that passed in JUnit reports to those recorded."""
    durations: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    measured: dict[str, float] = defaultdict(float)
    failed = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            function = f"{file}::{function_of(case.get('name', ''))}"
            measured[function] += float(case.get("time", 0))
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(function)
    passed = measured.keys() - failed
    durations |= {function: round(measured[function], 1) for function in passed}
    RECORDED.write_text(json.dumps(durations, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(map(Path, sys.argv[1:]))
