"""A prompt through the whole model, by any number of configurations one after another.

What configurations have in common is computed once: the first layer, and of the second one what
its level 1 sees and what importance is judged by.

Shape suffixes: n rows (the prompt's, and those of an answer behind it), s scored rows, t tokens of
the prompt, u units, d hidden or head dim, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from csps.kernels.attention import attention
from csps.models.network import Layer, Network
from csps.services.profiling.accuracy.emulated_group import EmulatedGroup
from csps.services.profiling.accuracy.first_layer import FirstLayer


class EmulatedPrompt:
    """Logits of some rows. Rows behind the prompt are an answer's: decode sees all KV."""

    def __init__(self, network: Network, first: FirstLayer, scored: range) -> None:
        """
        Args:
            first: of the prompt and the answer.
            scored: rows whose logits are wanted.
        """
        self._network = network
        self._first = first
        self._scored = scored
        self._rotary = network.rotary(torch.arange(len(first.x_nd)))
        self._known: dict[Hashable, Any] = {}

    def logits(self, group: EmulatedGroup) -> Tensor:
        """(s, v) as the group computes them."""
        layers = self._network.layers
        x_nd, judged_by = self._first.x_nd, (self._first.q_nhd, self._first.k_ngd)
        for index, layer in enumerate(layers[1:-1], start=1):
            x_nd, judged_by = self._layer(index, layer, x_nd, judged_by, group)
        return self._network.logits(self._last_layer(layers[-1], x_nd))

    def _layer(
        self,
        index: int,
        layer: Layer,
        x_nd: Tensor,
        previous: tuple[Tensor, Tensor],
        group: EmulatedGroup,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """After the layer; and its queries and keys, which may judge for the next one."""
        q_nhd, k_ngd, v_ngd = self._once(index, "qkv", lambda: layer.qkv(x_nd, self._rotary))
        near = self._once(
            index, ("near", group.nearest), lambda: group.attend_near(q_nhd, k_ngd, v_ngd)
        )
        if group.plan.levels == 1:
            return layer.finish(x_nd, near[0]), (q_nhd, k_ngd)
        same = group.plan.importance_layer == "same"
        q_judge, k_judge = (q_nhd, k_ngd) if same else previous
        importance_ut = self._once(
            index,
            ("importance", same, group.plan.importance_window, group.unit_heads),
            lambda: group.judged(q_judge, group.of_units(k_judge)),
        )
        out_nhd, lse_hn = near[0].clone(), near[1].clone()
        changed_n = group.attend_far(
            index,
            q_nhd,
            group.of_units(k_ngd),
            group.of_units(v_ngd),
            importance_ut,
            out_nhd,
            lse_hn,
        )
        if index > 1:
            return layer.finish(x_nd, out_nhd), (q_nhd, k_ngd)
        unchanged_nd = self._once(
            index, ("finished", group.nearest), lambda: layer.finish(x_nd, near[0])
        )
        after_nd = unchanged_nd.clone()
        after_nd[changed_n] = layer.finish(x_nd[changed_n], out_nhd[changed_n])
        return after_nd, (q_nhd, k_ngd)

    def _last_layer(self, layer: Layer, x_nd: Tensor) -> Tensor:
        rows = slice(self._scored.start, self._scored.stop)
        q_shd, _, _ = layer.qkv(x_nd[rows], self._rotary[rows])
        k_ngd, v_ngd = layer.keys_and_values(x_nd, self._rotary)
        out_shd, _ = attention(
            q_shd,
            k_ngd,
            v_ngd,
            q_positions=self._scored,
            k_positions=range(len(x_nd)),
            scale=layer.spec.scale,
        )
        return layer.finish(x_nd[rows], out_shd)

    def _once(self, index: int, what: Hashable, compute: Callable[[], Any]) -> Any:
        """Of the second layer, whose input all configurations have in common; else anew."""
        if index != 1:
            return compute()
        if what not in self._known:
            self._known[what] = compute()
        return self._known[what]
