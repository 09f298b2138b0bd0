"""Yield points of a step: where it may pause, numbered the same at all members.

The exchanges of a layer divide it into *phases*. In one phase all members have begun the same
exchanges. A member passes a point of the phase after each block that it computes, and the last
point of the phase before it begins the next exchange. So if all members pause at one point, either
all or none have begun an exchange, and no member waits for a paused one. Data that a member passes
on for others is the exception; `YieldPoints.before_pause` sends it.

The numbers follow from the step alone, so any process can compute them before the step begins. The
number of blocks in a phase is an estimate for the member with the most. A member with fewer blocks
skips numbers; a member with more passes its last blocks under one number.
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
    resident_tokens,
    rotating_history,
    with_history,
)
from csps.actors.comm.layout import computed_by
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.placement import even_share
from csps.protocols.core.topology import Segments
from csps.protocols.gang.step_messages import PrefillStep

SP_TP = frozenset({"sp_tp", "sp_tp_flat"})
"""Strategies in which members have some heads of all rows."""
OF_HEADS = SP_TP | {"gathered_weights"}
"""Strategies in which windowed layers exchange what the others do; see `near_keys`."""

MLP_ROWS = 2048
"""Rows of one block of a layer's MLP."""
LOGITS_BYTES = 32 * 2**20
"""Limit of the logits of one block of rows, where the log-probabilities of a prompt are wanted."""


def logits_rows(vocab: int) -> int:
    """Return the rows of a block whose logits are computed together."""
    return max(1, LOGITS_BYTES // (4 * vocab))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Properties of a model on which the points of a step depend."""

    layers: int
    heads: int
    """Query heads of the whole model."""
    kv_heads: int
    head_dim: int
    vocab: int
    tp: int
    whole: bool = False
    """True if the device is given whole layers, without blocks."""
    window: int | None = None
    windowed: frozenset[int] = frozenset()
    """Layers with the window."""

    @classmethod
    def of(cls, spec: ModelSpec, *, tp: int, on_cuda: bool) -> ModelShape:
        """Return the shape of a model on instances of `tp` ranks."""
        return cls(
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            tp=tp,
            whole=on_cuda,
            window=spec.window,
            windowed=spec.near_layers,
        )


def step_points(step: PrefillStep, shape: ModelShape) -> StepPoints:
    """Return the points of a step; every process computes the same."""
    counts = _Counts(step, shape)
    begin, mlp = (1,), (counts.mlp,)
    middle = (begin + counts.attention(index) + mlp for index in range(shape.layers - 1))
    last: tuple[int, ...] = begin
    if step.prompt_logprobs:
        last = begin + counts.attention(shape.layers - 1) + (counts.mlp + counts.logits,)
    return StepPoints((*middle, last))


class _Counts:
    """Numbers of points in the phases of one step's layers."""

    def __init__(self, step: PrefillStep, shape: ModelShape) -> None:
        self._step, self._shape = step, shape
        self._rank_heads = -(-shape.heads // shape.tp)
        self._rows = step.bounds[-1]
        self._member_rows = [stop - start for start, stop in pairwise(step.bounds)]
        self._by_cuts: dict[tuple[int, ...], Phases] = {}
        """Phases by numbers of micro-partitions; layers with equal numbers have equal phases."""

    @cached_property
    def mlp(self) -> int:
        """Number of blocks of the MLP."""
        # Under tensor parallelism one block: the ranks of an instance sum their parts together.
        if self._shape.tp > 1 or self._shape.whole:
            return 1
        return max(1, *(-(-rows // MLP_ROWS) for rows in self._member_rows))

    @cached_property
    def logits(self) -> int:
        """Number of blocks of rows whose logits are computed."""
        return -(-max(self._member_rows) // logits_rows(self._shape.vocab))

    def attention(self, layer: int) -> Phases:
        """Return the phases that `Strategy.attend_layer` closes."""
        if layer in self._shape.windowed and self._step.strategy not in OF_HEADS:
            return self._near
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
                assert self._step.csa is not None, "check_step let a step pass without a plan"
                return self._csa(self._step.csa, layer)
            case _:
                return self._sp_tp(self._step.csa, layer)

    @cached_property
    def _near(self) -> Phases:
        """Return the phase of attention of own rows to near keys."""
        window = self._shape.window
        assert window is not None, "layers with a window, but no window"
        blocks = (
            sum(
                self._blocks(part.span.length, self._rank_heads, window)
                for part in computed_by(self._step, member)
            )
            for member in range(len(self._step.group))
        )
        return (max(1, *blocks),)

    def _over_heads(self, heads: int) -> Phases:
        """Return the phases of attention of own heads over all rows: history, then the chunk."""
        if () in self._by_cuts:
            return self._by_cuts[()]
        own_blocks = sum(
            self._blocks(chunk.length, heads, chunk.length) for chunk in self._step.chunks
        )
        asked = [self._rows] * (self._rank_heads // heads if heads else 1)
        self._by_cuts[()] = (*self._history(asked, heads), max(1, own_blocks))
        return self._by_cuts[()]

    def _ring(self) -> Phases:
        """Return the phases of a ring: history that is asked for, then one phase per round.

        The member with the most blocks counts in each round.
        """
        if () in self._by_cuts:
            return self._by_cuts[()]
        asked: Set[int] = with_history(self._step)
        rotating = asked
        if self._step.strategy == "ring_kv":
            kv_heads = max(1, self._shape.kv_heads // self._shape.tp)
            rotating = rotating_history(
                self._step, heads=self._rank_heads, kv_heads=kv_heads, dim=self._shape.head_dim
            )
        plan = RingPlan(self._step, rotating)
        rounds = (
            max(self._ring_blocks(plan, k, (k - hop) % plan.size) for k in range(plan.size))
            for hop in range(plan.size)
        )
        history = self._history(self._member_rows, self._rank_heads, asked - rotating)
        self._by_cuts[()] = (*history, *(max(1, blocks) for blocks in rounds))
        return self._by_cuts[()]

    def _ring_blocks(self, plan: RingPlan, member: int, source: int) -> int:
        """Return the blocks of a member with the shard of another member (keys or queries)."""
        # An estimate: a chunk's queries that see any of the keys count as if they saw all.
        pair = (member, source) if self._step.strategy == "ring_kv" else (source, member)
        return sum(self._blocks(rows, self._rank_heads, keys) for rows, keys in plan.sizes(*pair))

    def _csa(self, plan: CsaPlan, layer: int) -> Phases:
        """Return one phase per micro-partition of the queries of each exchanged level.

        Own rows are computed whenever a member would wait, and the rest at the end; without
        overlap they are computed before the exchanges.
        """
        group = plan.layer_group(layer)
        cuts = tuple(group.micro(v) if plan.pipelined else 1 for v in range(1, plan.levels + 1))
        if cuts in self._by_cuts:
            return self._by_cuts[cuts]
        longest = max(self._member_rows)
        own = max(cuts[0], self._blocks(longest, self._rank_heads, longest))
        first = 2 if LevelGeometry(parts=(), levels=plan.segments()).local_first_level else 1
        phases = [
            blocks
            for segments, micro in list(zip(plan.segments(), cuts, strict=True))[first - 1 :]
            for blocks in self._level(segments, micro)
        ]
        if plan.pipelined:  # an equal part of own rows in each phase, and all of them at the end
            beside = 1 + own // (len(phases) + 1)
            ends = [*(blocks + beside for blocks in phases), own]
        else:
            ends = [own, *phases]
        history = self._history(self._member_rows, self._rank_heads)
        self._by_cuts[cuts] = (*history, *ends)
        return self._by_cuts[cuts]

    def _level(self, segments: Segments, micro: int) -> Iterator[int]:
        """Yield the blocks of each micro-partition of a level's queries.

        The first one attends to the micro-partitions of keys one by one, later ones to all keys.
        """
        bounds = self._step.bounds
        rows = max(bounds[members.stop] - bounds[members.start] for members in segments)
        heads = self._head_share(self._rank_heads, min(map(len, segments)))
        queries = -(-rows // micro)
        yield micro * max(1, self._blocks(queries, heads, queries))
        for _ in range(micro - 1):
            yield max(1, self._blocks(queries, heads, rows))

    def _sp_tp(self, plan: CsaPlan | None, layer: int) -> Phases:
        """Return one phase before each part of the rows is reduced, and one after the last.

        If pipelined, about half of the attention precedes the first part.
        """
        pipelined = plan is not None and plan.pipelined
        cuts = plan.layer_group(layer).micro(1) if plan is not None and pipelined else 1
        if (cuts,) in self._by_cuts:
            return self._by_cuts[cuts,]
        lengths = [length for rows in self._member_rows for length in self._row_parts(rows, cuts)]
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
        """Yield how many rows of an instance each rank and micro-partition has, without zeros."""
        for tp_rank in range(self._shape.tp):
            rank_rows = len(even_share(rows, self._shape.tp, tp_rank))
            yield from filter(None, (len(even_share(rank_rows, cuts, cut)) for cut in range(cuts)))

    def _history(
        self, asked_rows: Sequence[int], heads: int, sequence_ids: Set[int] | None = None
    ) -> Phases:
        """Return the phase of the holder with the most to answer; none without history.

        Args:
            asked_rows: number of rows with which each asker asks.
            sequence_ids: sequences whose history is asked for; None for all.
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
        """Return the number of heads of the member with the most."""
        return -(-heads // members)
