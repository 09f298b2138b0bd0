"""Moved definitions.

How long attention is cut so that urgent jobs may run inside it.

Shape suffixes: t tokens, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

Phases = tuple[int, ...]
"""Numbers that each phase of a layer has, at least 1."""


@dataclass(frozen=True)
class StepPoints:
    """The numbers of one step."""

    layers: tuple[Phases, ...]
    """The first phase of each layer is the point at which it begins, the last one its MLP; of the
    model's last layer, which is computed by rows, there is only the first."""

    @property
    def total(self) -> int:
        """Numbers are 0 to this, without it."""
        return self._firsts[-1]

    def numbers(self, layer: int, phase: int) -> range:
        """Of a phase."""
        first = self._firsts[layer] + sum(self.layers[layer][:phase])
        return range(first, first + self.layers[layer][phase])

    @cached_property
    def _firsts(self) -> list[int]:
        return list(accumulate(map(sum, self.layers), initial=0))


class YieldPoints:
    """One member's way through its step. Without `parts` it passes points that have no numbers, and
    tells nobody: for strategies that are run by themselves.

    Args:
        part: told the number of each point, none of which is less than the one before; may do other
            things before it returns.
    """

    def __init__(
        self, parts: StepPoints | None = None, part: Callable[[int], None] = lambda number: None
    ) -> None:
        self._step_points, self._at_point = parts, part
        self._layer, self._phase = -1, 0
        self._left = range(0)
        self.before_pause: Callable[[], None] = lambda: None
        """To be called before other things are done at a point: begins what is yet to be passed on
        for others, who may wait for it before they come to the same point."""

    def begin_layer(self, index: int) -> None:
        """Between two layers: what all members agree on from a layer on changes here."""
        if self._step_points is None:
            return
        if self._layer >= 0:
            phases = len(self._step_points.layers[self._layer])
            assert self._phase == phases - 1, f"layer {self._layer} ends in phase {self._phase}"
        self._layer, self._phase = index, -1
        self._enter_next()
        self.close()

    def point(self) -> None:
        """Between two blocks of computing."""
        if self._step_points is not None:
            number = self._left[0]
            self._left = self._left[1:] or self._left
            self._at_point(number)

    def close(self) -> None:
        """Before the next exchange is begun, of those that end a phase; all members do, whether
        they have a part in it or not."""
        if self._step_points is not None:
            self._at_point(self._left[-1])
            self._enter_next()

    def _enter_next(self) -> None:
        assert self._step_points is not None
        self._phase += 1
        if self._phase < len(self._step_points.layers[self._layer]):
            self._left = self._step_points.numbers(self._layer, self._phase)


BLOCK_PRODUCTS = 2**31
"""Multiplications of q·k in one block of queries, between which other work may run: a twentieth of
a second on a core, as long as blocks are not kept at their least rows."""
MIN_BLOCK_ROWS = 1024
"""Shorter blocks make attention slower, as torch then works off fewer queries at a time. With many
keys such a block takes longer: near a second at 256K."""


def query_blocks(q_thd: Tensor, keys: int) -> Iterator[slice]:
    """Blocks of queries that attend to so many keys at most; one on a GPU, to which a layer is
    handed over as a whole anyway."""
    tokens, heads, dim = q_thd.shape
    rows = max(1, tokens) if q_thd.is_cuda else _block_rows(heads, dim, keys)
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def block_count(rows: int, heads: int, dim: int, keys: int) -> int:
    """How many blocks `query_blocks` makes of so many queries on a CPU."""
    return -(-rows // _block_rows(heads, dim, keys))


def _block_rows(heads: int, dim: int, keys: int) -> int:
    return max(MIN_BLOCK_ROWS, BLOCK_PRODUCTS // max(1, keys * heads * dim))
