"""Support of predictions: a loss beyond what was measured chooses nothing.

F_Ad predicts what a smooth curve would between and beyond its points. Losses have steps instead,
and a bound of 0 asks for the largest ratio before a step. So a configuration is chosen only if a
measured one that is at least as hard was asked enough questions and met the bound.

At least as hard means: prompts as long, as many eligible pairs, and in every layer and KV head a
ratio as large, as many dropped pairs and as few tokens kept, with the same scoring and dropping of
queries. So measurements that drop in one layer count for that layer. (With equal ratios longer
prompts keep more tokens, so neither length alone supports the other.) Only the nearest such points
count, since harder ones may have lost less by chance. What was lost with smaller ratios, all else
equal, is lost with larger ones, whatever those measured. Prompts beyond the longest measured ones
count as those.

Shape suffixes: n configurations, m measured ones, f features, l layers that may drop, h KV heads, c
cells (layers and heads), q the quantities of a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from csps.configurator.model.phase_times import Amounts
from csps.configurator.regressors.samples import FEATURES, AccuracySample, Setting, feature_matrix
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError

UNKNOWN = 1.0
"""Loss of configurations without support."""
HARDER = ("log2 tokens", "eligible pairs")
OF_CELL = ("largest ratio", "dropped pairs", "log2 kept beside sinks")
"""Features that are the quantities of a cell if all layers and heads drop alike."""
HARDER_CELL = np.array((1, 1, -1))
""""Harder" for each quantity: more or less of it."""
CELLS = " | "
"""Separator of a row's features and its cells."""
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
    cells_m: tuple[Amounts, ...]
    """Quantities of cells, (l, h, q); l or h is 1 if all layers or heads drop alike."""
    losses_m: Amounts
    enough_m: NDArray[np.bool_]
    """True if enough was asked; otherwise the loss is `AccuracySample.upper`."""

    @classmethod
    def of(cls, samples: Sequence[AccuracySample]) -> Support:
        """Return the support of measurements."""
        return cls(
            feature_matrix([sample.setting for sample in samples]),
            tuple(_cells(sample.setting) for sample in samples),
            np.array([sample.upper for sample in samples], float),
            np.array([sample.enough for sample in samples], bool),
        )

    def losses(self, settings: Sequence[Setting]) -> Amounts:
        """Return (n,) upper bounds of the losses, as far as was measured; `UNKNOWN` beyond that."""
        features_nf = feature_matrix(settings)
        longest = self.features_mf[:, TOKENS].max(initial=0.0)
        features_nf[:, TOKENS] = np.minimum(features_nf[:, TOKENS], longest)
        asked = _Points(features_nf, [_cells(setting) for setting in settings])
        harder_nm, easier_nm = _compared(asked, self._measured)
        harder_nm &= np.array([_matches_measured(setting.csa) for setting in settings], bool)[
            :, None
        ]
        sure_nm = harder_nm & self.enough_m
        near_nm = harder_nm & ~(sure_nm @ self._harder_mm)
        nearest_nm = near_nm & self.enough_m
        surely_n = np.where(nearest_nm, self.losses_m, 0.0).max(1, initial=0.0)
        surely_n[~nearest_nm.any(1)] = UNKNOWN
        few_nm = np.where(near_nm & ~self.enough_m, self.losses_m, UNKNOWN)
        less_nm = easier_nm & self._same_prompts(features_nf) & self.enough_m
        least_n = np.where(less_nm, self.losses_m, 0.0).max(1, initial=0.0)
        losses: Amounts = np.maximum(least_n, np.minimum(surely_n, few_nm.min(1, initial=UNKNOWN)))
        return losses

    @property
    def longest(self) -> int:
        """Tokens of the longest prompts that were measured; 0 without any."""
        if not len(self.features_mf):
            return 0
        return round(2 ** float(self.features_mf[:, TOKENS].max()))

    @property
    def _measured(self) -> _Points:
        return _Points(self.features_mf, self.cells_m)

    def _same_prompts(self, features_nf: Amounts) -> NDArray[np.bool_]:
        """Return an (n, m) mask: m is of the same prompts and group as n."""
        columns = [FEATURES.index(name) for name in SAME_PROMPTS]
        apart_nmf = features_nf[:, None, columns] - self.features_mf[None, :, columns]
        return np.asarray((np.abs(apart_nmf) <= ROUNDING).all(2))

    @cached_property
    def _harder_mm(self) -> NDArray[np.bool_]:
        """Mask (m, m): the second is harder than the first."""
        as_hard_mm, _ = _compared(self._measured, self._measured)
        harder: NDArray[np.bool_] = as_hard_mm & ~as_hard_mm.T
        return harder

    def rows(self) -> list[str]:
        """Return the rows for a file: features, loss, and 1 where enough was asked.

        If layers or heads differ, their numbers and the quantities of cells follow.
        """
        table = np.column_stack((self.features_mf, self.losses_m, self.enough_m))
        return [
            _text(row)
            + (CELLS + _text([*cells.shape[:2], *cells.flat]) if cells[..., 0].size > 1 else "")
            for row, cells in zip(table, self.cells_m, strict=True)
        ]

    @classmethod
    def of_rows(cls, rows: Any) -> Support:
        """Parse `rows`.

        Raises:
            ConfigError: they are invalid.
        """
        try:
            pairs = [row.partition(CELLS)[::2] for row in rows]
            table = np.array([_numbers(row) for row, _ in pairs], float)
            table = table.reshape(-1, len(FEATURES) + 2)
            quantities = [FEATURES.index(name) for name in OF_CELL]
            cells = tuple(
                _parsed_cells(text) if text else row[quantities].reshape(1, 1, -1)
                for row, (_, text) in zip(table, pairs, strict=True)
            )
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"invalid measurements: {error}; run `csps train`") from None
        return cls(table[:, :-2], cells, table[:, -2], table[:, -1].astype(bool))


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.12g}" for number in numbers)


def _numbers(text: str) -> list[float]:
    return list(map(float, text.split()))


def _parsed_cells(text: str) -> Amounts:
    layers, heads, *quantities = _numbers(text)
    cells: Amounts = np.array(quantities).reshape(int(layers), int(heads), len(OF_CELL))
    return cells


def _cells(setting: Setting) -> Amounts:
    """Return the quantities of a setting's cells, with one layer or head if all are alike."""
    heads = max(map(len, setting.cells))
    cells: Amounts = np.array(
        [of_layer * heads if len(of_layer) == 1 else of_layer for of_layer in setting.cells], float
    )
    if (cells == cells[:, :1]).all():
        cells = cells[:, :1]
    return cells[:1] if (cells == cells[:1]).all() else cells


class _Points(NamedTuple):
    """Configurations, asked or measured."""

    features_nf: Amounts
    cells_n: Sequence[Amounts]


def _compared(asked: _Points, measured: _Points) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two (n, m) masks: m is at least as hard as n, and n at least as hard as m."""
    number = len(asked.cells_n)
    fits_n, cells_ncq = _same_shape([*asked.cells_n, *measured.cells_n])
    fits_nm = fits_n[:number, None] & fits_n[None, number:]
    for feature, name in enumerate(FEATURES):
        if name in ALIKE:
            n1, m1 = asked.features_nf[:, None, feature], measured.features_nf[None, :, feature]
            fits_nm &= np.abs(m1 - n1) <= ROUNDING
    harder_nm, easier_nm = fits_nm, fits_nm.copy()
    columns = [
        (sign, cells_ncq[:, cell, quantity])
        for cell in range(cells_ncq.shape[1])
        for quantity, sign in enumerate(HARDER_CELL)
    ]
    columns += [
        (1, np.concatenate((asked.features_nf[:, index], measured.features_nf[:, index])))
        for index in map(FEATURES.index, HARDER)
    ]
    for sign, amount_n in columns:
        # Not by differences: the infinite number of tokens that a head keeps equals another's.
        n1, m1 = sign * amount_n[:number, None], sign * amount_n[None, number:]
        harder_nm &= m1 >= n1 - ROUNDING
        easier_nm &= n1 >= m1 - ROUNDING
    return harder_nm, easier_nm


def _same_shape(cells_n: Sequence[Amounts]) -> tuple[NDArray[np.bool_], Amounts]:
    """Return which configurations have comparable cells, (n,), and all cells, (n, c, q).

    Cells that are equal in all configurations are returned once.
    """
    layers = max((len(cells) for cells in cells_n), default=1)
    heads = max((cells.shape[1] for cells in cells_n), default=1)
    fits_n = np.array(
        [len(cells) in (1, layers) and cells.shape[1] in (1, heads) for cells in cells_n], bool
    )
    shape = (layers, heads, len(OF_CELL))
    nothing = np.zeros(shape)
    broadcast = [
        np.broadcast_to(cells, shape) if fits else nothing
        for cells, fits in zip(cells_n, fits_n, strict=True)
    ]
    cells_ncq = np.array(broadcast, float).reshape(len(cells_n), layers * heads, len(OF_CELL))
    _, first = np.unique(
        cells_ncq.transpose(1, 0, 2).reshape(layers * heads, -1), axis=0, return_index=True
    )
    return fits_n, cells_ncq[:, first]


def _matches_measured(csa: CsaSettings) -> bool:
    return (
        csa.sinks >= MEASURED.sinks
        and csa.tail >= MEASURED.tail
        and not csa.nested
        and not csa.decode_kept_only
    )
