"""What an iteration of a stream computes: decode rows and pieces of prompts within a budget.

Sarathi-Serve's batching (Alg. 3) on every master: each of its rows that decodes computes its one
token, whatever the budget. What is left of the budget goes to the prompts that have begun, the
oldest first, and then to those that have not. A long prompt so delays nobody's next token by more
than the budget, and no token is wasted on waiting for a prompt to end.

All ranks of a gang, paced ranks and the simulator fill an iteration by this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RowState(NamedTuple):
    """How far a row of a stream is. Positions are those of its sequence."""

    next: int
    """The first position that is not computed."""
    prompt: int
    """Positions before this one are given. Who computes the last of them draws the first token."""
    stop: int
    """No position from here on is computed: the last token is drawn and not embedded."""
    master: int = 0
    """The instance that computes them. Masters work side by side, each within the budget."""
    first: int = 0
    """The position that it begins at; of those before, there is KV already."""


def fill(rows: Sequence[RowState], budget: int) -> list[int]:
    """How many positions each row computes in the next iteration.

    Args:
        rows: in order of joining.
        budget: tokens of an iteration on each master. Rows that decode use it up first, and may
            exceed it.

    Returns:
        Lengths in the order of the rows: 1 for a row that decodes, 0 for one that has computed all
        or has to wait, and the length of its next piece for one that prefills.
    """
    lengths = [int(it.prompt <= it.next < it.stop) for it in rows]
    left = dict.fromkeys((it.master for it in rows), budget)
    for row, length in zip(rows, lengths, strict=True):
        left[row.master] -= length
    begun = [index for index, it in enumerate(rows) if it.first < it.next < it.prompt]
    new = [index for index, it in enumerate(rows) if it.first == it.next < it.prompt]
    for index in (*begun, *new):
        row = rows[index]
        lengths[index] = max(0, min(row.prompt - row.next, left[row.master]))
        left[row.master] -= lengths[index]
    return lengths
