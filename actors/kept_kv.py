"""Keys and values of the tokens that each KV head keeps (`CsaPlan.decode_kept_only`).

Shape suffixes: t = tokens, h = KV heads, d = head dim, n = kept (head, token) pairs, head by head
and each head's by position; s = slots of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from csps.protocols.span import Span


@dataclass(frozen=True)
class KeptKv:
    """One layer's, of some tokens and neighbouring KV heads."""

    kept_ht: Tensor
    """bool."""
    k_nd: Tensor
    v_nd: Tensor

    @classmethod
    def of(cls, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor) -> KeptKv:
        """Picked from the keys and values of all tokens."""
        return cls(kept_ht, k_thd.transpose(0, 1)[kept_ht], v_thd.transpose(0, 1)[kept_ht])


class KeptBlock(NamedTuple):
    """Slots that hold a kept token for each of some neighbouring KV heads."""

    heads: slice
    slots: range


@dataclass(frozen=True, kw_only=True)
class KeptSpan:
    """Where the kept tokens of a span lie in one layer of a pool.

    Each head's i-th kept token lies in the span's i-th slot. Who decodes needs no positions, so
    that this reads like a shorter prompt, as slices. With tokens in their own slots, each iteration
    would have to gather them first: reading and writing as much as attention then reads once more.
    """

    span: Span
    heads: slice
    """Of the pool."""
    kept_ht: Tensor
    slots: tuple[range, ...]
    """Of all tokens of the span, by position."""

    @cached_property
    def blocks(self) -> tuple[KeptBlock, ...]:
        """All that is kept."""
        return tuple(
            KeptBlock(heads, slots)
            for heads, count in self._equal_heads
            for slots in _first(self.slots, count)
        )

    def write(self, pool_shd: Tensor, x_nd: Tensor) -> None:
        """Keys or values into their slots."""
        begin = 0
        for heads, count in self._equal_heads:
            end = begin + count * (heads.stop - heads.start)
            x_htd = x_nd[begin:end].view(-1 if count else 0, count, x_nd.shape[1])
            done = 0
            for slots in _first(self.slots, count):
                rows_htd = x_htd[:, done : done + len(slots)]
                pool_shd[slots.start : slots.stop, heads].copy_(rows_htd.transpose(0, 1))
                done += len(slots)
            begin = end

    @cached_property
    def _equal_heads(self) -> tuple[tuple[slice, int], ...]:
        """Runs of heads that keep equally many, with how many; mostly one."""
        runs, head = [], self.heads.start
        for count, run in groupby(self.kept_ht.sum(dim=1).tolist()):
            stop = head + len(list(run))
            runs.append((slice(head, stop), count))
            head = stop
        return tuple(runs)


def _first(slots: Sequence[range], count: int) -> Iterator[range]:
    """The first so many slots."""
    for run in slots:
        if count <= 0:
            return
        yield run[:count]
        count -= len(run)
