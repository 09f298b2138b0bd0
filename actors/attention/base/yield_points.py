"""Yield points inside a prefill step, where high-priority steps and decode iterations may run.

`csps.actors.attention.step_points` computes how many points each phase of a step has. Long
attention is computed in blocks of queries (`query_blocks`) with a point between two blocks.

Shape suffixes: t tokens, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

Phases = tuple[int, ...]
"""Points of each phase of a layer, at least 1 each."""


@dataclass(frozen=True)
class StepPoints:
    """Points of one step, numbered over all of its layers."""

    layers: tuple[Phases, ...]
    """Phases of each layer. The first phase is the point at which the layer begins, the last is its
    MLP. The model's last layer, which is computed by rows, has the first phase only, unless
    log-probabilities of the prompt are wanted: they count with its MLP."""

    @property
    def total(self) -> int:
        """Number of points of the step."""
        return self._firsts[-1]

    def numbers(self, layer: int, phase: int) -> range:
        """Return the numbers of the points of a phase."""
        first = self._firsts[layer] + sum(self.layers[layer][:phase])
        return range(first, first + self.layers[layer][phase])

    @cached_property
    def _firsts(self) -> list[int]:
        return list(accumulate(map(sum, self.layers), initial=0))


class YieldPoints:
    """Progress of one member through the points of its step.

    Args:
        step_points: points of the step; None passes points without numbers, for strategies that
            run alone.
        at_point: called with the number of each point, in ascending order; may run other work
            before it returns.
    """

    def __init__(
        self,
        step_points: StepPoints | None = None,
        at_point: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._step_points, self._at_point = step_points, at_point
        self._layer, self._phase = -1, 0
        self._left = range(0)
        self.before_pause: Callable[[], None] = lambda: None
        """Function to call before other work runs at a point. It begins pending sends to members
        that may need the data to reach the same point."""

    def begin_layer(self, index: int) -> None:
        """Pass the point between two layers, where members agree on cancelled sequences."""
        if self._step_points is None:
            return
        if self._layer >= 0:
            phases = len(self._step_points.layers[self._layer])
            assert self._phase == phases - 1, f"layer {self._layer} ends in phase {self._phase}"
        self._layer, self._phase = index, -1
        self._enter_next()
        self.close()

    def point(self) -> None:
        """Pass a point between two blocks of computing."""
        if self._step_points is not None:
            number = self._left[0]
            self._left = self._left[1:] or self._left
            self._at_point(number)

    def close(self) -> None:
        """End the phase, before the next exchange that ends one.

        All members call it, also those without a part in the exchange.
        """
        if self._step_points is not None:
            self._at_point(self._left[-1])
            self._enter_next()

    def _enter_next(self) -> None:
        assert self._step_points is not None
        self._phase += 1
        if self._phase < len(self._step_points.layers[self._layer]):
            self._left = self._step_points.numbers(self._layer, self._phase)


BLOCK_PRODUCTS = 2**31
"""Multiplications of q·k in one block: 50 ms on a core, unless MIN_BLOCK_ROWS applies."""
MIN_BLOCK_ROWS = 1024
"""Fewest rows of a block."""
# Shorter blocks make attention slower, as torch then computes fewer queries at a time. With many
# keys such a block takes longer than 50 ms: almost a second at 256K keys.


def query_blocks(q_thd: Tensor, keys: int) -> Iterator[slice]:
    """Split queries that attend to at most `keys` keys into blocks; a GPU gets one block."""
    tokens, heads, dim = q_thd.shape
    # A GPU is given a whole layer at a time anyway.
    rows = max(1, tokens) if q_thd.is_cuda else block_rows(heads, dim, keys)
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def block_count(rows: int, heads: int, dim: int, keys: int) -> int:
    """Return how many blocks `query_blocks` makes of `rows` queries on a CPU."""
    return -(-rows // block_rows(heads, dim, keys))


def block_rows(heads: int, dim: int, keys: int) -> int:
    """Return the most queries of a block on a CPU, by the keys that they attend to."""
    return max(MIN_BLOCK_ROWS, BLOCK_PRODUCTS // max(1, keys * heads * dim))
