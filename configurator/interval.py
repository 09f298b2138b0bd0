"""How far a share of right answers may be from the truth."""

from __future__ import annotations

from math import sqrt

Z_95 = 1.959963984540054
"""Standard deviations within which 95 % of a normal distribution lie."""


def wilson(right: int, questions: int) -> tuple[float, float]:
    """Wilson's score interval of 95 %, lower and upper end.

    Unlike the normal approximation it holds near 0 and 1: 50 right of 50 may be 93 %.
    """
    assert 0 <= right <= questions > 0, (right, questions)
    share = right / questions
    square = Z_95**2 / questions
    middle = share + square / 2
    spread = Z_95 * sqrt(share * (1 - share) / questions + square / (4 * questions))
    low = (middle - spread) / (1 + square) if right else 0.0
    high = (middle + spread) / (1 + square) if right < questions else 1.0
    return low, high
