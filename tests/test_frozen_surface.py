"""What users and stored files depend on is as it was recorded, wherever modules move.

Configuration keys, options of policies, metrics, spans, errors, the HTTP API, commands, columns of
the database, files, digests and import paths are recorded in `frozen_surface/*.json`.
`frozen_surface/surface.py` computes them from the product as it is, in a process of its own, where
nothing that other tests have imported or installed shows. A difference fails the test, which names
every entry that was added, removed or changed.

A change that is meant is recorded by `python tests/frozen_surface/record.py`, which rewrites the
files. Whoever commits them says why, and `CHANGELOG.md` tells users. A digest that differs means
that what users have on disk would have to be measured or trained again: it must not differ because
of a move or a new name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FROZEN = Path(__file__).resolve().parent / "frozen_surface"
SECTIONS = sorted(path.stem for path in FROZEN.glob("*.json"))


@pytest.fixture(scope="module")
def present() -> dict[str, Any]:
    """All sections as the product has them now."""
    ran = subprocess.run(
        [sys.executable, str(FROZEN / "record.py"), "--print"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"the surface cannot be computed:\n{ran.stderr[-4000:]}"
    sections: dict[str, Any] = json.loads(ran.stdout)
    return sections


def test_every_section_is_recorded(present: dict[str, Any]) -> None:
    assert sorted(present) == SECTIONS


@pytest.mark.parametrize("name", SECTIONS)
def test_nothing_has_changed(name: str, present: dict[str, Any]) -> None:
    if "cannot be computed" in present[name]:
        pytest.fail(
            f"{name} cannot be computed:\n{present[name]['cannot be computed']}", pytrace=False
        )
    recorded = json.loads((FROZEN / f"{name}.json").read_text(encoding="utf-8"))
    found = differences(recorded, present[name])
    if found:
        pytest.fail("\n".join([f"{name} differs from {name}.json:", *found]), pytrace=False)


def test_differences_are_named() -> None:
    recorded = {"kept": {"a": 1, "b": [1]}, "gone": 0, "lists": ["a", "b"]}
    now = {"kept": {"a": 2, "b": [1]}, "new": None, "lists": ["b", "c"]}
    assert differences(recorded, now) == [
        "  removed  gone: 0",
        "  changed  kept / a: 1 -> 2",
        '  removed  lists: "a"',
        '  added    lists: "c"',
        "  added    new: null",
    ]


def differences(recorded: Any, now: Any, path: str = "") -> list[str]:
    """A line for each entry that differs, behind the path that leads to it."""
    return list(_differences(recorded, now, path))


def _differences(recorded: Any, now: Any, path: str) -> Iterator[str]:
    if recorded == now:
        return
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in sorted({*recorded, *now}):
            at = f"{path} / {name}" if path else name
            if name not in now:
                yield f"  removed  {at}: {_shown(recorded[name])}"
            elif name not in recorded:
                yield f"  added    {at}: {_shown(now[name])}"
            else:
                yield from _differences(recorded[name], now[name], at)
        return
    if isinstance(recorded, list) and isinstance(now, list):
        removed = [item for item in recorded if item not in now]
        added = [item for item in now if item not in recorded]
        if removed or added:
            yield from (f"  removed  {path}: {_shown(item)}" for item in removed)
            yield from (f"  added    {path}: {_shown(item)}" for item in added)
            return
    yield f"  changed  {path}: {_shown(recorded)} -> {_shown(now)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}…"
