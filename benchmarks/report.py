"""Output of every benchmark: a table for people, then one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

Section = tuple[list[dict[str, Any]], dict[str, Any]]
"""Rows of a part of a benchmark, and further fields of its result."""


def with_json_option(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--json FILE`."""
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    return parser


def publish(
    result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: Path | None
) -> None:
    """Print the rows as a table and the result as the last line; write it to `path` if given."""
    print_table(rows)
    whole = _whole(result, rows)
    if path is not None:
        path.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(whole))


def write(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the result so far."""
    path.write_text(json.dumps(_whole(result, rows), indent=2) + "\n")


def _whole(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**result, "rows": list(rows), "machine": machine()}


def machine() -> dict[str, Any]:
    """Return facts about the machine that a reader needs to judge a figure."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "load_before": _LOAD_BEFORE,
        "load_after": _load(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "platform": platform.machine(),
    }


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _load() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


_LOAD_BEFORE = _load()
"""Load averages of the minutes before the benchmark began."""


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal columns."""
    if not rows:
        return
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(n), *(len(row[i]) for row in cells)) for i, n in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
