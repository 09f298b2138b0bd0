"""Interface of the sequence-parallel attention strategies, and parts that several of them use.

Shape suffixes: t rows, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.comm.transfers import Transfers
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary


class StoreKv(Protocol):
    """Store the KV of rows of a layer, all local KV heads, and send the KV of own rows on."""

    def __call__(
        self,
        layer: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
        /,
        *,
        member: int | None = None,
    ) -> None:
        """Store the KV of one layer.

        Args:
            kept_ht: (KV heads, t) bool, the tokens that decode sees; None for all.
            member: another member, one of those `offered`, if the KV is of its rows, in their
                order; None for own rows.
        """
        ...


Sinks = Callable[[int], Tensor | None]
"""Function (layer) that returns the logits of the attention sinks of own query heads, (h,); None if
they have none."""


def no_sinks(layer: int) -> Tensor | None:
    """Return None: heads have no sinks."""
    return None


class Strategy(Protocol):
    """Attention of one step, computed by the members of the step's group.

    One object serves one step on one rank, so that a layer can pass data to the next.
    """

    def offered(self, layer: int, member: int) -> Collection[int]:
        """Return the other members whose KV `attend_layer` also stores at `member`.

        The exchanges of the strategy bring their KV there anyway, with all KV heads of this rank's
        pool, so no further message is needed to store it. All members return the same.
        """
        ...

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """Return the residual stream of own rows (t, hidden) after attention.

        Calls `store` once for own rows, when their KV and the tokens that decode sees are known,
        and once for each member that is `offered`.
        """
        # Called for every layer but the last, which needs single rows only: `query_exchange`
        # computes them for all strategies. Log-probabilities of the prompt need all rows there.
        ...


class ProjectedAttention(ABC):
    """Base of strategies that compute attention from own rows' queries, keys and values."""

    _group: SpGroup

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """See `Strategy`."""
        timeline = self._group.clock.timeline
        with timeline.phase("qkv", layer=index):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        store(index, k_thd, v_thd)
        out_thd = self.attend(index, q_thd, k_thd, v_thd, store)
        with timeline.phase("linear", layer=index):
            return layer.attention_output(x_td, out_thd)

    @abstractmethod
    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """Return the attention output (t, h, d) of this member's rows, in q's dtype."""


class OverlappingStrategy:
    """Base of strategies whose exchanges overlap computing.

    Entered for the duration of a step; leaving it waits for all exchanges of the step.
    """

    def __init__(self, group: SpGroup, *, overlap: bool = True) -> None:
        self._transfers = Transfers(group.mesh, group.clock, overlap=overlap)

    def __enter__(self) -> Self:
        self._transfers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transfers.__exit__(kind, error, trace)
