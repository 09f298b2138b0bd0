"""How training goes: means since the last line, the log and its curve."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
"""A line of the log: step, stage, and the means of a `Window`."""


class Window:
    """Losses and accuracies since the last line of the log."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._losses: list[float] = []
        self._accuracies: list[float] = []

    def add(self, loss: float, accuracy: float) -> None:
        """What a step of training found."""
        self._losses.append(loss)
        self._accuracies.append(accuracy)

    def means(self) -> dict[str, float]:
        """Loss, accuracy, and the seconds they took."""
        return {
            "loss": round(fmean(self._losses), 4),
            "accuracy": round(fmean(self._accuracies), 4),
            "seconds": round(time.monotonic() - self._start, 1),
        }


def write_log(rows: Sequence[Row], path: Path) -> None:
    """As CSV; nothing without rows."""
    if not rows:
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_log(rows: Sequence[Row], path: Path) -> None:
    """The curve: accuracy on training questions, stage by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        part = [row for row in rows if row["stage"] == stage]
        steps = [row["step"] for row in part]
        axis.plot(steps, [row["accuracy"] for row in part], marker=".", label=stage)
    axis.set_xlabel("step")
    axis.set_ylabel("share of answer words predicted right")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
