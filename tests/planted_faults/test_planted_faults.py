"""The list of planted faults fits the tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted_and_names_a_test(fault: Fault) -> None:
    sound = (ROOT / fault.file).read_text()
    assert sound.count(fault.old) == 1, "restate the fault: its text is not in its file once"
    ast.parse(sound.replace(fault.old, fault.new))
    file, _, name = fault.test.partition("::")
    assert not name or f"def {name}(" in (ROOT / file).read_text()


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
