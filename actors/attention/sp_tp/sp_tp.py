"""SP-TP: rows are gathered, heads are sharded, outputs are reduced (CSPS §3.2.1, Fig. 4).

    x of own rows --all-gather--> x of all rows
    QKV and causal attention of own heads over the whole batch
    output projection of these heads --reduce-scatter--> own rows

Works with and without tensor parallelism. The members are all ranks of the step's instances.
Without it, each takes a slice of the heads. With it, each instance's rows are split over its ranks,
and each rank's heads over the instances. The residual stream is gathered, not its norm: it has as
many bytes, and every member then computes the norm of all rows (a pass over memory, no product).

KV is not sent: each rank computes the KV of its own rows for the pool. This repeats 1/N of its KV
projection; an exchange of KV would cost more on any network.

Shape suffixes: t rows of this rank's instance, T rows of the batch, h own query heads, g the KV
heads that they read, d hidden or head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from torch import Tensor

from csps.actors.attention.base.dropped_mass import DroppedMassTally
from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import (
    HeadSplit,
    SpGroup,
    instance_shards,
    rank_shards,
    span_positions,
)
from csps.actors.attention.base.history import (
    History,
    HistoryQueries,
    members_by_heads,
    overlapping,
)
from csps.actors.attention.base.levels import DropSchedule, LevelGeometry, spanning_parts
from csps.actors.attention.base.strategy import OverlappingStrategy, StoreKv
from csps.actors.attention.sp_tp.head_attention import FarKeys, FarParts, HeadBlock, RowAttention
from csps.actors.comm.row_collectives import (
    RowGather,
    RowReduce,
    all_gather,
    flat_tree,
    server_tree,
)
from csps.actors.comm.transfers import Transfers
from csps.actors.timing.timeline import Phase
from csps.kernels.merge import merge_into, merge_sink, nothing_seen
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.attention.sp_tp import (
    Attend,
    MicroPartition,
    Project,
    QueryHistory,
    ScheduleLabel,
    ScheduleStep,
    StartReduce,
    Wait,
    near_to_far,
    one_after_another,
    own_before_far,
    with_history,
)
from csps.protocols.core.placement import Span


class SpTp(OverlappingStrategy):
    """SP-TP attention of one step on one rank; entered for the duration of the step.

    Without a plan it is exact, not pipelined, and assumes that all members share a server. The plan
    adds locations, pipelining, micro-partitions of its first level, and far keys that are dropped.
    Every query is computed, whatever the plan says of queries.

    If members share a KV head, each selects tokens by its own query heads, and for these, instead
    of one set per KV head.
    """

    # A common set would need an exchange before the attention of each layer and save no bytes,
    # because every member has the keys anyway.

    def __init__(
        self, group: SpGroup, engine: Engine, plan: CsaPlan | None, *, hierarchical: bool = True
    ) -> None:
        super().__init__(group, overlap=plan is not None and plan.pipelined)
        self._group = group
        self._engine = engine
        self._plan = plan
        self._schedule = None if plan is None else _schedule(plan, engine)
        self._split = HeadSplit(heads=engine.heads, kv_heads=len(engine.kv_heads), parts=group.size)
        self._shards = rank_shards(
            group,
            servers=self._servers,
            computing=[self._split.query_count(member) > 0 for member in range(group.size)],
            tree=server_tree if hierarchical else flat_tree,
        )
        self._history = History(
            group,
            engine.pool,
            members_by_heads(group, self._split),
            group_heads=engine.heads // len(engine.kv_heads),
            scale=engine.spec.scale,
            begin=overlapping(self._transfers),
            window=engine.spec.window,
            windowed=engine.spec.near_layers,
        )
        group.points.before_pause = self._transfers.drain
        self._importance: Mapping[int, Tensor] = {}
        self._steps: dict[tuple[int, bool], tuple[ScheduleStep, ...]] = {}

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. Keys and values are not sent."""
        return ()

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """See `Strategy`."""
        timeline = self._group.clock.timeline
        parts = tuple(self._shards.parts(self._micro_partitions(index)))
        like_d = x_td.new_empty(x_td.shape[1])
        gather = RowGather(self._shards, x_td, parts, self._transfers, layer=index)
        reduce = RowReduce(self._shards, like_d, self._transfers, layer=index)
        with gather, reduce:
            with timeline.phase("qkv", layer=index):
                own_kv = layer.keys_and_values(x_td, rotary)
            store(index, *own_kv)
            if self._split.query_count(self._group.member):
                work = self._layer(index, layer, gather.rows_td)
                work.run(self._planned(index), gather, reduce, self._transfers)
                work.add_dropped(self._group.dropped_mass)
                if index not in self._engine.spec.near_layers:
                    self._importance = self._next_importance(index, work)
            else:
                self._answer_without_heads(index, x_td)
                self._collect_without_heads(parts, reduce)
            sum_td = reduce.result()
        self._group.points.close()
        sum_td = self._instance_rows(sum_td)
        with timeline.phase("linear", layer=index):
            return layer.add_output(x_td, sum_td)

    # --- one layer -----------------------------------------------------------------------------

    def _layer(self, index: int, layer: Layer, rows_td: Tensor) -> SpTpLayer:
        queries = self._split.queries(self._group.member)
        keys = self._split.keys(self._group.member)
        sinks_h = self._engine.sinks(index)
        return SpTpLayer(
            self._group,
            layer.of_heads(queries, keys),
            rows_td,
            self._rotary,
            blocks=[HeadBlock(*run) for run in self._split.uniform_runs(self._group.member)],
            history=self._history,
            far_keys=self._far_keys(index),
            sinks_h=None if sinks_h is None else sinks_h[queries],
            index=index,
        )

    def _planned(self, index: int) -> tuple[ScheduleStep, ...]:
        """Return the steps of a layer; layers with equal properties have one object."""
        key = self._micro_partitions(index), self._scores_itself(index)
        if key not in self._steps:
            steps = tuple(self._in_order(*key))
            self._steps[key] = tuple(with_history(steps)) if self._history.any else steps
        return self._steps[key]

    def _in_order(self, micro: int, scores_itself: bool) -> Iterator[ScheduleStep]:
        parts = tuple(self._shards.parts(micro))
        if self._plan is None or not self._plan.pipelined:
            return one_after_another(parts)
        pipeline = own_before_far if scores_itself else near_to_far
        return pipeline(parts, self._distances)

    def _answer_without_heads(self, index: int, x_td: Tensor) -> None:
        """Answer questions about resident history; a member without heads asks none."""
        if self._history.any:
            self._group.points.close()
            no_queries = x_td.new_empty(self._group.total_rows, 0, self._engine.spec.head_dim)
            self._history.ask(index, no_queries).answer()

    def _collect_without_heads(self, parts: Sequence[MicroPartition], reduce: RowReduce) -> None:
        """Receive the reduced outputs of own rows; a member without heads contributes none."""
        for part in parts:
            self._group.points.close()
            if part.owner == self._shards.member:
                reduce.collect(part)

    def _micro_partitions(self, index: int) -> int:
        if self._plan is None or not self._plan.pipelined:
            return 1
        return self._plan.layer_group(index).micro(1)

    def _instance_rows(self, sum_td: Tensor) -> Tensor:
        """Gather the rows of the instance."""
        # Each tp rank needs all rows of the instance, because the MLP is sharded by columns and
        # sums over the instance.
        if self._group.layout.tp == 1:
            return sum_td
        return all_gather(instance_shards(self._group), sum_td, self._transfers)

    # --- sparse attention ----------------------------------------------------------------------

    def _far_keys(self, index: int) -> FarKeys | None:
        schedule = self._schedule
        if schedule is None or not schedule.drops(index):
            return None
        return FarKeys(
            self._far_parts,
            schedule,
            self._group.step.chunks,
            layer=index,
            kv_heads=self._split.keys(self._group.member),
            importance=self._importance,
        )

    def _scores_itself(self, index: int) -> bool:
        schedule = self._schedule
        if schedule is None or schedule.plan.importance_layer == "previous":
            return False
        return schedule.drops(index)

    def _next_importance(self, index: int, work: SpTpLayer) -> Mapping[int, Tensor]:
        """Return the importance for the next layer by chunk that spans members.

        Returns:
            Empty if the next layer keeps all tokens or scores importance itself.
        """
        schedule = self._schedule
        if schedule is None:
            return {}
        scored = schedule.after(index)
        if not schedule.drops(scored) or self._scores_itself(scored):
            return {}
        chunks = {
            part.chunk
            for part in self._far_parts.parts.values()
            if self._group.is_active(self._group.step.chunks[part.chunk])
        }
        window = schedule.plan.importance_window
        with self._group.clock.timeline.phase("importance", layer=index):
            return {chunk: work.attention.importance(chunk, window) for chunk in sorted(chunks)}

    @cached_property
    def _far_parts(self) -> FarParts:
        assert self._plan is not None
        step = self._group.step
        parts = spanning_parts(step.chunks, step.bounds)
        return FarParts(LevelGeometry(parts=parts, levels=self._plan.segments()), step.bounds)

    # --- the group -----------------------------------------------------------------------------

    @cached_property
    def _rotary(self) -> Rotary:
        """Rotary embedding of all rows of the batch."""
        chunks = self._group.step.chunks
        spans = [Span(start=chunk.start, stop=chunk.start + chunk.length) for chunk in chunks]
        return self._engine.network.rotary(span_positions(spans).to(self._engine.device))

    @property
    def _servers(self) -> list[tuple[int, int]]:
        """Server of each instance of the group."""
        if self._plan is None:
            return [(0, 0)] * self._group.size
        return [location.server_id for location in self._plan.topology.locations]

    @cached_property
    def _distances(self) -> list[int]:
        """Distance to each owner of rows: 0 own instance, 1 same server, 2 same rack, 3 beyond."""
        own = self._servers[self._group.member]
        distances = [
            0 if index == self._group.member else 3 - (rack == own[0]) - ((rack, server) == own)
            for index, (rack, server) in enumerate(self._servers)
        ]
        return [distance for distance in distances for _ in range(self._group.layout.tp)]


class SpTpLayer:
    """One layer of SP-TP on one member: runs its schedule for own heads over all rows.

    Args:
        layer: the layer with own heads only.
        rows_td: (T, hidden), valid where a `Wait` has returned.
        rotary: rotary embedding of all T rows.
    """

    def __init__(
        self,
        group: SpGroup,
        layer: Layer,
        rows_td: Tensor,
        rotary: Rotary,
        *,
        blocks: Sequence[HeadBlock],
        history: History,
        far_keys: FarKeys | None,
        sinks_h: Tensor | None = None,
        index: int,
    ) -> None:

        self._group = group
        self._layer = layer
        self._rows_td = rows_td
        self._rotary = rotary
        self._history = history
        self._asked: HistoryQueries | None = None
        self._history_result: tuple[Tensor, Tensor] | None = None
        self._timeline = group.clock.timeline
        self._index, self._sinks_h = index, sinks_h
        self._far_keys = far_keys
        self.attention = RowAttention(
            group.step.chunks,
            blocks,
            *self._buffers(),
            scale=layer.spec.scale,
            far_keys=far_keys,
            cancelled=group.cancelled,
            window=layer.spec.window_of(index),
        )

    def run(
        self,
        steps: Iterable[ScheduleStep],
        gather: RowGather,
        reduce: RowReduce,
        transfers: Transfers,
    ) -> None:
        """Run all steps in order."""
        for step in steps:
            match step:
                case Wait(part):
                    gather.wait(part)
                case Project(start, stop, place):
                    with self._phase("qkv", place):
                        self._project(start, stop)
                    self._pause(transfers)
                case QueryHistory():
                    self._group.points.close()
                    self._asked = self._history.ask(self._index, self.attention.q_Thd)
                    self._asked.answer()
                case Attend(queries, keys, place):
                    for block in self.attention.blocks(queries, keys[1] - keys[0]):
                        with self._phase("attention", place):
                            self.attention.attend(block, keys)
                        self._pause(transfers)
                case StartReduce(part):
                    self._group.points.close()
                    with self._timeline.phase("linear", layer=self._index, micro=part.index):
                        out_thd = self._complete(part.rows)
                        reduce.add(part, self._layer.output_part(out_thd))
                    # No yield point here: `RowReduce.result` begins the delayed transfers.
                    transfers.progress()

    def add_dropped(self, tally: DroppedMassTally) -> None:
        """Add the mass that the layer has dropped to a tally."""
        if self._far_keys is not None:
            self._far_keys.add_dropped(tally)

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, shard, dim = len(self._rows_td), self._layer.shard, self._layer.spec.head_dim
        heads = len(shard.query_heads), len(shard.kv_heads), len(shard.kv_heads)
        q_Thd, k_Tgd, v_Tgd = (self._rows_td.new_empty(rows, count, dim) for count in heads)
        return q_Thd, k_Tgd, v_Tgd

    def _project(self, start: int, stop: int) -> None:
        rows = slice(start, stop)
        buffers = self.attention.q_Thd, self.attention.k_Tgd, self.attention.v_Tgd
        computed = self._layer.qkv(self._rows_td[rows], self._rotary[rows])
        for buffer, part in zip(buffers, computed, strict=True):
            buffer[rows] = part

    def _complete(self, rows: slice) -> Tensor:
        """Return the output of rows that have attended to all of their chunk."""
        out_thd, lse_ht = self._with_history(rows)
        if self._sinks_h is not None:
            merge_sink(out_thd, lse_ht, self._sinks_h)
        return out_thd

    def _with_history(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return output and LSE of complete rows, with history."""
        # History is not in the running result, whose LSEs score the chunk's keys.
        attention = self.attention
        if self._asked is not None:
            self._history_result = nothing_seen(attention.q_Thd)
            self._asked.merge_into(*self._history_result)
            self._asked = None
        if self._history_result is None:
            return attention.out_Thd[rows], attention.lse_hT[:, rows]
        out_Thd, lse_hT = self._history_result
        merge_into(
            out_Thd[rows], lse_hT[:, rows], attention.out_Thd[rows], attention.lse_hT[:, rows]
        )
        return out_Thd[rows], lse_hT[:, rows]

    def _pause(self, transfers: Transfers) -> None:
        """Advance transfers and pass a yield point between two blocks of computing."""
        transfers.progress()
        self._group.points.point()

    def _phase(self, name: Phase, place: ScheduleLabel) -> AbstractContextManager[None]:
        return self._timeline.phase(name, layer=self._index, level=place.level, micro=place.micro)


def _schedule(plan: CsaPlan, engine: Engine) -> DropSchedule:
    return DropSchedule(
        plan=plan,
        layers=engine.spec.layers,
        kv_heads=engine.kv_heads,
        total_kv_heads=engine.spec.kv_heads,
        windowed=engine.spec.near_layers,
    )
