"""Draw one request's trace, as it lies in `run/traces/`, as a waterfall.

    python docs/trace_waterfall.py run/traces docs/images/trace.png [--trace-id ID]

Without an id it takes the longest request. Needs matplotlib (`pip install -e '.[plot]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "csps-router": "#4c72b0",
    "csps-configurator": "#8172b3",
    "csps-prefill": "#dd8452",
    "csps-decode": "#55a868",
}
ROOT = "llm_request"


def read_spans(folder: Path) -> list[dict[str, Any]]:
    """All spans of all processes."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def one_trace(spans: list[dict[str, Any]], trace_id: str | None) -> list[dict[str, Any]]:
    """The spans of a request in order of their start; of the longest one if none is named."""
    if trace_id is None:
        roots = [span for span in spans if span["name"] == ROOT]
        trace_id = max(roots, key=duration_ns)["trace_id"]
    return sorted((it for it in spans if it["trace_id"] == trace_id), key=lambda it: it["start_ns"])


def duration_ns(span: dict[str, Any]) -> int:
    """Length of a span."""
    return int(span["end_ns"] - span["start_ns"])


def label(span: dict[str, Any]) -> str:
    """Who did what."""
    attributes = span["attributes"]
    who = attributes.get("service.name", "").removeprefix("csps-")
    rank = attributes.get("csps.rank")
    return f"{who}{'' if rank is None else f' {rank}'}: {span['name']}"


def draw(spans: list[dict[str, Any]], path: Path) -> None:
    """One bar a span, time in milliseconds from the request's first byte."""
    start = spans[0]["start_ns"]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(spans) + 0.9), layout="constrained")
    for row, span in enumerate(spans):
        left, width = (span["start_ns"] - start) / 1e6, duration_ns(span) / 1e6
        color = COLORS.get(span["attributes"].get("service.name", ""), "#999999")
        axes.barh(row, max(width, 1e-3), left=left, color=color, height=0.7)
        axes.annotate(f" {width:.1f} ms", (left + width, row), va="center", fontsize=8)
    axes.set_yticks(range(len(spans)), [label(span) for span in spans], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds since the request's first byte")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--trace-id")
    arguments = parser.parse_args()
    draw(one_trace(read_spans(arguments.folder), arguments.trace_id), arguments.image)


if __name__ == "__main__":
    main()
