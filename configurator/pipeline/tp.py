"""Simulation of SP-TP's pipeline, as this engine runs it (CSPS §3.2.5, Fig. 9b).

Rows are gathered along trees that enter each server once, near members first. A rank projects and
attends with what has arrived, for its own heads only. It starts the reduction of a micro-partition,
in ascending order of rows, as soon as its last keys have arrived. The schedule is the ranks' own
(`csps.protocols.attention.sp_tp`). Sums return along the same trees.

In the series of Eq. 7, T_1st_a2a is the all-gather and T_2nd_a2a the reduce-scatter. Drop ratios
shorten only T_attn: all queries are computed and all rows sent.

Shape suffixes: c configurations, r ranks, j owners of keys, g KV heads, s senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from csps.configurator.model.attention_shape import head_shares
from csps.configurator.pipeline.cases import (
    LayerCases,
    SimulatedGroup,
    even_lengths,
    pairs_in_window,
)
from csps.configurator.pipeline.program import Mask, Numbers, Op, PipelineOutcome, Seconds
from csps.configurator.pipeline.script import Script
from csps.protocols.attention.sp_tp import (
    Attend,
    MicroPartition,
    StartReduce,
    Wait,
    near_to_far,
    own_before_far,
    relay_parents,
)
from csps.protocols.core.topology import Topology


@dataclass(frozen=True)
class Rows:
    """A micro-partition of an owner's rows."""

    owner: int
    micro: int


def simulate_tp(group: SimulatedGroup, cases: LayerCases, spts: Sequence[int]) -> PipelineOutcome:
    """Simulate one layer of each configuration.

    Args:
        spts: tokens of each member.
    """
    return _TpLayer(group, cases, spts).run()


class _TpLayer:
    def __init__(self, group: SimulatedGroup, cases: LayerCases, spts: Sequence[int]) -> None:
        assert len(spts) == group.members, f"{len(spts)} SPTs for {group.members} members"
        assert (cases.window_c > 0).all(), "scoring by all queries cannot be simulated"
        assert cases.same_c.all() or not cases.same_c.any(), (
            "configurations that share a program must agree on importance_layer"
        )
        micro_cv = cases.micro_cv if cases.pipelined else np.ones_like(cases.micro_cv)
        self._group, self._cases, self._spts = group, cases, np.array(spts)
        self._micro_c = micro_cv[:, 0]
        self._micros = int(self._micro_c.max())
        self._kept_cpgv = cases.kept(spts)
        self._segments = group.segments(cases.levels)
        topology = Topology.of(group.locations)
        self._servers = [place.server_id for place in topology.locations]
        self._shares = list(head_shares(group.heads, group.kv_heads, group.members))
        self._takers = [rank for rank, (queries, _) in enumerate(self._shares) if queries]
        self._parents = [
            relay_parents(owner, self._servers, self._takers) for owner in range(group.members)
        ]
        no_filler_crf = np.zeros((len(cases), group.members, 0))
        self._script = Script(group.wiring, no_filler_crf, group.times.exchange)
        self._brings: dict[tuple[Rows, int], int] = {}
        """Exchange that brings rows to a rank."""
        self._sums: dict[Rows, tuple[int, int]] = {}
        """Exchanges of the rows' outputs: to the relays, and to the owner."""

    def run(self) -> PipelineOutcome:
        gathered = self._gather()
        self._reduce()
        for rank in range(self._group.members):
            for exchange in gathered:
                self._script.do_on(rank, Op.POST, exchange)
            if not self._cases.pipelined:
                for exchange in gathered:
                    self._script.do_on(rank, Op.BLOCK, exchange)
            self._script.compute_on(rank, self._own_keys(rank))
            self._script.compute_on(rank, self._dropping())
            self._work(rank)
            self._finish(rank)
        return self._script.run(*self._group.machine())

    # --- exchanges ------------------------------------------------------------------------------

    def _parts(self) -> list[Rows]:
        """Return all micro-partitions: the first ones of all owners before any second one."""
        return [
            Rows(owner, micro)
            for micro in range(self._micros)
            for owner in range(self._group.members)
        ]

    def _gather(self) -> list[int]:
        """Add the exchanges of the all-gather; return their numbers.

        Those inside the owners' servers come first, then those to other servers and on from there.
        """
        numbers = []
        for rows in self._parts():
            near = [r for r in self._parents[rows.owner] if self._near(rows.owner, r)]
            numbers.append(self._spread(rows, [(rows.owner, r) for r in near]))
        for rows in self._parts():
            parents = self._parents[rows.owner]
            far = [(s, r) for r, s in parents.items() if s == rows.owner and not self._near(s, r)]
            behind = [(s, r) for r, s in parents.items() if s != rows.owner]
            first = self._spread(rows, far)
            numbers += [first, self._spread(rows, behind, after=first)]
        return numbers

    def _spread(self, rows: Rows, pairs: Sequence[tuple[int, int]], after: int = -1) -> int:
        number = self._script.exchange(*self._message(rows, pairs), after=after)
        for _, receiver in pairs:
            self._brings[rows, receiver] = number
        return number

    def _reduce(self) -> None:
        """Add the exchanges of the reduce-scatter, in ascending order of rows."""
        for rows in sorted(self._parts(), key=lambda rows: (rows.owner, rows.micro)):
            parents = self._parents[rows.owner].items()
            to_relays = [(member, relay) for member, relay in parents if relay != rows.owner]
            to_owner = [(member, relay) for member, relay in parents if relay == rows.owner]
            first = self._script.exchange(*self._message(rows, to_relays))
            second = self._script.exchange(*self._message(rows, to_owner), after=first)
            self._sums[rows] = first, second

    def _message(self, rows: Rows, pairs: Sequence[tuple[int, int]]) -> tuple[Seconds, Mask]:
        members = self._group.members
        pairs_sr = np.zeros((members, members), np.bool_)
        for sender, receiver in pairs:
            pairs_sr[sender, receiver] = True
        row = self._group.shape.hidden * self._group.itemsize
        bytes_c = (self._rows(rows) * row).astype(float)
        return bytes_c[:, None, None] * pairs_sr, pairs_sr

    def _near(self, one: int, other: int) -> bool:
        return self._servers[one] == self._servers[other]

    # --- the program of a rank ------------------------------------------------------------------

    def _work(self, rank: int) -> None:
        if rank not in self._takers:
            self._only_collect(rank)
            return
        same = bool(self._cases.same_c.any())
        in_order = own_before_far if same else near_to_far
        reducing, scored = [], not same
        for step in in_order(self._unit_parts(), self._distances(rank)):
            match step:
                case Wait(part):
                    if (number := self._brings.get((_rows(part), rank))) is not None:
                        self._script.do_on(rank, Op.WAIT, number)
                    self._script.compute_on(rank, self._projection(rank, _rows(part)))
                case Attend((first, _), keys):
                    rows, owners = self._rows_of(first), self._owners(keys)
                    if not scored and owners != (rows.owner,):
                        self._script.compute_on(rank, self._score(rank, self._cases.same_c))
                        scored = True
                    self._script.compute_on(rank, self._attention(rank, rows, owners))
                case StartReduce(part):
                    self._script.compute_on(rank, self._output(rank, _rows(part)))
                    if self._cases.pipelined:
                        self._begin_sums(rank, _rows(part))
                    else:
                        reducing.append(_rows(part))
        for rows in reducing:
            self._begin_sums(rank, rows)
        self._script.compute_on(rank, self._score(rank, self._cases.scores_c))

    def _unit_parts(self) -> list[MicroPartition]:
        """Return all micro-partitions with one row each, to obtain the order of the schedule."""
        return [
            MicroPartition(owner=at // self._micros, start=at, stop=at + 1, index=at % self._micros)
            for at in range(self._group.members * self._micros)
        ]

    def _rows_of(self, number: int) -> Rows:
        return Rows(*divmod(number, self._micros))

    def _owners(self, numbers: tuple[int, int]) -> tuple[int, ...]:
        """Return the owners of adjacent micro-partitions."""
        first, stop = numbers
        return tuple(range(first // self._micros, (stop - 1) // self._micros + 1))

    def _only_collect(self, rank: int) -> None:
        for micro in range(self._micros):
            self._begin_sums(rank, Rows(rank, micro))

    def _begin_sums(self, rank: int, rows: Rows) -> None:
        for number in self._sums[rows]:
            self._script.do_on(rank, Op.POST, number)

    def _finish(self, rank: int) -> None:
        wait = Op.WAIT if self._cases.pipelined else Op.BLOCK
        own = [Rows(rank, micro) for micro in range(self._micros)]
        for rows in own if self._cases.pipelined else self._sums:
            for number in self._sums[rows]:
                self._script.do_on(rank, wait, number)

    def _distances(self, rank: int) -> list[int]:
        """Return the distance of each owner: 0 itself, 1 same server, 2 same rack, 3 beyond."""
        rack, _ = self._servers[rank]
        return [
            0 if owner == rank else 3 - (server[0] == rack) - (server == self._servers[rank])
            for owner, server in enumerate(self._servers)
        ]

    # --- durations: each method returns (c,) seconds --------------------------------------------

    def _rows(self, rows: Rows) -> Numbers:
        return even_lengths(self._spts[rows.owner], self._micro_c, rows.micro)

    def _own_keys(self, rank: int) -> Seconds:
        """Return the time of keys and values of own rows, all heads, for the pool."""
        shape = self._group.shape
        share = 2 * shape.kv_width / (shape.width + 2 * shape.kv_width)
        tokens_c = np.full(len(self._cases), float(self._spts[rank]))
        return self._group.times.qkv.seconds(tokens_c) * share

    def _dropping(self) -> Seconds:
        """Return the extra time of a layer that drops."""
        seconds_c: Seconds = np.where(self._cases.drops_c, self._group.times.step.dropping, 0.0)
        return seconds_c

    def _projection(self, rank: int, rows: Rows) -> Seconds:
        return self._group.times.qkv.seconds(self._rows(rows).astype(float)) * self._share(rank)

    def _output(self, rank: int, rows: Rows) -> Seconds:
        return self._group.times.linear.seconds(self._rows(rows).astype(float)) * self._share(rank)

    def _share(self, rank: int) -> float:
        return len(self._shares[rank][0]) / self._group.heads

    def _attention(self, rank: int, rows: Rows, owners: Sequence[int]) -> Seconds:
        queries, keys = self._shares[rank]
        rows_c = self._rows(rows)
        per_kv_head = self._group.heads // self._group.kv_heads
        pairs_c = np.zeros(len(self._cases), np.int64)
        for head in keys:
            served = len(
                range(
                    max(queries.start, head * per_kv_head),
                    min(queries.stop, (head + 1) * per_kv_head),
                )
            )
            for owner in owners:
                pairs_c += served * self._seen(rows, rows_c, owner, head)
        dropping = self._cases.drops_c
        calls_c = np.where(rows_c > 0, np.where(dropping, len(owners), 1), 0)
        times, heads_rows_c = self._group.times, (rows_c * len(queries)).astype(float)
        attended_c = times.attention.seconds(
            calls_c.astype(float), heads_rows_c, pairs_c.astype(float)
        )
        merged_c: Seconds = calls_c * times.merge.seconds(heads_rows_c)
        return attended_c + merged_c

    def _seen(self, rows: Rows, rows_c: Numbers, owner: int, head: int) -> Numbers:
        """Return the pairs of rows with an owner's keys of one KV head."""
        begin_c = rows.micro * self._spts[rows.owner] // self._micro_c
        end_c = begin_c + rows_c
        if (window := self._cases.seen) is not None:
            starts = np.cumsum(self._spts) - self._spts
            first_c = starts[rows.owner] - starts[owner] + begin_c
            return pairs_in_window(first_c, rows_c, int(self._spts[owner]), window)
        if owner == rows.owner:
            own: Numbers = (end_c * (end_c + 1) - begin_c * (begin_c + 1)) // 2
            return own
        level = next(
            number
            for number, segments in enumerate(self._segments, start=1)
            if any(rows.owner in members and owner in members for members in segments)
        )
        far: Numbers = rows_c * self._kept_cpgv[:, owner, head, level - 1]
        return far

    def _score(self, rank: int, scores_c: Mask) -> Seconds:
        """Return the time to score all keys, by own heads, in layers that score."""
        window_c = np.minimum(self._cases.window_c, self._spts.sum()) * scores_c
        pairs_c = window_c * self._spts.sum() * len(self._shares[rank][0])
        return self._group.times.importance.seconds(pairs_c.astype(float))


def _rows(part: MicroPartition) -> Rows:
    return Rows(part.owner, part.index)
