"""Sparse attention steps for tests: random ones, run on ranks, and by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from dense_csa_reference import DenseCsa
from hypothesis import strategies as st
from rank_world import RankWorld
from torch import Tensor

from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.base.yield_points import YieldPoints
from csps.actors.attention.csa.strategy import Csa
from csps.actors.attention.step_points import ModelShape, step_points
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import StepClock
from csps.protocols.attention.csa import CsaPlan, LayerGroup
from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import Topology
from csps.protocols.gang.messages import DroppedMass
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

SCALE = 0.3
DIM = 8
Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class CsaCase:
    """A step, the heads of its model, and random queries, keys and values of each layer."""

    plan: CsaPlan
    lengths: tuple[int, ...]
    """Lengths of the chunks."""
    bounds: tuple[int, ...]
    heads: int
    kv_heads: int
    layers: int = 4
    """Layers of the model; the last one is not attended to here."""
    dtype: torch.dtype = torch.float64
    starts: tuple[int, ...] = ()
    """Starts of the chunks. Empty: 0 for all."""
    history: tuple[tuple[KvSlice, ...], ...] = ()
    """Slices of each chunk's earlier tokens."""
    last: tuple[bool, ...] = ()
    """True if a chunk is its prompt's end; empty is true for all."""

    @property
    def members(self) -> int:
        return len(self.bounds) - 1

    @property
    def step(self) -> PrefillStep:
        return PrefillStep(
            step_id=1,
            group=tuple(range(self.members)),
            bounds=self.bounds,
            chunks=self.chunks,
            strategy="csa",
            csa=self.plan,
        )

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        count = len(self.lengths)
        starts, history = self.starts or (0,) * count, self.history or ((),) * count
        shapes = zip(self.lengths, starts, history, self.last or (True,) * count, strict=True)
        return tuple(
            PrefillChunk(
                sequence_id=sequence_id, length=length, start=start, history=slices, last=last
            )
            for sequence_id, (length, start, slices, last) in enumerate(shapes)
        )

    def earlier(self, chunk: int) -> list[tuple[Tensor, Tensor]]:
        """Return k and v of the tokens before a chunk, for each attended layer."""
        generator = torch.Generator().manual_seed(chunk)
        shape = (2, self.chunks[chunk].start, self.kv_heads, DIM)
        tensors = (torch.randn(shape, generator=generator) for _ in range(self.layers - 1))
        return [(k.to(self.dtype), v.to(self.dtype)) for k, v in tensors]

    def pool(self, member: int) -> KvPool:
        """Return a member's pool with its history."""
        pool = KvPool(
            layers=self.layers,
            slots=256,
            kv_heads=self.kv_heads,
            head_dim=DIM,
            dtype=self.dtype,
            device="cpu",
        )
        for chunk in self.chunks:
            for resident in (kv_slice for kv_slice in chunk.history if kv_slice.instance == member):
                span = slice(resident.span.start, resident.span.stop)
                pool.slots.allocate(chunk.sequence_id, [resident.span])
                for layer, (k, v) in enumerate(self.earlier(chunk.sequence_id)):
                    pool.write(layer, chunk.sequence_id, resident.span, k[span], v[span])
        return pool

    @property
    def schedule(self) -> DropSchedule:
        return DropSchedule(
            plan=self.plan,
            layers=self.layers,
            kv_heads=range(self.kv_heads),
            total_kv_heads=self.kv_heads,
        )

    def with_plan(self, **fields: object) -> CsaCase:
        """Return the same case with another plan."""
        return replace(self, plan=replace(self.plan, **fields))  # type: ignore[arg-type]

    def qkv(self) -> list[Qkv]:
        """Return q, k and v of all rows, for each attended layer."""
        torch.manual_seed(sum(self.lengths))
        shapes = [(sum(self.lengths), h, DIM) for h in (self.heads, self.kv_heads, self.kv_heads)]
        return [
            (
                torch.randn(shapes[0], dtype=self.dtype),
                torch.randn(shapes[1], dtype=self.dtype),
                torch.randn(shapes[2], dtype=self.dtype),
            )
            for _ in range(self.layers - 1)
        ]


@dataclass(frozen=True)
class LayerResult:
    """One layer of a case."""

    out_thd: Tensor
    """Attention output of all rows."""
    seen_gt: Tensor | None
    """(KV heads, rows) bool: what decode is to see; None for everything."""
    dropped: Mapping[int, Tensor] = field(default_factory=dict)
    """Share (KV heads,) of the attention mass that a layer which drops has dropped, by prompt."""


def on_ranks(
    world: RankWorld,
    case: CsaCase,
    clocks: Mapping[int, StepClock] | None = None,
    part: Callable[[int, int], None] = lambda rank, number: None,
) -> list[Tensor]:
    """Return attention outputs (T, h, d) of each layer, computed by the members."""
    return [layer.out_thd for layer in layers_on_ranks(world, case, clocks, part)]


def layers_on_ranks(
    world: RankWorld,
    case: CsaCase,
    clocks: Mapping[int, StepClock] | None = None,
    part: Callable[[int, int], None] = lambda rank, number: None,
) -> list[LayerResult]:
    """Return the outputs of each layer and what they dropped, computed by the members.

    Args:
        part: called with each point's number that a member, named by its rank, passes.
    """
    qkv = case.qkv()

    masses: list[DroppedMass] = []

    def member(rank: int) -> list[LayerResult]:
        clock = (clocks or {}).get(rank)
        rows = slice(case.bounds[rank], case.bounds[rank + 1])
        shape = ModelShape(
            layers=case.layers,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=DIM,
            vocab=64,
            tp=1,
        )
        points = YieldPoints(step_points(case.step, shape), partial(part, rank))
        group = replace(world.group(case.step, rank, clock), points=points)
        with Csa(group, case.schedule, case.pool(rank), heads=case.heads, scale=SCALE) as csa:
            results = []
            for layer, tensors in enumerate(qkv):
                group.points.begin_layer(layer)
                own = (x_thd[rows].contiguous() for x_thd in tensors)
                results.append(_attend(csa, case, layer, *own))
            masses.extend(group.dropped_mass.reports(0))
            return results

    parts = world.each(case.members, member)
    return [
        replace(_joined(results), dropped=_dropped(masses, layer))
        for layer, results in enumerate(zip(*parts, strict=True))
    ]


def _dropped(masses: Sequence[DroppedMass], layer: int) -> Mapping[int, Tensor]:
    """Return the dropped share of each KV head in a layer, by prompt."""
    sums: dict[int, Tensor] = {}
    for mass in masses:
        if layer in mass.layers:
            both = torch.frombuffer(bytearray(mass.dropped + mass.total), dtype=torch.float32)
            row = both.view(2, len(mass.layers), -1)[:, mass.layers.index(layer)].double()
            sums[mass.sequence_id] = sums.get(mass.sequence_id, torch.zeros_like(row)) + row
    return {prompt: dropped / total for prompt, (dropped, total) in sums.items()}


def _attend(
    csa: Csa, case: CsaCase, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor
) -> LayerResult:
    if not case.schedule.narrows(layer):
        return LayerResult(csa.attend(layer, q_thd, k_thd, v_thd), None)
    seen: list[Tensor] = []
    out_thd = csa.attend(layer, q_thd, k_thd, v_thd, seen.append)
    (seen_gt,) = seen
    return LayerResult(out_thd, seen_gt)


def _joined(parts: Sequence[LayerResult]) -> LayerResult:
    """Return members, or prompts, one after the other."""
    seen = [part.seen_gt for part in parts if part.seen_gt is not None]
    assert len(seen) in (0, len(parts)), "the members do not agree on what decode is to see"
    out_thd = torch.cat([part.out_thd for part in parts])
    dropped = {prompt: share for part in parts for prompt, share in part.dropped.items()}
    return LayerResult(out_thd, torch.cat(seen, dim=1) if seen else None, dropped)


def by_brute_force(case: CsaCase) -> list[Tensor]:
    """Return the same from the definition, prompt by prompt."""
    return [layer.out_thd for layer in layers_by_brute_force(case)]


def layers_by_brute_force(case: CsaCase) -> list[LayerResult]:
    """Return the same from the definition, prompt by prompt."""
    prompts = [_prompt(case, chunk, rows) for chunk, rows in enumerate(prompt_rows(case.lengths))]
    return [_joined(layer) for layer in zip(*prompts, strict=True)]


def _prompt(case: CsaCase, chunk: int, rows: slice) -> list[LayerResult]:
    layers, importance, earlier = [], None, case.earlier(chunk)
    for layer, tensors in enumerate(case.qkv()):
        q_thd, k_thd, v_thd = (x_thd[rows] for x_thd in tensors)
        dense = dense_csa(case, layer, chunk, rows)
        window = case.plan.importance_window
        if case.plan.importance_layer == "same":
            importance = dense.judged_by_window(q_thd, k_thd, window, SCALE)
        weights = dense.counts(importance)
        _, lse_ht = dense.attend(q_thd, k_thd, v_thd, weights, SCALE)
        out_thd = dense.attend_with_history(q_thd, k_thd, v_thd, weights, SCALE, earlier[layer])
        dropped = {}
        if case.schedule.drops(layer) and len(set(dense.owners)) > 1:
            assert importance is not None
            dropped = {chunk: dense.dropped(importance)}
        layers.append(LayerResult(out_thd, _seen(dense, importance), dropped))
        if window:
            importance = dense.judged_by_window(q_thd, k_thd, window, SCALE)
        else:
            importance = dense.judged_by_all(q_thd, k_thd, lse_ht, weights, SCALE)
    return layers


def _seen(dense: DenseCsa, importance_gt: Tensor | None) -> Tensor:
    """Return the tokens that decode attends to if it sees kept tokens only: the last SPT, and the
    level 2 selection.
    """
    seen_gt = torch.zeros(dense.kv_heads, dense.tokens, dtype=torch.bool)
    level = min(2, len(dense.segments))
    for head in range(dense.kv_heads):
        importance_t = None if importance_gt is None else importance_gt[head]
        last = {t for t, owner in enumerate(dense.owners) if owner == dense.owners[-1]}
        seen_gt[head, sorted(last | dense.kept(head, level, importance_t))] = True
    return seen_gt


def dense_csa(case: CsaCase, layer: int, chunk: int, rows: slice) -> DenseCsa:
    """Compute the definition for one chunk of the case."""
    owners = [m for m, (a, b) in enumerate(pairwise(case.bounds)) for _ in range(a, b)][rows]
    whole = len(set(owners)) == 1
    everyone = range(case.members)
    return DenseCsa(
        owners=owners,
        # A prompt inside one member is exact.
        segments=[[everyone]] if whole else case.plan.segments(),
        ratios=case.schedule.head_ratios(layer),
        coverages=case.schedule.head_coverages(layer),
        sinks=case.plan.sinks,
        tail=case.plan.tail,
        nested=case.plan.nested,
        drop_queries=case.plan.drop_queries,
        start=case.chunks[chunk].start,
        last=case.chunks[chunk].last,
    )


@st.composite
def locations(draw: st.DrawFn, members: int) -> tuple[str, ...]:
    """Return the locations of so many members, in order."""
    places = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2))
    chosen = draw(st.sets(places, min_size=members, max_size=members))
    return tuple("-".join(map(str, place)) for place in sorted(chosen))


@st.composite
def ratios(draw: st.DrawFn, levels: int, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Return the ratios of levels 2 and up, which never fall for a head."""
    heads = draw(st.sampled_from([1, kv_heads]))
    choices = st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.95])
    by_head = [sorted(draw(choices) for _ in range(levels - 1)) for _ in range(heads)]
    return tuple(zip(*by_head, strict=True))


@st.composite
def coverages(draw: st.DrawFn, levels: int, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Return the coverages of levels 2 and up, which never rise for a head."""
    heads = draw(st.sampled_from([1, kv_heads]))
    choices = st.sampled_from([1.0, 0.99, 0.8, 0.5, 0.1])
    by_head = [
        sorted((draw(choices) for _ in range(levels - 1)), reverse=True) for _ in range(heads)
    ]
    return tuple(zip(*by_head, strict=True))


@st.composite
def scattered(draw: st.DrawFn, length: int, instances: int) -> tuple[KvSlice, ...]:
    """Draw positions [0, length) cut anywhere, lying anywhere, named in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    bounds = [0, *cuts, length] if length else [0]
    slices = [
        KvSlice(draw(st.integers(0, instances - 1)), start, stop)
        for start, stop in pairwise(bounds)
    ]
    return tuple(draw(st.permutations(slices)))


@st.composite
def chunks(draw: st.DrawFn, *, dropping: bool = True) -> CsaCase:
    """Draw steps of chunks whose history lies anywhere in the group."""
    case = draw(cases(dropping=dropping, most_members=4))
    starts = tuple(draw(st.integers(0, 12)) for _ in case.lengths)
    return replace(
        case,
        starts=starts,
        history=tuple(draw(scattered(start, case.members)) for start in starts),
        last=tuple(draw(st.booleans()) for _ in starts),
    )


@st.composite
def cases(
    draw: st.DrawFn, *, dropping: bool = True, covering: bool = True, most_members: int = 8
) -> CsaCase:
    """Draw small steps of any shape, of whole prompts.

    Args:
        covering: may have coverages instead of drop ratios.
    """
    members = draw(st.integers(1, most_members))
    where = draw(locations(members))
    levels = draw(st.integers(1, len(Topology.of(where).granularities)))
    kv_heads = draw(st.integers(1, 3))
    lengths = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    cuts = st.integers(0, sum(lengths))
    inner = sorted(draw(st.lists(cuts, min_size=members - 1, max_size=members - 1)))
    bounds = (0, *inner, sum(lengths))
    longest = max(b - a for a, b in pairwise(bounds))
    micro = tuple(draw(st.integers(1, min(4, longest))) for _ in range(levels))
    covers = dropping and covering and draw(st.booleans())
    group = LayerGroup(
        first=0,
        stop=4,
        drop_ratios=draw(ratios(levels, kv_heads)) if dropping and not covers else (),
        coverages=draw(coverages(levels, kv_heads)) if covers else (),
        micro_partitions=micro,
    )
    nested = dropping and draw(st.booleans())
    # Nested levels count a pair several times, and importance is undefined for them.
    window = draw(st.sampled_from([1, 5] if nested else [0, 1, 5]))
    plan = CsaPlan(
        locations=where,
        levels=levels,
        layer_groups=(group,),
        nested=nested,
        drop_queries=draw(st.booleans()),
        importance_window=window,
        importance_layer=draw(st.sampled_from(["previous", "same"])) if window else "previous",
        sinks=draw(st.integers(0, 2)),
        tail=draw(st.integers(0, 3)),
        pipelined=draw(st.booleans()),
    )
    heads = kv_heads * draw(st.integers(1, 3))
    return CsaCase(plan=plan, lengths=lengths, bounds=bounds, heads=heads, kv_heads=kv_heads)


def prompt_rows(lengths: tuple[int, ...]) -> Iterator[slice]:
    """Yield rows of each prompt in the batch."""
    end = 0
    for length in lengths:
        yield slice(end, end + length)
        end += length
