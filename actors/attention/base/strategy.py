"""What every sequence-parallel attention strategy does for a step.

A layer of the strategies that move nothing but what attention needs.

Shape suffixes: t rows, h query heads, g KV heads, d head dim.

What strategies whose exchanges go on beside their computing have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.comm.transfers import Transfers
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary


class StoreKv(Protocol):
    """Store rows' KV of a layer, all local KV heads, and send own rows' on."""

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
        """
        Args:
            kept_ht: (KV heads, t) bool, the tokens that decode is to see; None for all.
            member: another one whose rows' it is, in the order of its rows: what was `offered`.
        """
        ...


class Strategy(Protocol):
    """One layer's attention of one job, spread over the job's group.

    One object serves one job on one rank, so that it can carry what one layer learns to the next.
    """

    def offered(self, layer: int, member: int) -> Collection[int]:
        """Other members whose rows' KV comes by a member anyway, with all KV heads that this rank's
        pool has: there `attend_layer` gives it to `store` as well, and it needs no other message to
        lie there. All members answer alike."""
        ...

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """From the residual stream of own rows (t, hidden) to the same after attention.

        Calls `store` once, as soon as the own rows' KV exists, and it is known what of it decode is
        to see, and once for each member whose rows' was offered. Every layer but the last goes
        through here: the last needs single rows only, which `query_exchange` computes alike for all
        strategies.
        """
        ...


AttendRows = Callable[[int, Tensor, Tensor, Tensor, StoreKv], Tensor]
"""(layer, q_thd, k_tgd, v_tgd of own rows, keep) -> attention output of own rows, (t, h, d)."""


def attended_layer(
    group: SpGroup,
    index: int,
    layer: Layer,
    x_td: Tensor,
    rotary: Rotary,
    store: StoreKv,
    attend: AttendRows,
) -> Tensor:
    """The residual stream of own rows (t, hidden) after the layer's attention; their KV is kept
    before."""
    timeline = group.clock.timeline
    with timeline.phase("qkv", layer=index):
        q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
    store(index, k_thd, v_thd)
    out_thd = attend(index, q_thd, k_thd, v_thd, store)
    with timeline.phase("linear", layer=index):
        return layer.attention_output(x_td, out_thd)


class WithTransfers:
    """Entered for a job's duration; left when all exchanges of the job have ended."""

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
