"""Least squares with coefficients that cannot be negative, for a handful of columns.

In plain floats and in a fixed order of operations, so that the same measurements give the same
bytes on every machine: neither BLAS nor `sum`, whose rounding depends on the version of Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

SINGULAR = 1e-12
"""Of a scaled Cholesky pivot: a column below it is a combination of the others."""


class NormalEquations:
    """Weighted measurements of `value = columns . x`, summed up as X'WX and X'Wy."""

    def __init__(self, columns: int) -> None:
        self._gram = [[0.0] * columns for _ in range(columns)]
        self._moment = [0.0] * columns

    def add(self, columns: Sequence[float], value: float, weight: float) -> None:
        """Count one measurement; `weight` multiplies its squared error."""
        for i, left in enumerate(columns):
            scaled = weight * left
            self._moment[i] += scaled * value
            row = self._gram[i]
            for j, right in enumerate(columns):
                row[j] += scaled * right

    def decay(self, factor: float) -> None:
        """Make all measurements so far count for less."""
        self._moment = [factor * value for value in self._moment]
        self._gram = [[factor * value for value in row] for row in self._gram]

    def plus(self, other: NormalEquations, factor: float = 1.0) -> NormalEquations:
        """Both sets of measurements; the values of `other` are taken times `factor`."""
        whole = NormalEquations(len(self._moment))
        whole._moment = [
            mine + factor * theirs for mine, theirs in zip(self._moment, other._moment, strict=True)
        ]
        whole._gram = [
            [mine + theirs for mine, theirs in zip(row, others, strict=True)]
            for row, others in zip(self._gram, other._gram, strict=True)
        ]
        return whole

    def solve(self) -> list[float]:
        """The coefficients >= 0 with the least squared error.

        Exact: the optimum is the unconstrained solution over some subset of the columns, and all
        subsets are tried, which for four columns are fifteen.
        """
        best, least = [0.0] * len(self._moment), 0.0
        scales = [math.sqrt(self._gram[i][i]) for i in range(len(self._moment))]
        used = [i for i, scale in enumerate(scales) if scale > 0]
        for size in range(1, len(used) + 1):
            for subset in combinations(used, size):
                solution = self._over(subset, scales)
                if solution is None or min(solution) < 0:
                    continue
                error = -_dot(solution, [self._moment[i] / scales[i] for i in subset])
                if error < least:
                    least, best = error, [0.0] * len(self._moment)
                    for i, value in zip(subset, solution, strict=True):
                        best[i] = value / scales[i]
        return best

    def _over(self, subset: Sequence[int], scales: Sequence[float]) -> list[float] | None:
        """The scaled solution over some columns; None if one is a combination of the others."""
        matrix = [[self._gram[i][j] / (scales[i] * scales[j]) for j in subset] for i in subset]
        return solve_positive(matrix, [self._moment[i] / scales[i] for i in subset])


def solve_positive(matrix: list[list[float]], right: Sequence[float]) -> list[float] | None:
    """Solve a symmetric positive definite system with a unit diagonal; None if it is singular."""
    size = len(right)
    lower: list[list[float]] = []
    forward: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            row.append((matrix[i][j] - _dot(row, lower[j][:j])) / lower[j][j])
        pivot = matrix[i][i] - _dot(row, row)
        if pivot < SINGULAR:
            return None
        forward.append((right[i] - _dot(row, forward)) / math.sqrt(pivot))
        lower.append([*row, math.sqrt(pivot)])
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = forward[i]
        for j in range(i + 1, size):
            rest -= lower[j][i] * solution[j]
        solution[i] = rest / lower[i][i]
    return solution


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total = 0.0
    for x, y in zip(left, right, strict=True):
        total += x * y
    return total
