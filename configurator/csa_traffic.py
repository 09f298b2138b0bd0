"""What sparse SP-NTP sends (CSPS §3.2.4): kept rows once to each owner of their heads, and outputs
of kept queries back from every level.

Whose queries, keys and values go where at each level `level_masks` says. What an owner got for a
nearer level is not sent again. Importance travels as well, in the layer before one that drops, or
in that layer where it judges by itself.
Micro-partitions cut messages and add no bytes.

Under tensor parallelism the ranks of equal place in their instances exchange their share of the
heads, and each instance sums the output projection.

Shape suffixes: o owners of heads, p parts (one per member), h query heads, g KV heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from csps.configurator.level_masks import Mask, level_masks
from csps.configurator.shapes import AttentionShape, head_shares
from csps.configurator.traffic import Traffic, instance_sums
from csps.protocols.csa import ALL_QUERIES, CsaPlan, kept_tokens
from csps.protocols.even_share import even_share
from csps.protocols.group_shape import GroupShape
from csps.protocols.topology import Topology

Counts = NDArray[np.int64]


def csa_traffic(shape: AttentionShape, plan: CsaPlan, *, tp: int, spts: Sequence[int]) -> Traffic:
    """In one layer, on the average of those that exchange: all but the last.

    Args:
        spts: tokens of each member, at least one.
    """
    layers = max(1, shape.layers - 1)
    alike = Counter(_content(shape, plan, layer) for layer in range(layers))
    total = Traffic()
    for (drops, judges, layer), times in alike.items():
        kept = layer if drops else None
        total += _layer(shape, plan, tp=tp, spts=spts, dropping=kept, judges=judges) * times
    return total * (1 / layers)


def levels_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Of exact attention with levels: by the server, and everything."""
    places = [
        f"0-{server}-{place}"
        for server, instances in enumerate(group.servers)
        for place in range(instances)
    ]
    plan = CsaPlan(locations=tuple(places), levels=len(Topology.of(places).granularities))
    spts = [len(even_share(tokens, len(places), place)) for place in range(len(places))]
    return csa_traffic(shape, plan, tp=group.tp, spts=spts)


def _content(shape: AttentionShape, plan: CsaPlan, layer: int) -> tuple[bool, bool, int]:
    """What a layer's traffic depends on: whether it drops, whether it judges, for the next one or
    for itself, and the first layer of those with its ratios."""
    group = plan.layer_group(layer)
    drops = _drops(shape, plan, layer)
    same = plan.importance_layer == "same"
    judges = drops if same else _drops(shape, plan, layer + 1)
    return drops, judges, group.first if drops else 0


def _drops(shape: AttentionShape, plan: CsaPlan, layer: int) -> bool:
    """The first layer and the last never do."""
    ratios = plan.layer_group(layer).drop_ratios
    return 0 < layer < shape.layers - 1 and any(any(level) for level in ratios)


def _layer(
    shape: AttentionShape,
    plan: CsaPlan,
    *,
    tp: int,
    spts: Sequence[int],
    dropping: int | None,
    judges: bool,
) -> Traffic:
    """
    Args:
        dropping: the layer whose ratios hold; None drops nothing.
    """
    assert not plan.nested, "nested levels are not counted here"
    group = GroupShape.of(plan.topology.locations, tp)
    traffic = instance_sums(shape, group, sum(spts))
    same = np.equal.outer(group.instance_servers, group.instance_servers)
    for queries, keys in head_shares(shape.heads, shape.kv_heads, tp):
        peers = _Peers(shape, plan, spts, dropping, queries, keys)
        sent = peers.exchanged()
        if judges:
            sent += peers.importance()
        traffic += Traffic(inside=float(sent[same].sum()), between=float(sent[~same].sum()))
    return traffic


class _Peers:
    """The ranks of equal place in their instances, which share `queries` and `keys`.

    Results are elements from member to member.
    """

    def __init__(
        self,
        shape: AttentionShape,
        plan: CsaPlan,
        spts: Sequence[int],
        dropping: int | None,
        queries: range,
        keys: range,
    ) -> None:
        self._shape = shape
        self._plan = plan
        self._spts = spts
        self._dropping = dropping
        self._queries, self._keys = queries, keys

    def exchanged(self) -> NDArray[np.float64]:
        """Both all-to-alls of all levels."""
        members, dim = len(self._spts), self._shape.head_dim
        sent = np.zeros((members, members))
        held_oph = np.zeros((members, members, len(self._queries)), bool)
        held_opg = np.zeros((members, members, len(self._keys)), bool)
        for level, wanted_oph, wanted_opg in self._levels():
            kept_ph, kept_pg = self._kept(level)
            sent += dim * _tokens(wanted_oph & ~held_oph, kept_ph).T
            sent += 2 * dim * _tokens(wanted_opg & ~held_opg, kept_pg).T
            sent += (dim + self._shape.lse) * _tokens(wanted_oph, kept_ph)
            held_oph |= wanted_oph
            held_opg |= wanted_opg
        return sent

    def importance(self) -> NDArray[np.float64]:
        """What judges tokens of the next layer, or of this one."""
        if self._plan.importance_window == ALL_QUERIES:
            return self._judged_by_all()
        return self._judged_by_window()

    def _judged_by_all(self) -> NDArray[np.float64]:
        """LSEs of kept queries to the owners of their heads, and column sums of keys back."""
        sent = np.zeros((len(self._spts), len(self._spts)))
        for level, wanted_oph, wanted_opg in self._levels():
            kept_ph, kept_pg = self._kept(level)
            sent += _tokens(wanted_oph, kept_ph).T + _tokens(wanted_opg, kept_pg)
        return sent * self._shape.lse

    def _judged_by_window(self) -> NDArray[np.float64]:
        """Last queries to all before them, and among all of these LSEs over their keys."""
        members = len(self._spts)
        sent = np.zeros((members, members))
        after = sum(self._spts)
        for member, tokens in enumerate(self._spts):
            after -= tokens
            rows = min(tokens, max(0, self._plan.importance_window - after)) * len(self._queries)
            sent[member, :member] += rows * self._shape.head_dim
            sent[: member + 1, : member + 1] += rows * self._shape.lse
        np.fill_diagonal(sent, 0)
        return sent

    # --- levels --------------------------------------------------------------------------------

    def _levels(self) -> Iterator[tuple[int, Mask, Mask]]:
        """(level, queries, keys) that each owner needs of each other part, near levels first."""
        for it in level_masks(self._plan.segments(), len(self._queries), len(self._keys)):
            yield it.level, it.queries_oph, it.keys_opg

    def _kept(self, level: int) -> tuple[Counts, Counts]:
        """Tokens of each part for each query head and KV head."""
        kept_pg = np.array([self._kept_of(part, level) for part in self._parts()])
        kept_ph = kept_pg.repeat(len(self._queries) // len(self._keys), axis=1)
        if not self._plan.drop_queries:
            kept_ph = np.broadcast_to(np.array(self._spts)[:, None], kept_ph.shape)
        return kept_ph, kept_pg

    def _kept_of(self, part: range, level: int) -> list[int]:
        if self._dropping is None:
            return [len(part)] * len(self._keys)
        group = self._plan.layer_group(self._dropping)
        always = self._never_dropped(part)
        return [kept_tokens(len(part), group.drop_ratio(level, g), always) for g in self._keys]

    def _never_dropped(self, part: range) -> int:
        """Sinks and tail of the prompt that fall into a part."""
        last = sum(self._spts) - self._plan.tail
        return len(range(part.start, min(part.stop, max(self._plan.sinks, part.start)))) + len(
            range(max(part.start, self._plan.sinks, last), part.stop)
        )

    def _parts(self) -> Iterator[range]:
        """Tokens of each member."""
        for stop, tokens in zip(accumulate(self._spts), self._spts, strict=True):
            yield range(stop - tokens, stop)


def _tokens(wanted: Mask, counts: Counts) -> NDArray[np.float64]:
    """(o, p) from (o, p, heads) and (p, heads)."""
    tokens: NDArray[np.float64] = np.einsum("oph,ph->op", wanted, counts, dtype=np.float64)
    return tokens
