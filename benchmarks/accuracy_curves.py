"""Accuracy that sparse attention loses over the drop ratio: a picture and a table.

Points are measurements of `csps profile accuracy`; lines are predictions of a regressor of `csps
train`:

    python benchmarks/accuracy_curves.py --sib FILE --regressor FOLDER --plot FILE --table FILE
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from csps.configurator.model.scaling_information_base import AccuracyRow, ScalingInformationBase
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.samples import AccuracySample, Setting, accuracy_samples
from csps.models.network.spec import read_spec
from csps.services.settings.settings import shipped_models

STEPS = 50
"""Points of a predicted line."""
Curve = tuple[object, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; `argv` replaces the process's own arguments."""
    arguments = parse(argv)
    base = ScalingInformationBase.read(arguments.sib, None)
    assert base is not None, f"there is no {arguments.sib}"
    with base:
        rows = base.rows(AccuracyRow)
    # A curve is of one ratio of all layers.
    alike = [row for row in rows if not row.drop_ratios]
    samples = accuracy_samples(alike, layers=read_spec(arguments.model).layers)
    regressor = AccuracyModel.load(arguments.regressor, None)
    if arguments.plot:
        draw(samples, regressor, arguments.plot)
    text = "\n".join(table(samples, regressor)) + "\n"
    if arguments.table:
        arguments.table.write_text(text)
    else:
        print(text, end="")


def draw(samples: Sequence[AccuracySample], regressor: AccuracyModel, path: Path) -> None:
    """Draw a panel for each group: measured points with intervals, and predicted lines."""
    panels: dict[Curve, dict[Curve, list[AccuracySample]]] = defaultdict(lambda: defaultdict(list))
    for sample in sorted(samples, key=_order):
        panels[_group(sample.setting)][_curve(sample.setting)].append(sample)
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(12, 3.2 * lines), sharex=True, sharey=True, squeeze=False
    )
    for axis, (group, curves) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title("{} tokens, {} servers of {}, {} levels".format(*group), fontsize=9)
        for number, (curve, points) in enumerate(curves.items()):
            _draw_curve(axis, f"C{number}", curve, points, regressor)
        axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("drop ratio of level 2")
    for axis in axes[:, 0]:
        axis.set_ylabel("lost of right answers")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_curve(
    axis: Axes, colour: str, curve: Curve, points: list[AccuracySample], regressor: AccuracyModel
) -> None:
    ratios = [_ratio(point.setting) for point in points]
    spread = [
        [point.loss - point.interval[0] for point in points],
        [point.interval[1] - point.loss for point in points],
    ]
    label = "{}, {} layer, window {}".format(*curve)
    losses = [point.loss for point in points]
    axis.errorbar(ratios, losses, yerr=spread, fmt="o", ms=4, color=colour, label=label)
    steps = [step / STEPS * 0.98 for step in range(STEPS + 1)]
    settings = [_at(points[0].setting, ratio) for ratio in steps]
    axis.plot(steps, regressor.loss(settings), color=colour, lw=1)


def table(samples: Sequence[AccuracySample], regressor: AccuracyModel) -> Iterator[str]:
    """Return a Markdown table."""
    yield (
        "| tokens | group | N_v | strategy | scored by | window | drop ratio | lost, measured | "
        "95 % | of | lost, predicted |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for sample in sorted(samples, key=_order):
        setting, (low, high) = sample.setting, sample.interval
        (predicted,) = regressor.loss([setting])
        tokens, servers, of_server, levels = _group(setting)
        strategy, layer, window = _curve(setting)
        yield (
            f"| {tokens} | {servers} of {of_server} | {levels} | {strategy} | {layer} layer | "
            f"{window} | {_ratio(setting):.2f} | {sample.loss:.1%} | {low:.1%} to {high:.1%} | "
            f"{sample.questions} | {predicted:.1%} |"
        )


def _group(setting: Setting) -> Curve:
    servers = len({place.rsplit("-", 1)[0] for place in setting.locations})
    return setting.tokens, servers, len(setting.locations) // servers, setting.levels


def _curve(setting: Setting) -> Curve:
    csa = setting.csa
    return f"SP-{(csa.strategy or 'ntp').upper()}", csa.importance_layer, csa.importance_window


def _ratio(setting: Setting) -> float:
    return setting.csa.drop_ratios[0][0]


def _at(setting: Setting, ratio: float) -> Setting:
    return replace(setting, csa=replace(setting.csa, drop_ratios=((ratio,),)))


def _order(sample: AccuracySample) -> tuple[object, ...]:
    return (*_group(sample.setting), *_curve(sample.setting), _ratio(sample.setting))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sib", type=Path, required=True, help="scaling information base")
    parser.add_argument("--regressor", type=Path, required=True, help="folder of `csps train`")
    parser.add_argument("--model", type=Path, default=shipped_models() / "needle")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves here (PNG)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
