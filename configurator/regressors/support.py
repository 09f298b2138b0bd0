"""Support of predictions: a loss beyond what was measured chooses nothing.

F_Ad predicts what a smooth curve would between and beyond its points. Losses have steps instead,
and a bound of 0 asks for the largest ratio before a step. So a configuration is chosen only if a
measured one that is at least as hard was asked enough questions and met the bound.

At least as hard means: prompts as long, as many eligible and dropped pairs, ratios as large, and as
few tokens kept, with the same scoring and dropping of queries. (With equal ratios longer prompts
keep more tokens, so neither length alone supports the other.) Only the nearest such points count,
since harder ones may have lost less by chance. What was lost with a smaller ratio, all else equal,
is lost with a larger one, whatever that measured. Prompts beyond the longest measured ones count as
those.

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

UNKNOWN = 1.0
"""Loss of configurations without support."""
HARDER = {
    "log2 tokens": 1,
    "eligible pairs": 1,
    "dropped pairs": 1,
    "mean ratio": 1,
    "largest ratio": 1,
    "log2 kept beside sinks": -1,
}
SAME_PROMPTS = ("log2 tokens", "levels", "eligible pairs")
"""Features of the prompts and the group. Among configurations that agree in them, one with
larger ratios keeps a subset of what another keeps."""
ALIKE = ("judged by the same layer", "log2 window", "queries dropped")
ROUNDING = 1e-9
TOKENS = FEATURES.index("log2 tokens")
MEASURED = CsaSettings()
"""Values that all measured configurations have in fields that are no features."""


@dataclass(frozen=True)
class Support:
    """Measured configurations."""

    features_mf: Amounts
    losses_m: Amounts
    enough_m: NDArray[np.bool_]
    """True if enough was asked; otherwise the loss is `AccuracySample.upper`."""

    @classmethod
    def of(cls, samples: Sequence[AccuracySample]) -> Support:
        """Return the support of measurements."""
        return cls(
            feature_matrix([sample.setting for sample in samples]),
            np.array([sample.upper for sample in samples], float),
            np.array([sample.enough for sample in samples], bool),
        )

    def losses(self, settings: Sequence[Setting]) -> Amounts:
        """Return (n,) upper bounds of the losses, as far as was measured; `UNKNOWN` beyond that."""
        features_nf = feature_matrix(settings)
        longest = self.features_mf[:, TOKENS].max(initial=0.0)
        features_nf[:, TOKENS] = np.minimum(features_nf[:, TOKENS], longest)
        harder_nm = _is_harder(features_nf, self.features_mf)
        harder_nm &= np.array([_matches_measured(setting.csa) for setting in settings], bool)[
            :, None
        ]
        sure_nm = harder_nm & self.enough_m
        near_nm = harder_nm & ~(sure_nm @ self._harder_mm)
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
        """Return an (n, m) mask: m is the same as n, but with ratios as large or smaller."""
        columns = [FEATURES.index(name) for name in SAME_PROMPTS]
        apart_nmf = features_nf[:, None, columns] - self.features_mf[None, :, columns]
        same_nm = np.asarray((np.abs(apart_nmf) <= ROUNDING).all(2))
        return same_nm & _is_harder(self.features_mf, features_nf).T

    @cached_property
    def _harder_mm(self) -> NDArray[np.bool_]:
        """Mask (m, m): the second is harder than the first."""
        as_hard_mm = _is_harder(self.features_mf, self.features_mf)
        harder: NDArray[np.bool_] = as_hard_mm & ~as_hard_mm.T
        return harder

    def rows(self) -> list[str]:
        """Return the rows for a file: features, loss, and 1 where enough was asked."""
        table = np.column_stack((self.features_mf, self.losses_m, self.enough_m))
        return [" ".join(f"{number:.12g}" for number in row) for row in table]

    @classmethod
    def of_rows(cls, rows: Any) -> Support:
        """Parse `rows`.

        Raises:
            ConfigError: they are invalid.
        """
        try:
            numbers = [list(map(float, row.split())) for row in rows]
            table = np.array(numbers, float).reshape(-1, len(FEATURES) + 2)
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"invalid measurements: {error}; run `csps train`") from None
        return cls(table[:, :-2], table[:, -2], table[:, -1].astype(bool))


def _is_harder(features_nf: Amounts, by_mf: Amounts) -> NDArray[np.bool_]:
    """Return an (n, m) mask: m is at least as hard as n."""
    found_nm = np.ones((len(features_nf), len(by_mf)), bool)
    for feature, name in enumerate(FEATURES):
        more_nm = by_mf[None, :, feature] - features_nf[:, None, feature]
        if name in ALIKE:
            found_nm &= np.abs(more_nm) <= ROUNDING
        elif name in HARDER:
            found_nm &= HARDER[name] * more_nm >= -ROUNDING
    return found_nm


def _matches_measured(csa: CsaSettings) -> bool:
    return (
        csa.sinks >= MEASURED.sinks
        and csa.tail >= MEASURED.tail
        and not csa.nested
        and not csa.decode_kept_only
    )
