"""One step on one rank: a batch of prompt chunks, layer by layer, from part to part.

A layer: QKV of own rows -> KV into the pool and on its way to where it is decoded -> attention over
the group -> output projection and MLP. History that is to lie elsewhere is there before a layer's
attention: it travels during the attention of the layer before. In the last layer only the rows from
which a token is drawn need attention (`first_tokens`).

Between two parts the step stands still for as long as the log says so: the rank does what else it
says, with the step's activations where they are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from csps.actors.attention import step_points as parts
from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup, spans_on
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.base.yield_points import StepPoints, YieldPoints
from csps.actors.attention.choice import strategy_of
from csps.actors.attention.step_points import ModelShape, step_points
from csps.actors.comm.layout import LocalChunk
from csps.actors.comm.transfers import Transfers
from csps.actors.engine.kv_mover import KvMover, OwnKv, history_moves, row_moves, stored_of
from csps.actors.engine.pending_steps import LogProgress, StepAborted
from csps.actors.engine.step_trace import (
    CANCELLED,
    LAST_LAYER_S,
    PLACING_S,
    PLACING_STORED_S,
    PLACING_WAITED_S,
    SentBytes,
    traced_step,
)
from csps.actors.kv_cache.slot_allocator import OutOfSlots
from csps.actors.timing.timeline import StepClock
from csps.models.network.network import Layer
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep, rebalanced
from csps.protocols.sequencer.log_entries import RunQuantum

SendKv = Callable[[int, LocalChunk, Tensor | None], None]
"""(layer, a local piece whose KV there is in the pool, which tokens each KV head keeps or None for
all): send it to where the piece is to go."""

SampleFirst = Callable[["StepRun", Tensor, Tensor, OwnKv, Callable[[], None]], None]


class StepRun:
    """A step from its arrival to its last part."""

    def __init__(
        self,
        engine: Engine,
        step: PrefillStep,
        *,
        reserved: Set[int] = frozenset(),
        next_run: Callable[[StepRun], tuple[int, RunQuantum] | None],
        progress: Callable[[], None],
    ) -> None:
        """
        Args:
            reserved: sequences that have slots where their KV is to lie.
            next_turn: as in `LogProgress`.
            progress: called whenever the step has got on.
        """
        self.step = step
        self.clock = StepClock()
        self.sent = SentBytes(engine.mesh)
        self.cancelled = False
        self._engine = engine
        self._progress = progress
        balanced_step = rebalanced(step)
        self.step_points = step_points_of(engine, balanced_step)
        member = step.group.index(engine.instance)
        self._points = YieldPoints(self.step_points, self._at_point)
        self.group = SpGroup(
            engine.mesh, engine.layout, balanced_step, member, self.clock, self._points
        )
        self._transfers = Transfers(engine.mesh, self.clock)
        mover = partial(KvMover, self.group, engine.pool, transfers=self._transfers)
        self._balancing = mover(moves=history_moves(step), phase="balancing")
        self.placing = mover(moves=row_moves(self.group), phase="placing")
        self._stored = stored_of(self.group)
        self._takes = self._to_take(reserved)
        """Slots that it needs, by sequence."""
        self.leads = engine.rank == min(engine.layout.ranks_of_all(step.group))
        """This rank reports for all members."""
        self.log_progress = LogProgress(partial(next_run, self), self._paused)
        self._taken: list[tuple[int, Span]] = []
        """Of those, which it has."""

    def _to_take(self, reserved: Set[int]) -> dict[int, list[Span]]:
        """By sequence, of which positions this rank needs slots that it does not have: what it
        keeps of its rows, and what comes from others. Taken together, they lie side by side."""
        takes: dict[int, list[Span]] = defaultdict(list)
        for part in self._stored:
            takes[part.chunk.sequence_id].append(part.span)
        for sequence_id, span in (*self._balancing.incoming, *self.placing.incoming):
            takes[sequence_id].append(span)
        return {
            sequence_id: spans
            for sequence_id, spans in takes.items()
            if sequence_id not in reserved
        }

    @property
    def step_id(self) -> int:
        """By which the log names it."""
        return self.step.step_id

    @property
    def sequences(self) -> tuple[int, ...]:
        """Those that it computes."""
        return tuple(chunk.sequence_id for chunk in self.step.chunks)

    # --- slots ---------------------------------------------------------------------------------

    def take_slots(self) -> bool:
        """Take the slots of what this member is to hold: all or none, and whether it has them. What
        an earlier step of a sequence is about to move away may be what this one moves back."""
        slots = self._engine.pool.slots
        takes = [
            (sequence_id, span) for sequence_id, spans in self._takes.items() for span in spans
        ]
        needed = sum(span.length for _, span in takes)
        if needed > slots.free or any(slots.runs(*it) for it in takes):
            return False
        for sequence_id, spans in self._takes.items():
            try:
                slots.allocate(sequence_id, spans)
            except OutOfSlots:  # reservations take slots meanwhile
                self.free_slots()
                return False
            self._taken += [(sequence_id, span) for span in spans]
        return True

    def free_slots(self) -> None:
        """Free what `take_slots` took, of a step that does not begin."""
        for sequence_id, span in self._taken:
            self._engine.pool.slots.free_span(sequence_id, span)
        self._taken.clear()

    # --- the engine thread ---------------------------------------------------------------------

    def compute(self, send: SendKv, sample_first: SampleFirst) -> None:
        """All layers; returns when the log has let the step come to its end, or stopped it.

        Args:
            send: takes what is decoded elsewhere.
            draw: takes the residual stream, of the last layer queries, keys and values, and what
                it is to call when no member waits for answers any more.
        """
        self.clock.started = time.monotonic()
        self.sent = SentBytes(self._engine.mesh)
        strategy = strategy_of(self.group, self._engine)
        traced = traced_step(self.step, self.clock, self.sent, rank=self._engine.rank)
        with traced as span, strategy as entered, self._transfers:
            # Inside of both: a step that is stopped is no failure, and what it cost is told as
            # well. Its members stop at the same layer, so that exchanges under way end.
            try:
                self._send_history(send)
                self._balancing.start(0)
                self._layers(entered, send, sample_first)
            except StepAborted:
                self.cancelled = True
                span.set_attribute(CANCELLED, True)
            for mover in (self._balancing, self.placing):
                mover.finish()
                mover.release_sources()
            if not self.cancelled:
                self.clock.end_last_layer()
            span.set_attributes(self._placing_figures())
        self.clock.finished = time.monotonic()

    def _placing_figures(self) -> dict[str, float]:
        """For its trace, where KV is kept elsewhere than it was computed."""
        placing = self.placing
        if not placing.seconds:
            return {}
        return {
            PLACING_S: placing.seconds,
            PLACING_STORED_S: placing.storing.seconds,
            PLACING_WAITED_S: placing.waiting.seconds,
            LAST_LAYER_S: self.clock.last_layer_s,
        }

    def _send_history(self, send: SendKv) -> None:
        """What others have computed of a prompt that this step begins leaves with it, from where it
        lies."""
        for chunk in self.step.chunks:
            if not (chunk.begins and self._leaves(chunk)):
                continue
            for span in spans_on(chunk.history, self._engine.instance):
                part = LocalChunk(chunk, span, slice(0, 0))
                for layer in range(self._engine.spec.layers):
                    send(layer, part, None)

    def _leaves(self, chunk: PrefillChunk) -> bool:
        """Whether a piece's KV is sent."""
        return bool(chunk.destinations) and chunk.decoded and self.group.wanted(chunk)

    def _layers(
        self,
        strategy: Strategy,
        send: SendKv,
        sample_first: SampleFirst,
    ) -> None:
        network, device = self._engine.network, self._engine.device
        ids = torch.from_numpy(np.frombuffer(self.step.tokens, dtype="<i4").astype(np.int64))
        assert len(ids) == len(self.group.positions), "the step's tokens are not this rank's share"
        rotary = network.rotary(self.group.positions.to(device))
        x_td = network.embed(ids.to(device))
        store = partial(self._distribute, send, strategy.offered)
        for index, layer in enumerate(network.layers):
            self._begin_layer(index)
            if index + 1 < len(network.layers):
                x_td = strategy.attend_layer(index, layer, x_td, rotary, store)
                x_td = self._mlp(index, layer, x_td)
            else:
                self.clock.begin_last_layer()
                with self.clock.timeline.phase("qkv", layer=index):
                    q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
                own = k_thd, v_thd
                self._store(send, index, *own)
                # Whoever waits for a token waits for these: what moves would be before them.
                moving = partial(self.placing.start, index, own)
                with self.clock.timeline.phase("last rows", layer=index):
                    sample_first(self, x_td, q_thd, own, moving)
        self.log_progress.end(self.step_points.total)

    def _begin_layer(self, index: int) -> None:
        """Where members agree on who is still wanted: from the same layer on."""
        self._points.begin_layer(index)
        self.group.cancelled.update(self.log_progress.cancelled)

    def _at_point(self, number: int) -> None:
        """A point that all members pass with the same exchanges behind them."""
        self._progress()
        if number >= self.log_progress.until:
            self._points.before_pause()
        self.log_progress.reach(number)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self.clock.yielding(), self.sent.paused():
            yield

    def _mlp(self, index: int, layer: Layer, x_td: Tensor) -> Tensor:
        """In place and in blocks of rows, but where an instance's ranks sum their parts, which they
        have to do at the same time, and on a GPU, to which a layer is handed over as a whole."""
        timeline = self.clock.timeline
        if layer.all_reduce is not None or x_td.is_cuda:
            with timeline.phase("mlp", layer=index):
                return layer.mlp(x_td)
        for block_td in torch.split(x_td, parts.MLP_ROWS):
            with timeline.phase("mlp", layer=index):
                block_td.copy_(layer.mlp(block_td))
            self._points.point()
        return x_td

    def _distribute(
        self,
        send: SendKv,
        offered: Callable[[int, int], Collection[int]],
        index: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
        /,
        *,
        member: int | None = None,
    ) -> None:
        """Own rows' KV into the pool, to other members that keep it, and to where it is decoded,
        which may be to have kept tokens only; the gang's own pools are complete, also of sequences
        that nobody wants any more, so that whatever is read there is a number. Of others' rows
        what is to lie here."""
        if member is not None:
            self.placing.take(index, member, (k_thd, v_thd))
            return
        self._store(send, index, k_thd, v_thd, kept_ht)
        self.placing.start(index, (k_thd, v_thd), partial(offered, index))
        self._balancing.start(index + 1)

    def _store(
        self,
        send: SendKv,
        index: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
    ) -> None:
        """Own rows' KV into the pool, and to where it is decoded."""
        self._balancing.finish()
        for part in self._stored:
            k, v = k_thd[part.rows], v_thd[part.rows]
            chunk = part.chunk
            self._engine.pool.write(index, chunk.sequence_id, part.span, k, v)
            if self._leaves(chunk):
                kept = None if kept_ht is None else kept_ht[:, part.rows]
                send(index, part, kept)


def step_points_of(engine: Engine, balanced_step: PrefillStep) -> StepPoints:
    """Points of a step's exchange program; alike at all ranks, members or not.

    Args:
        settled: the step with its history where it is moved to (`rebalanced`).
    """
    on_cuda = engine.device.type == "cuda"
    shape = ModelShape.of(engine.spec, tp=engine.layout.tp, on_cuda=on_cuda)
    return step_points(balanced_step, shape)
