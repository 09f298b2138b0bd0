"""Where a step may stand still: points of its exchange program, numbered alike at all members.

A layer is cut into *phases* by the exchanges that are begun in it: in a phase all members have
begun the same ones. A member passes points of the phase while it computes, as many as it has
blocks, and the phase's last number before it begins the next exchange. So whatever number all are
told to stand still at, either all have begun an exchange or none, and nobody waits for one that
stands still. (What is passed on for others is the exception: see `YieldPoints.settle`.)

Numbers are worked out from the step alone, before it begins and without being its member. How many
blocks a phase has is estimated, for the member with the most; a member with fewer skips numbers,
one with more passes the last ones without a number of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from csps.actors.attention.base.levels import LevelGeometry
from csps.actors.attention.base.yield_points import Phases, StepPoints, block_count
from csps.actors.attention.ring.ring_plan import (
    RingPlan,
    going_round,
    resident_tokens,
    with_history,
)
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.placement import even_share
from csps.protocols.core.topology import Segments
from csps.protocols.gang.step_messages import PrefillStep

MLP_ROWS = 2048
"""Of one block of a layer's MLP."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a model the numbers of a step depend on."""

    layers: int
    heads: int
    """Query heads of the whole model."""
    kv_heads: int
    head_dim: int
    tp: int
    whole: bool = False
    """Layers are handed to the device as a whole: no block is cut."""

    @classmethod
    def of(cls, spec: ModelSpec, *, tp: int, on_cuda: bool) -> ModelShape:
        """Of a model on instances of `tp` ranks."""
        return cls(
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            tp=tp,
            whole=on_cuda,
        )


def step_points(step: PrefillStep, shape: ModelShape) -> StepPoints:
    """The numbers of a step; alike wherever they are worked out."""
    counts = _Counts(step, shape)
    begin, mlp = (1,), (counts.mlp,)
    middle = (begin + counts.attention(index) + mlp for index in range(shape.layers - 1))
    return StepPoints((*middle, begin))


class _Counts:
    """Points in the phases of one step's layers."""

    def __init__(self, step: PrefillStep, shape: ModelShape) -> None:
        self._step, self._shape = step, shape
        self._rank_heads = -(-shape.heads // shape.tp)
        self._rows = step.bounds[-1]
        self._shares = [stop - start for start, stop in pairwise(step.bounds)]
        self._by_cuts: dict[tuple[int, ...], Phases] = {}
        """Layers of as many micro-partitions have equal phases."""

    @cached_property
    def mlp(self) -> int:
        """An instance's ranks sum their parts at the same time, so there it is one block."""
        if self._shape.tp > 1 or self._shape.whole:
            return 1
        return max(1, *(-(-rows // MLP_ROWS) for rows in self._shares))

    def attention(self, layer: int) -> Phases:
        """What `Strategy.attend_layer` closes."""
        match self._step.strategy:
            case "ulysses":
                heads = self._head_share(self._rank_heads, len(self._step.group))
                return self._over_heads(heads)
            case "gathered_weights":
                members = len(self._step.group) * self._shape.tp
                return self._over_heads(self._head_share(self._shape.heads, members))
            case "ring_kv" | "ring_q":
                return self._ring()
            case "levels" | "csa":
                assert self._step.csa is not None, "the job has been checked"
                return self._csa(self._step.csa, layer)
            case _:
                return self._sp_tp(self._step.csa, layer)

    def _over_heads(self, heads: int) -> Phases:
        """All rows of own heads: history if there is any, and the chunk."""
        if () in self._by_cuts:
            return self._by_cuts[()]
        own_blocks = sum(
            self._blocks(chunk.length, heads, chunk.length) for chunk in self._step.chunks
        )
        asked = [self._rows] * (self._rank_heads // heads if heads else 1)
        self._by_cuts[()] = (*self._history(asked, heads), max(1, own_blocks))
        return self._by_cuts[()]

    def _ring(self) -> Phases:
        """Rounds, each of the member with the most blocks in it; before them history that is asked
        for."""
        if () in self._by_cuts:
            return self._by_cuts[()]
        asked: Set[int] = with_history(self._step)
        going = asked
        if self._step.strategy == "ring_kv":
            kv_heads = max(1, self._shape.kv_heads // self._shape.tp)
            going = going_round(
                self._step, heads=self._rank_heads, kv_heads=kv_heads, dim=self._shape.head_dim
            )
        plan = RingPlan(self._step, going)
        rounds = (
            max(self._ring_blocks(plan, k, (k - hop) % plan.size) for k in range(plan.size))
            for hop in range(plan.size)
        )
        history = self._history(self._shares, self._rank_heads, asked - going)
        self._by_cuts[()] = (*history, *(max(1, blocks) for blocks in rounds))
        return self._by_cuts[()]

    def _ring_blocks(self, plan: RingPlan, member: int, source: int) -> int:
        """Of a member with a share that goes round: its queries and the share's keys, or the other
        way round; as if all queries of a piece that see any of the keys saw all."""
        pair = (member, source) if self._step.strategy == "ring_kv" else (source, member)
        return sum(self._blocks(rows, self._rank_heads, keys) for rows, keys in plan.sizes(*pair))

    def _csa(self, plan: CsaPlan, layer: int) -> Phases:
        """One for every micro-partition of the queries of an exchanged level. Own rows are computed
        wherever a member would wait, and at the latest at the end; where exchanges are not beside
        computing, before them."""
        group = plan.layer_group(layer)
        cuts = tuple(group.micro(v) if plan.pipelined else 1 for v in range(1, plan.levels + 1))
        if cuts in self._by_cuts:
            return self._by_cuts[cuts]
        longest = max(self._shares)
        own = max(cuts[0], self._blocks(longest, self._rank_heads, longest))
        first = 2 if LevelGeometry(parts=(), levels=plan.segments()).local_first_level else 1
        phases = [
            blocks
            for segments, micro in list(zip(plan.segments(), cuts, strict=True))[first - 1 :]
            for blocks in self._level(segments, micro)
        ]
        if plan.pipelined:  # as much of the own rows in each phase, and all that may be left
            beside = 1 + own // (len(phases) + 1)
            ends = [*(blocks + beside for blocks in phases), own]
        else:
            ends = [own, *phases]
        history = self._history(self._shares, self._rank_heads)
        self._by_cuts[cuts] = (*history, *ends)
        return self._by_cuts[cuts]

    def _level(self, segments: Segments, micro: int) -> Iterator[int]:
        """Of each micro-partition of a level's queries: the first meets the keys one
        micro-partition after the other, those that follow all of them at once."""
        bounds = self._step.bounds
        rows = max(bounds[members.stop] - bounds[members.start] for members in segments)
        heads = self._head_share(self._rank_heads, min(map(len, segments)))
        queries = -(-rows // micro)
        yield micro * max(1, self._blocks(queries, heads, queries))
        for _ in range(micro - 1):
            yield max(1, self._blocks(queries, heads, rows))

    def _sp_tp(self, plan: CsaPlan | None, layer: int) -> Phases:
        """One before each part of the rows is handed on, and one after the last. Pipelined, about
        half of the attention comes before the first."""
        pipelined = plan is not None and plan.pipelined
        cuts = plan.layer_group(layer).micro(1) if plan is not None and pipelined else 1
        if (cuts,) in self._by_cuts:
            return self._by_cuts[cuts,]
        lengths = [length for rows in self._shares for length in self._row_parts(rows, cuts)]
        heads = self._head_share(self._rank_heads, len(self._step.group))
        if pipelined:
            blocks = sum(max(2, self._blocks(length, heads, self._rows)) for length in lengths)
            projected = len(lengths)
        else:
            blocks, projected = self._blocks(self._rows, heads, self._rows), 1
        later = 1 + (-(-blocks // len(lengths)) if pipelined else 0)
        early = (blocks + projected, *[later] * len(lengths))
        asked = [self._rows] * len(self._step.group)
        history = self._history(asked, heads)
        phases = (projected + blocks, *history, *early) if history else early
        self._by_cuts[cuts,] = phases
        return phases

    def _row_parts(self, rows: int, cuts: int) -> Iterator[int]:
        """The parts of an instance's rows, over its ranks and micro-partitions."""
        for tp_rank in range(self._shape.tp):
            share = len(even_share(rows, self._shape.tp, tp_rank))
            yield from filter(None, (len(even_share(share, cuts, cut)) for cut in range(cuts)))

    def _history(
        self, asked_rows: Sequence[int], heads: int, sequence_ids: Set[int] | None = None
    ) -> Phases:
        """Of the holder with the most to answer; none if no piece has history.

        Args:
            asked_rows: of each asker, how many rows it asks with.
            rids: sequences whose history is asked for; None for all.
        """
        resident = [
            sum(
                self._blocks(min(rows, chunk.length), heads, tokens)
                for rows in asked_rows
                for chunk in self._step.chunks
                if (sequence_ids is None or chunk.sequence_id in sequence_ids)
                and (tokens := resident_tokens(chunk, instance))
            )
            for instance in self._step.group
        ]
        return (max(resident),) if any(resident) else ()

    def _blocks(self, rows: int, heads: int, keys: int) -> int:
        if not rows or not heads:
            return 0
        return 1 if self._shape.whole else block_count(rows, heads, self._shape.head_dim, keys)

    @staticmethod
    def _head_share(heads: int, members: int) -> int:
        """Of the member with the most."""
        return -(-heads // members)
