"""How far measurements reach: what a regressor says beyond them chooses nothing.

F_Ad is fitted to means, and between and beyond its points it says what a smooth curve would. Losses
have steps instead, and a bound of 0 asks for the largest ratio before one. So a configuration is
chosen only if one that is at least as hard was asked enough questions and has kept the bound.

One is at least as hard if its prompts are as long, as many pairs may be dropped and are, its ratios
are as large, and it keeps as few tokens; who judges, and whether queries are dropped, is the same.
(With a ratio as large it is the longer prompt that keeps more, so that neither length by itself
vouches for the other.) Of several the nearest count, before which none lies that was asked enough:
what is harder still may have lost less by chance. Nor does what drops more, all else alike, lose
less: what was lost with a smaller ratio by the same group and length is lost with a larger one,
whatever that has lost itself. Prompts longer than any that was measured count as the longest of
these, and whoever shows their losses says so.

Shape suffixes: n configurations, m measured ones, f features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csps.configurator.model.phase_times import Amounts
from csps.configurator.regressors.samples import FEATURES, AccuracySample, Setting, feature_matrix
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError

ENOUGH = 400
"""Questions from which a measured loss is taken as it is; of fewer, the upper end of its interval
of 95 %."""
UNKNOWN = 1.0
"""Loss of what nothing vouches for."""
HARDER = {
    "log2 tokens": 1,
    "eligible pairs": 1,
    "dropped pairs": 1,
    "mean ratio": 1,
    "largest ratio": 1,
    "log2 kept beside sinks": -1,
}
SAME_PROMPTS = ("log2 tokens", "levels", "eligible pairs")
"""Of configurations for which this is equal too, that with the larger ratio keeps a part of what
the other keeps."""
ALIKE = ("judged by the same layer", "log2 window", "queries dropped")
ROUNDING = 1e-9
TOKENS = FEATURES.index("log2 tokens")
MEASURED = CsaSettings()
"""What every measured configuration has of the fields that no feature tells."""


@dataclass(frozen=True)
class Support:
    """Measured configurations."""

    features_mf: Amounts
    losses_m: Amounts
    enough_m: NDArray[np.bool_]
    """Whether enough was asked; if not, the loss is the upper end of its interval."""

    @classmethod
    def of(cls, samples: Sequence[AccuracySample]) -> Support:
        """Of measurements."""
        enough = [sample.questions >= ENOUGH for sample in samples]
        losses = [
            sample.loss if sample.questions >= ENOUGH else sample.interval[1] for sample in samples
        ]
        return cls(
            feature_matrix([sample.setting for sample in samples]),
            np.array(losses, float),
            np.array(enough, bool),
        )

    def losses(self, settings: Sequence[Setting]) -> Amounts:
        """(n,) at most what each loses, as far as was measured; `UNKNOWN` beyond that."""
        features_nf = feature_matrix(settings)
        longest = self.features_mf[:, TOKENS].max(initial=0.0)
        features_nf[:, TOKENS] = np.minimum(features_nf[:, TOKENS], longest)
        vouching_nm = _vouches(features_nf, self.features_mf)
        vouching_nm &= np.array([_as_measured(setting.csa) for setting in settings], bool)[:, None]
        sure_nm = vouching_nm & self.enough_m
        near_nm = vouching_nm & ~(sure_nm @ self._harder_mm)
        nearest_nm = near_nm & self.enough_m
        surely_n = np.where(nearest_nm, self.losses_m, 0.0).max(1, initial=0.0)
        surely_n[~nearest_nm.any(1)] = UNKNOWN
        few_nm = np.where(near_nm & ~self.enough_m, self.losses_m, UNKNOWN)
        less_nm = self._dropped_less(features_nf) & self.enough_m
        least_n = np.where(less_nm, self.losses_m, 0.0).max(1, initial=0.0)
        losses: Amounts = np.maximum(least_n, np.minimum(surely_n, few_nm.min(1, initial=UNKNOWN)))
        return losses

    @property
    def longest(self) -> int:
        """Tokens of the longest prompts that were measured; 0 without any."""
        if not len(self.features_mf):
            return 0
        return round(2 ** float(self.features_mf[:, TOKENS].max()))

    def _dropped_less(self, features_nf: Amounts) -> NDArray[np.bool_]:
        """(n, m) whether the second is the first with a ratio as large or smaller."""
        columns = [FEATURES.index(name) for name in SAME_PROMPTS]
        apart_nmf = features_nf[:, None, columns] - self.features_mf[None, :, columns]
        same_nm = np.asarray((np.abs(apart_nmf) <= ROUNDING).all(2))
        return same_nm & _vouches(self.features_mf, features_nf).T

    @cached_property
    def _harder_mm(self) -> NDArray[np.bool_]:
        """Whether the second is harder than the first."""
        as_hard_mm = _vouches(self.features_mf, self.features_mf)
        harder: NDArray[np.bool_] = as_hard_mm & ~as_hard_mm.T
        return harder

    def rows(self) -> list[str]:
        """As a file keeps it: features, loss, and 1 where enough was asked."""
        table = np.column_stack((self.features_mf, self.losses_m, self.enough_m))
        return [" ".join(f"{number:.12g}" for number in row) for row in table]

    @classmethod
    def of_rows(cls, rows: Any) -> Support:
        """The inverse of `rows`.

        Raises:
            ConfigError: they are none.
        """
        try:
            numbers = [list(map(float, row.split())) for row in rows]
            table = np.array(numbers, float).reshape(-1, len(FEATURES) + 2)
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"no measurements: {error}; run `csps train`") from None
        return cls(table[:, :-2], table[:, -2], table[:, -1].astype(bool))


def _vouches(features_nf: Amounts, by_mf: Amounts) -> NDArray[np.bool_]:
    """(n, m) whether the second is at least as hard as the first."""
    found_nm = np.ones((len(features_nf), len(by_mf)), bool)
    for feature, name in enumerate(FEATURES):
        more_nm = by_mf[None, :, feature] - features_nf[:, None, feature]
        if name in ALIKE:
            found_nm &= np.abs(more_nm) <= ROUNDING
        elif name in HARDER:
            found_nm &= HARDER[name] * more_nm >= -ROUNDING
    return found_nm


def _as_measured(csa: CsaSettings) -> bool:
    return (
        csa.sinks >= MEASURED.sinks
        and csa.tail >= MEASURED.tail
        and not csa.nested
        and not csa.decode_kept_only
    )
