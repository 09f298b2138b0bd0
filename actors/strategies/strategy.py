"""What every sequence-parallel attention strategy does for the prefill loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from csps.models.network import Layer
from csps.models.rope import Rotary

Keep = Callable[[int, Tensor, Tensor], None]
"""(layer, k (t, h, d), v (t, h, d)): store own rows' KV, all local KV heads, and send it on."""


class Strategy(Protocol):
    """One layer's attention of one job, spread over the job's group.

    One object serves one job on one rank, so that it can carry what one layer learns to the next.
    """

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, keep: Keep
    ) -> Tensor:
        """From the residual stream of own rows (t, hidden) to the same after attention.

        Calls `keep` once, as soon as the own rows' KV exists. Every layer but the last goes
        through here: the last needs single rows only, which `query_exchange` computes alike for
        all strategies.
        """
        ...
