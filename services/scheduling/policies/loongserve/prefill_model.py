"""The time of a prefill iteration by degree of parallelism (LoongServe §5.5, Eq. 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Eq7(NamedTuple):
    """T(R) = alpha + beta * sum(len) + gamma * sum(len^2), in nanoseconds."""

    alpha: float
    beta: float
    gamma: float

    def ns(self, tokens: int, squares: int) -> float:
        """Of requests with so many tokens together, and such a sum of squared lengths."""
        return self.alpha + self.beta * tokens + self.gamma * squares


class PrefillModel:
    """Eq. 7 of groups of every size.

    Args:
        line: coefficients for a number of instances; asked once for each.
        tipping_tokens: a batch of so many tokens, each attending to nobody, is where prefill turns
            from memory-bound to compute-bound; 0 is where the two parts of Eq. 7 are equal, when
            computing takes as long as whatever does not grow with the batch.
    """

    def __init__(self, line: Callable[[int], Eq7], tipping_tokens: int = 0) -> None:
        self._line = line
        self._tipping_tokens = tipping_tokens
        self._known: dict[int, Eq7] = {}

    def line(self, dop: int) -> Eq7:
        """Coefficients of groups of `dop` instances."""
        if dop not in self._known:
            self._known[dop] = self._line(dop)
        return self._known[dop]

    def ns(self, lengths: Sequence[int], dop: int) -> float:
        """T(R, E)."""
        return self.line(dop).ns(sum(lengths), sum(it * it for it in lengths))

    def tipping_ns(self, dop: int) -> float:
        """Iterations that take longer are compute-bound: more requests only make them longer."""
        line = self.line(dop)
        if self._tipping_tokens:
            return line.alpha + line.beta * self._tipping_tokens
        return 2 * line.alpha
