"""A picture of accuracy by length and depth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def plot(summaries: dict[str, Any], path: Path) -> None:
    """Heat map of accuracy, one panel for each kind: depth down, length to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1,
        len(summaries),
        figsize=(2 + 4 * len(summaries), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (kind, result) in zip(axes[0], summaries.items(), strict=True):
        image = _draw_panel(axis, result["accuracy_by_length_and_depth"])
        axis.set_title(kind)
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="accuracy")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axis: Axes, grid: dict[str, list[float | None]]) -> AxesImage:
    """Draws accuracy by length and depth; an empty cell had no question."""
    rows = list(zip(*grid.values(), strict=True))
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(grid)), [f"{int(length) / 1024:g}K" for length in grid])
    step = 100 / len(rows)
    labels = [f"{step * i:.0f}-{step * (i + 1):.0f} %" for i in range(len(rows))]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_xlabel("prompt tokens")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value is not None:
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    return image
