"""Elements that attention sends in one layer, counted over all ranks, by strategy (CSPS §3.2).

Each formula counts what this engine sends for one whole prompt, cut evenly over the group's
instances; tests compare it with the bytes that ranks count. Traffic that all strategies share is
not counted: the MLP's sum over an instance, whose weights stay sharded; KV for the decode gang; and
the last layer, which is computed for single rows. The few words with which a group's leader begins
each layer are not counted, either. Ranks without heads, where there are more ranks than heads,
receive no rows to compute with.

`LevelMasks` says which queries, keys and values go where at each level of sparse SP-NTP (§3.2.4).
Levels are disjoint. At level v the members of a segment own its heads in equal shares; queries of
all parts but those of its first level-(v-1) segment go there, and keys and values of all but those
of its last one. At level 1 every part attends causally to itself.

Shape suffixes: o owners of heads, p parts (one per member), i parts that attend, j parts that are
attended to, h query heads, g KV heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from csps.configurator.model.attention_shape import AttentionShape, head_shares
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, kept_tokens
from csps.protocols.core.placement import even_share
from csps.protocols.core.topology import GroupShape, Segments, Topology

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LevelMasks:
    """Masks of one level."""

    level: int
    """Number of the level, from 1."""
    together_op: Mask
    """True if owner and part share a segment, as each member does with itself."""
    sees_ij: Mask
    """True if part i attends to all of part j; at level 1 each part also attends causally to
    itself."""
    seeing_p: Mask
    """True for parts that attend to something."""
    seen_p: Mask
    """True for parts that are attended to."""
    owned_oh: Mask
    owned_og: Mask
    """True for KV heads that the owned query heads read."""

    @property
    def queries_oph(self) -> Mask:
        """True for queries that an owner needs from other members."""
        others_op = self.together_op & ~np.eye(len(self.together_op), dtype=np.bool_)
        needed: Mask = (others_op & self.seeing_p)[:, :, None] & self.owned_oh[:, None, :]
        return needed

    @property
    def keys_opg(self) -> Mask:
        """True for keys and values that an owner needs from other members."""
        others_op = self.together_op & ~np.eye(len(self.together_op), dtype=np.bool_)
        needed: Mask = (others_op & self.seen_p)[:, :, None] & self.owned_og[:, None, :]
        return needed


def level_masks(
    segments_by_level: Sequence[Segments], heads: int, kv_heads: int
) -> Iterator[LevelMasks]:
    """Yield the masks of each level, the nearest first.

    Args:
        segments_by_level: segments of members at each level, level 1 first.
        heads: query heads that ranks of equal place in their instances share.
        kv_heads: KV heads of these.
    """
    for level, here in enumerate(segments_by_level, start=1):
        nearer = segments_by_level[level - 2] if level > 1 else None
        seeing_p, seen_p = _sights(here, nearer)
        owned_oh, owned_og = _owned(here, heads, kv_heads)
        together_op = _together(here)
        yield LevelMasks(
            level=level,
            together_op=together_op,
            sees_ij=together_op & _precedes(nearer, len(together_op)),
            seeing_p=seeing_p,
            seen_p=seen_p,
            owned_oh=owned_oh,
            owned_og=owned_og,
        )


def _owned(segments: Segments, heads: int, kv_heads: int) -> tuple[Mask, Mask]:
    members = segments[-1].stop
    owned_oh = np.zeros((members, heads), bool)
    owned_og = np.zeros((members, kv_heads), bool)
    for segment in segments:
        shares = head_shares(heads, kv_heads, len(segment))
        for member, (queries, keys) in zip(segment, shares, strict=True):
            owned_oh[member, queries.start : queries.stop] = True
            owned_og[member, keys.start : keys.stop] = True
    return owned_oh, owned_og


def _sights(segments: Segments, nearer: Segments | None) -> tuple[Mask, Mask]:
    """Return two (p,) masks: parts that attend to something at a level, and parts that are
    attended to."""
    members = segments[-1].stop
    seeing = np.ones(members, bool)
    seen = np.ones(members, bool)
    if nearer is None:
        return seeing, seen
    for segment in segments:
        inner = [run for run in nearer if run.start in segment]
        seeing[inner[0].start : inner[0].stop] = False
        seen[inner[-1].start : inner[-1].stop] = False
    return seeing, seen


def _precedes(nearer: Segments | None, members: int) -> Mask:
    """Return an (i, j) mask: j comes before the nearer segment of i."""
    begins = np.arange(members)
    for run in nearer or ():
        begins[run.start : run.stop] = run.start
    before: Mask = np.arange(members)[None, :] < begins[:, None]
    return before


def _together(segments: Iterable[range]) -> Mask:
    """Return an (o, p) mask: owner and part share a segment."""
    label = np.concatenate([np.full(len(run), index) for index, run in enumerate(segments)])
    together: Mask = np.equal.outer(label, label)
    return together


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements of the model's dtype that all ranks together send in one layer."""

    inside: float = 0.0
    """Elements sent to ranks of the same server."""
    between: float = 0.0
    """Elements sent to ranks of other servers."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(inside=self.inside + other.inside, between=self.between + other.between)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(inside=self.inside * times, between=self.between * times)

    def cost(self, between_weight: float) -> float:
        """Return the elements, with those between servers weighted."""
        return self.inside + between_weight * self.between


def ulysses_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Count SP-NTP over instances, in which each rank has all rows and its own heads.

    Queries, keys and values go to the owners of the heads and outputs return, among ranks of equal
    place in their instances. Each instance sums the output projection. If some layers have a
    window, this is an average layer.
    """
    traffic = instance_sums(shape, group, tokens)
    for queries, keys in head_shares(shape.heads, shape.kv_heads, group.tp):
        traffic += _head_exchange(shape, len(queries), len(keys), group.instance_servers, tokens)
    if not shape.windowed:
        return traffic
    layers = range(max(1, shape.layers - 1))
    near = len(shape.windowed.intersection(layers)) / len(layers)
    spts = [len(even_share(tokens, group.sp, member)) for member in range(group.sp)]
    return traffic * (1 - near) + window_traffic(shape, group, spts) * near


def window_traffic(shape: AttentionShape, group: GroupShape, spts: Sequence[int]) -> Traffic:
    """Count a layer with a sliding window whose members have own rows.

    Keys and values go to members whose rows reach them, among ranks of equal place in their
    instances. Each instance sums the output projection.
    """
    assert shape.window is not None, "no layer has a window"
    of_ranks = head_shares(shape.heads, shape.kv_heads, group.tp)
    row = 2 * shape.head_dim * sum(len(keys) for _, keys in of_ranks)
    traffic = instance_sums(shape, group, sum(spts))
    starts, servers = [0, *accumulate(spts)], group.instance_servers
    for asker in (member for member in range(len(spts)) if spts[member]):
        first = max(0, starts[asker] - shape.window + 1)
        for holder in range(asker):
            elements = row * max(0, starts[holder + 1] - max(first, starts[holder]))
            near = servers[holder] == servers[asker]
            traffic += Traffic(inside=elements * near, between=elements * (not near))
    return traffic


def gathered_weights_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Count SP-NTP over all ranks, each of which gathers the weights of all heads.

    Queries, keys and values go to the owners of the heads and outputs return, among all ranks. Each
    instance gathers its rows for the MLP.
    """
    weights = shape.weights * (group.tp - 1) * group.sp
    return (
        Traffic(inside=weights)
        + _head_exchange(shape, shape.heads, shape.kv_heads, group.rank_servers, tokens)
        + _instance_rows(shape, group, tokens)
    )


def sp_tp_traffic(
    shape: AttentionShape, group: GroupShape, tokens: int, *, hierarchical: bool = True
) -> Traffic:
    """Count SP-TP over all ranks: all-gather of rows, reduce-scatter of outputs, rows of instances.

    Sparse attention sends as much: dropped tokens are not computed, but sent.
    """
    gather = _spread(shape, group, tokens, hierarchical=hierarchical, past_instance=True)
    reduce = _spread(shape, group, tokens, hierarchical=hierarchical, past_instance=False)
    return gather + reduce + _instance_rows(shape, group, tokens)


def instance_sums(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Count the output projection's sum over each instance: 2 (tp-1) / tp a rank, as in a ring."""
    return Traffic(inside=2 * tokens * shape.hidden * (group.tp - 1))


def _head_exchange(
    shape: AttentionShape, heads: int, kv_heads: int, servers: Sequence[int], tokens: int
) -> Traffic:
    """Count all queries, keys and values to the owners of the heads, and outputs back.

    Args:
        servers: servers of the owners.
    """
    inside = between = 0.0
    shares = head_shares(heads, kv_heads, len(servers))
    for server, (queries, keys) in zip(servers, shares, strict=True):
        row = 2 * (len(queries) + len(keys)) * shape.head_dim * tokens / len(servers)
        near = servers.count(server) - 1
        inside += row * near
        between += row * (len(servers) - 1 - near)
    return Traffic(inside=inside, between=between)


def _spread(
    shape: AttentionShape,
    group: GroupShape,
    tokens: int,
    *,
    hierarchical: bool,
    past_instance: bool,
) -> Traffic:
    """Count the all-gather of rows, or the reduce-scatter of outputs, which mirrors it.

    Args:
        past_instance: the owner's instance has its rows already, and receives none.
    """
    takes = [bool(heads) for heads, _ in head_shares(shape.heads // group.tp, 1, group.sp)]
    takers = Counter[int]()
    for server, computes in zip(group.instance_servers, takes, strict=True):
        takers[server] += group.tp * computes
    inside = between = 0
    for server, computes in zip(group.instance_servers, takes, strict=True):
        spared = group.tp if past_instance else 1
        inside += takers[server] - spared * computes
        for count in (takers[other] for other in takers if other != server and takers[other]):
            between += 1 if hierarchical else count  # once into each other server
            inside += count - 1 if hierarchical else 0  # and from there on inside
    # Each instance is `tp` owners of an equal part of its rows.
    instance = tokens * shape.hidden / group.sp
    return Traffic(inside=instance * inside, between=instance * between)


def _instance_rows(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Count every rank's rows to the other ranks of its instance, for the MLP."""
    return Traffic(inside=tokens * shape.hidden * (group.tp - 1))


Counts = NDArray[np.int64]


def csa_traffic(shape: AttentionShape, plan: CsaPlan, *, tp: int, spts: Sequence[int]) -> Traffic:
    """Count sparse SP-NTP in an average layer of those that exchange: all but the last.

    Kept rows go once to each owner of their heads, and outputs of kept queries return from every
    level. What an owner received for a nearer level is not sent again. Importance scores travel as
    well, in the layer before one that drops, or in that layer if it scores itself. Micro-partitions
    cut messages and add no bytes.

    Args:
        spts: tokens of each member, at least one.
    """
    layers = max(1, shape.layers - 1)
    near = shape.windowed.intersection(range(layers))
    alike = Counter(_content(shape, plan, layer) for layer in range(layers) if layer not in near)
    total = Traffic()
    if near:
        group = GroupShape.of(plan.topology.locations, tp)
        total += window_traffic(shape, group, spts) * len(near)
    for (drops, scores, layer), times in alike.items():
        dropping = layer if drops else None
        total += _layer(shape, plan, tp=tp, spts=spts, dropping=dropping, scores=scores) * times
    return total * (1 / layers)


def levels_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Count exact attention with as many levels as the group's servers allow."""
    places = [
        f"0-{server}-{place}"
        for server, instances in enumerate(group.servers)
        for place in range(instances)
    ]
    plan = CsaPlan(locations=tuple(places), levels=len(Topology.of(places).granularities))
    spts = [len(even_share(tokens, len(places), place)) for place in range(len(places))]
    return csa_traffic(shape, plan, tp=group.tp, spts=spts)


def _content(shape: AttentionShape, plan: CsaPlan, layer: int) -> tuple[bool, bool, int]:
    """Return what a layer's traffic depends on: dropping, scoring, and its first layer with equal
    ratios.

    A layer scores importance for the next one without a window, or for itself.
    """
    group = plan.layer_group(layer)
    drops = _drops(shape, plan, layer)
    same = plan.importance_layer == "same"
    scores = drops if same else _drops(shape, plan, shape.after(layer))
    return drops, scores, group.first if drops else 0


def _drops(shape: AttentionShape, plan: CsaPlan, layer: int) -> bool:
    """Return True if a layer drops."""
    return shape.may_drop(layer) and plan.layer_group(layer).drops


def _layer(
    shape: AttentionShape,
    plan: CsaPlan,
    *,
    tp: int,
    spts: Sequence[int],
    dropping: int | None,
    scores: bool,
) -> Traffic:
    """Count one layer.

    Args:
        dropping: the layer whose ratios hold; None drops nothing.
        scores: the layer scores importance.
    """
    assert not plan.nested, "traffic of nested levels cannot be counted"
    group = GroupShape.of(plan.topology.locations, tp)
    traffic = instance_sums(shape, group, sum(spts))
    same = np.equal.outer(group.instance_servers, group.instance_servers)
    for queries, keys in head_shares(shape.heads, shape.kv_heads, tp):
        peers = _Peers(shape, plan, spts, dropping, queries, keys)
        sent = peers.exchanged()
        if scores:
            sent += peers.importance()
        traffic += Traffic(inside=float(sent[same].sum()), between=float(sent[~same].sum()))
    return traffic


class _Peers:
    """Ranks of equal place in their instances, which share `queries` and `keys`.

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
        """Count both all-to-alls of all levels."""
        members, dim = len(self._spts), self._shape.head_dim
        sent = np.zeros((members, members))
        resident_oph = np.zeros((members, members, len(self._queries)), bool)
        resident_opg = np.zeros((members, members, len(self._keys)), bool)
        for level, needed_oph, needed_opg in self._levels():
            kept_ph, kept_pg = self._kept(level)
            sent += dim * _tokens(needed_oph & ~resident_oph, kept_ph).T
            sent += 2 * dim * _tokens(needed_opg & ~resident_opg, kept_pg).T
            sent += (dim + self._shape.lse) * _tokens(needed_oph, kept_ph)
            resident_oph |= needed_oph
            resident_opg |= needed_opg
        return sent

    def importance(self) -> NDArray[np.float64]:
        """Count what scores the tokens of the next layer, or of this one."""
        if self._plan.importance_window == ALL_QUERIES:
            return self._scored_by_all()
        return self._scored_by_window()

    def _scored_by_all(self) -> NDArray[np.float64]:
        """Count LSEs of kept queries to the owners of their heads, and column sums of keys back."""
        sent = np.zeros((len(self._spts), len(self._spts)))
        for level, needed_oph, needed_opg in self._levels():
            kept_ph, kept_pg = self._kept(level)
            sent += _tokens(needed_oph, kept_ph).T + _tokens(needed_opg, kept_pg)
        return sent * self._shape.lse

    def _scored_by_window(self) -> NDArray[np.float64]:
        """Count last queries to all members before them, and LSEs over their keys among all of
        these."""
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

    def _levels(self) -> Iterator[tuple[int, Mask, Mask]]:
        """Yield (level, queries, keys) that each owner needs of each other part, near levels
        first."""
        for level_mask in level_masks(self._plan.segments(), len(self._queries), len(self._keys)):
            yield level_mask.level, level_mask.queries_oph, level_mask.keys_opg

    def _kept(self, level: int) -> tuple[Counts, Counts]:
        """Return the kept tokens of each part for each query head and each KV head."""
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
        """Return the number of sinks and tail tokens of the prompt in a part."""
        last = sum(self._spts) - self._plan.tail
        return len(range(part.start, min(part.stop, max(self._plan.sinks, part.start)))) + len(
            range(max(part.start, self._plan.sinks, last), part.stop)
        )

    def _parts(self) -> Iterator[range]:
        """Yield the tokens of each member."""
        for stop, tokens in zip(accumulate(self._spts), self._spts, strict=True):
            yield range(stop - tokens, stop)


def _tokens(needed: Mask, counts: Counts) -> NDArray[np.float64]:
    """Return (o, p) tokens from an (o, p, heads) mask and (p, heads) counts."""
    tokens: NDArray[np.float64] = np.einsum("oph,ph->op", needed, counts, dtype=np.float64)
    return tokens
