"""From rows of the scaling information base to what F_Ad learns from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from csps.configurator.regressors.samples import AccuracySample, Setting
from csps.configurator.scaling_information_base import AccuracyRow
from csps.protocols.csa_settings import CsaSettings

PLAIN_TEXT = "plain text"
"""The kind of questions that is none: which token comes next."""
RETRIEVES = 0.5
"""A model that answers fewer of a kind's questions rightly, with exact attention, has no answers of
that kind to lose."""


def accuracy_samples(rows: Iterable[AccuracyRow], *, layers: int) -> list[AccuracySample]:
    """One for each configuration that was measured. Of its kinds of questions the one that loses
    most counts, of equals the one most asked: a bound is to be kept whatever is asked. Plain text
    counts where the model answers none of them.

    Args:
        layers: of the model.
    """
    by_setting: dict[Setting, dict[str, list[AccuracyRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_setting[_setting(row, layers)][row.kind].append(row)
    return [
        max(_counting(setting, by_kind), key=lambda it: (it.loss, it.questions))
        for setting, by_kind in by_setting.items()
    ]


def _counting(setting: Setting, by_kind: dict[str, list[AccuracyRow]]) -> list[AccuracySample]:
    """The kinds that say what a configuration loses."""
    sums = {kind: _sum(setting, rows) for kind, rows in by_kind.items()}
    text = sums.pop(PLAIN_TEXT, None)
    answered = [it for it in sums.values() if it.right_exact >= RETRIEVES * it.questions]
    return answered or ([text] if text else list(sums.values()))


def places_of(group_shape: str) -> tuple[str, ...]:
    """Rack-Server-GPU ids of instances by server, such as "2" or "4+4", in one rack."""
    return tuple(
        f"0-{server}-{place}"
        for server, instances in enumerate(group_shape.split("+"))
        for place in range(int(instances))
    )


def _setting(row: AccuracyRow, layers: int) -> Setting:
    return Setting(
        tokens=row.tokens,
        locations=places_of(row.group_shape),
        layers=layers,
        csa=CsaSettings(
            levels=row.levels,
            drop_ratios=((row.drop_ratio,),),
            strategy="tp" if row.strategy == "tp" else "ntp",
            importance_layer="same" if row.importance_layer == "same" else "previous",
            importance_window=row.importance_window,
        ),
    )


def _sum(setting: Setting, rows: list[AccuracyRow]) -> AccuracySample:
    return AccuracySample(
        setting=setting,
        questions=sum(row.questions for row in rows),
        right_exact=sum(row.right_exact for row in rows),
        right=sum(row.right for row in rows),
    )
