"""What every sequence-parallel attention strategy does for a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from csps.models.network import Layer
from csps.models.rope import Rotary


class Keep(Protocol):
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
        pool has: there `attend_layer` gives it to `keep` as well, and it needs no other message to
        lie there. All members answer alike."""
        ...

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, keep: Keep
    ) -> Tensor:
        """From the residual stream of own rows (t, hidden) to the same after attention.

        Calls `keep` once, as soon as the own rows' KV exists, and it is known what of it decode is
        to see, and once for each member whose rows' was offered. Every layer but the last goes
        through here: the last needs single rows only, which `query_exchange` computes alike for all
        strategies.
        """
        ...
