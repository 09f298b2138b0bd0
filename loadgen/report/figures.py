"""Plots of results, plot with matplotlib from their JSON alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from csps.loadgen.results.result import Result
from csps.protocols.core.errors import ConfigError

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors of Okabe and Ito, which color-blind people can tell apart."""
DASHES = ("-", "--", ":", "-.")
MAX_POINTS = 2000
"""Most points of one run's scatter plot. Longer runs show every n-th point."""
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
}

_METADATA = ("Creator", "Date", "Format", "Type")
"""Metadata that matplotlib writes into a picture, and that is left out."""

Draw = Callable[["Axes", Sequence[Result]], None]


def figure(
    draw: Draw, results: Sequence[Result], *, size: tuple[float, float] = (6.0, 3.4)
) -> Figure:
    """Return a matplotlib figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("reports need matplotlib: pip install 'csps[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        plot, axis = pyplot.subplots(figsize=size, layout="constrained")
        draw(axis, results)
        pyplot.close(plot)
        return plot


def svg(plot: Figure, name: str) -> str:
    """Return a figure as SVG for a page: no XML head, and ids that no other figure has."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        plot.savefig(buffer, format="svg", metadata=dict.fromkeys(_METADATA))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def style(number: int) -> dict[str, Any]:
    """Return color and line style of the n-th run."""
    dash = DASHES[number // len(COLORS) % len(DASHES)]
    return {"color": COLORS[number % len(COLORS)], "linestyle": dash}


def cdf_of(column: str, title: str) -> Draw:
    """Return a plot of the share of requests over a column in seconds, with the SLO as a line."""

    def draw(axis: Axes, results: Sequence[Result]) -> None:
        for number, result in enumerate(results):
            seconds = np.sort([value for value in result[column] if value is not None])
            if len(seconds):
                shares = np.arange(1, len(seconds) + 1) / len(seconds)
                axis.step(1000 * seconds, shares, where="post", label=name(result), **style(number))
        bounds = {result["slo"].get(column[:-1]) for result in results} - {None}
        for bound in bounds:
            axis.axvline(bound, color="#888888", linewidth=1, label=f"SLO {bound:g} ms")
        _finish(axis, xlabel=f"{title} (ms)", ylabel="share of requests", logx=True)

    return draw


def itl_cdf(axis: Axes, results: Sequence[Result]) -> None:
    """Plot the distribution of all gaps between tokens."""
    for number, result in enumerate(results):
        quantiles = result["itl_quantiles_ms"]
        if quantiles:
            shares = np.linspace(0, 1, len(quantiles))
            axis.plot(quantiles, shares, label=name(result), **style(number))
    _finish(axis, xlabel="inter-token latency (ms)", ylabel="share of gaps", logx=True)


def ttft_by_length(axis: Axes, results: Sequence[Result]) -> None:
    """Plot each request as a point, and the median of each range of lengths as a line."""
    for number, result in enumerate(results):
        points = [
            (length, 1000 * ttft)
            for length, ttft in zip(result["input_lens"], result["ttfts"], strict=True)
            if ttft is not None and length > 0
        ]
        if not points:
            continue
        lengths, ttfts = np.array(points).T
        every = -(-len(points) // MAX_POINTS)
        look = style(number)
        axis.scatter(lengths[::every], ttfts[::every], s=5, alpha=0.35, color=look["color"])
        axis.plot(*_medians(lengths, ttfts), marker="o", markersize=3, label=name(result), **look)
    _finish(axis, xlabel="prompt tokens", ylabel="TTFT (ms)", logx=True, logy=True)


def _medians(lengths: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Return lengths and medians over ranges that double."""
    octaves = np.floor(np.log2(lengths)).astype(int)
    chosen = sorted(set(octaves.tolist()))
    medians = [float(np.median(values[octaves == octave])) for octave in chosen]
    return [float(np.median(lengths[octaves == octave])) for octave in chosen], medians


def ttft_over_time(axis: Axes, results: Sequence[Result]) -> None:
    """Plot each request at its scheduled start."""
    for number, result in enumerate(results):
        rows = zip(result["start_times"], result["ttfts"], strict=True)
        points = [(start, 1000 * ttft) for start, ttft in rows if ttft is not None]
        if points:
            every = -(-len(points) // MAX_POINTS)
            starts, ttfts = np.array(points[::every]).T
            color = style(number)["color"]
            axis.scatter(starts, ttfts, s=6, alpha=0.6, color=color, label=name(result))
    _finish(axis, xlabel="scheduled start (s)", ylabel="TTFT (ms)", logy=True)


def series_of(column: str, ylabel: str, *, per_second: bool) -> Draw:
    """Return a plot of a column of the series over time."""

    def draw(axis: Axes, results: Sequence[Result]) -> None:
        for number, result in enumerate(results):
            step_s, values = result["series"]["step_s"], np.array(result["series"][column])
            heights = values / step_s if per_second else values
            edges = step_s * np.arange(len(values) + 1)
            axis.stairs(heights, edges, label=name(result), **style(number))
        _finish(axis, xlabel="time (s)", ylabel=ylabel)

    return draw


def kv_use(axis: Axes, results: Sequence[Result]) -> None:
    """Plot the share of KV slots in use over time, for each gang of simulated runs."""
    for number, result in enumerate(results):
        use = result.get("kv_use", {"times_s": []})
        for dashes, (gang, shares) in zip(
            ("-", "--"), ((key, use[key]) for key in use if key != "times_s"), strict=False
        ):
            label = f"{name(result)}, {gang}"
            color = style(number)["color"]
            axis.step(use["times_s"], shares, dashes, where="post", label=label, color=color)
    _finish(axis, xlabel="time (s)", ylabel="share of slots")


def over_rate(column: str, ylabel: str) -> Draw:
    """Return a plot of a field over the request rate, a line for each label."""

    def draw(axis: Axes, results: Sequence[Result]) -> None:
        for number, (label, runs) in enumerate(by_label(results).items()):
            points = [
                (result["request_rate"], result[column])
                for result in runs
                if result.get(column) is not None
            ]
            if points:
                axis.plot(*np.array(points).T, marker="o", label=label, **style(number))
        _finish(axis, xlabel="request rate (req/s)", ylabel=ylabel)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])

    return draw


def by_label(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the runs of each label with a finite rate, in order of rate."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if not isinstance(result["request_rate"], str):
            found.setdefault(result["label"], []).append(result)
    return {
        label: sorted(runs, key=lambda result: result["request_rate"])
        for label, runs in found.items()
    }


def name(result: Result) -> str:
    """Return a run's name in a legend: label, rate or users, and whether it was simulated."""
    rate, users = result["request_rate"], result["max_concurrency"]
    load = f"{rate:.3g}/s" if not isinstance(rate, str) else f"{users} users" if users else ""
    simulated = "simulated" if result["kind"] == "simulated" else ""
    extra = ", ".join(part for part in (load, simulated) if part)
    return f"{result['label']} ({extra})" if extra else str(result["label"])


def _finish(
    axis: Axes, *, xlabel: str, ylabel: str, logx: bool = False, logy: bool = False
) -> None:
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if logx and axis.has_data():
        axis.set_xscale("log")
        _plain_numbers(axis.xaxis)
    if logy and axis.has_data():
        axis.set_yscale("log")
        _plain_numbers(axis.yaxis)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: 200, not 2 x 10^2."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    narrow = high < 10 * low  # 1, 2 and 5 of a decade would be one number, or two
    axis.set_major_locator(
        MaxNLocator(6, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0, 2.0, 5.0))
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(NullFormatter())
