"""What was measured of accuracy, as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csps.configurator.regressors.measured import accuracy_samples
from csps.configurator.regressors.samples import AccuracySample
from csps.configurator.scaling_information_base import AccuracyRow


def accuracy_lines(rows: Sequence[AccuracyRow], *, layers: int) -> Iterator[str]:
    """A line for each configuration: what its worst kind of questions loses."""
    if not rows:
        return
    yield "tokens  group  N_v  strategy  judged by  window  drop ratio  lost of right answers"
    for it in sorted(accuracy_samples(rows, layers=layers), key=_order):
        csa, (low, high) = it.setting.csa, it.interval
        yield (
            f"{it.setting.tokens:>6}  {len(it.setting.locations):>5}  {it.setting.levels:>3}  "
            f"{csa.strategy:<8}  {csa.importance_layer:<9}  {csa.importance_window:>6}  "
            f"{csa.drop_ratios[0][0]:>10.2f}  {it.loss:.1%} [{low:.1%}, {high:.1%}] "
            f"of {it.questions}"
        )


def _order(sample: AccuracySample) -> tuple[object, ...]:
    setting, csa = sample.setting, sample.setting.csa
    return (
        setting.tokens,
        csa.strategy,
        csa.importance_layer,
        csa.importance_window,
        setting.locations,
        setting.levels,
        csa.drop_ratios,
    )
