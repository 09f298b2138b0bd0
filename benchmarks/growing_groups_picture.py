"""A picture of the timeline of a prompt whose group grows."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from csps.actors.timing.timeline import PHASE, RANK, TRANSFERS
from csps.services.telemetry.traces.spans import RecordedSpan, Trace

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

LANES = ("compute", "ring", "balancing", "kv transfer")
"""Lanes of each rank, from above. Other exchanges are drawn in the ring's lane."""
CHUNKS = ("#4c72b0", "#55a868", "#dd8452")
COLORS = {"wait": "#dddddd", "ring": "#8c8c8c", "balancing": "#c44e52", "kv transfer": "#8172b3"}


def draw(trace: Trace, ttft_s: float, path: Path) -> None:
    """Draw each rank with its lanes, in milliseconds from the first phase.

    Args:
        ttft_s: time from sending the first chunk, marked by a line.
    """
    phases = [span for span in trace.spans if span.is_phase]
    begin_ns = min(span.start_ns for span in phases)
    jobs = sorted(
        {span.attributes["csps.job"] for span in trace.spans if "csps.job" in span.attributes}
    )
    chunk_of = {
        span.span_id: jobs.index(span.attributes["csps.job"])
        for span in trace.spans
        if "csps.job" in span.attributes
    }
    ranks = sorted({int(span.attributes[RANK]) for span in phases})
    figure, axes = plt.subplots(figsize=(11, 0.9 * len(ranks) + 1.4), layout="constrained")
    for span in phases:
        row = ranks.index(int(span.attributes[RANK])) * (len(LANES) + 1) + _lane(span)
        chunk = chunk_of.get(span.parent_id or "", 0)
        left, width = (span.start_ns - begin_ns) / 1e6, span.duration_ns / 1e6
        color = COLORS.get(_colored(span), CHUNKS[chunk % len(CHUNKS)])
        axes.barh(row, width, left=left, color=color, height=0.9, linewidth=0)
    axes.axvline(ttft_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    _label(axes, ranks, len(jobs))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _lane(span: RecordedSpan) -> int:
    phase = span.attributes[PHASE]
    if phase not in TRANSFERS:
        return LANES.index("compute")
    return LANES.index(phase if phase in LANES else "ring")


def _colored(span: RecordedSpan) -> str:
    phase = str(span.attributes[PHASE])
    return "ring" if phase in TRANSFERS and phase not in LANES else phase


def _label(axes: Axes, ranks: list[int], chunks: int) -> None:
    rows = {
        place * (len(LANES) + 1) + lane: f"rank {rank}: {name}" if not lane else name
        for place, rank in enumerate(ranks)
        for lane, name in enumerate(LANES)
    }
    axes.set_yticks(list(rows), list(rows.values()), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; the dotted line is the first token")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [
        Patch(color=CHUNKS[chunk % len(CHUNKS)], label=f"chunk {chunk + 1}")
        for chunk in range(chunks)
    ]
    patches += [Patch(color=color, label=name) for name, color in COLORS.items()]
    axes.legend(
        handles=patches, fontsize=7, ncols=len(patches), loc="lower center",
        bbox_to_anchor=(0.5, 1.0), frameon=False,
    )  # fmt: skip
