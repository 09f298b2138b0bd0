"""A layer of the strategies that move nothing but what attention needs.

Shape suffixes: t rows, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.strategy import Keep
from csps.models.network import Layer
from csps.models.rope import Rotary

Attend = Callable[[int, Tensor, Tensor, Tensor, Keep], Tensor]
"""(layer, q_thd, k_tgd, v_tgd of own rows, keep) -> attention output of own rows, (t, h, d)."""


def attended_layer(
    group: SpGroup,
    index: int,
    layer: Layer,
    x_td: Tensor,
    rotary: Rotary,
    keep: Keep,
    attend: Attend,
) -> Tensor:
    """The residual stream of own rows (t, hidden) after the layer's attention; their KV is kept
    before."""
    timeline = group.clock.timeline
    with timeline.phase("qkv", layer=index):
        q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
    keep(index, k_thd, v_thd)
    out_thd = attend(index, q_thd, k_thd, v_thd, keep)
    with timeline.phase("linear", layer=index):
        return layer.attention_output(x_td, out_thd)
