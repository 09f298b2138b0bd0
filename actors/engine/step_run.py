"""One prefill step on one rank: a batch of prompt chunks, computed layer by layer.

A layer computes QKV of the own rows, writes their KV into the pool and starts to send it to the
decode gang, computes attention over the group, then the output projection and the MLP. History that
is to be placed elsewhere moves during the attention of the layer before. In the last layer only the
rows from which a token is sampled need attention (`first_tokens`); if a request wants the
log-probabilities of its prompt, all rows then pass it as they did the others (`prompt_logprobs`).

At a yield point the step pauses for as long as the log says. The rank executes other entries
meanwhile, and the step's activations stay where they are.
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

from csps.actors.attention import step_points as step_points_module
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
from csps.actors.engine.prompt_logprobs import ReportLogprobs, report_prompt_logprobs
from csps.actors.kv_cache.slot_allocator import OutOfSlots
from csps.actors.timing.device_pace import DevicePace
from csps.actors.timing.timeline import (
    CANCELLED,
    LAST_LAYER_S,
    PLACING_S,
    PLACING_STORED_S,
    PLACING_WAITED_S,
    SentBytes,
    StepClock,
    traced_step,
)
from csps.models.network.network import Layer
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import DroppedMass
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep, rebalanced
from csps.protocols.sequencer.log_entries import RunQuantum

SendKv = Callable[[int, LocalChunk, Tensor | None], None]
"""Function (layer, local chunk, kept tokens) that sends a chunk's KV from the pool to its
destinations. The last argument says which tokens each KV head keeps; None for all."""

SampleFirst = Callable[["StepRun", Tensor, Tensor, OwnKv, Callable[[], None]], None]


class StepRun:
    """A step from its arrival to its end."""

    def __init__(
        self,
        engine: Engine,
        step: PrefillStep,
        *,
        reserved: Set[int] = frozenset(),
        departed: Set[int] = frozenset(),
        next_run: Callable[[StepRun], tuple[int, RunQuantum] | None],
        progress: Callable[..., None],
    ) -> None:
        """Args:
        reserved: sequences whose slots are reserved already.
        departed: sequences that left before the step arrived. Others may have been promised their
            slots since, so nothing of them is stored here.
        next_run: as in `LogProgress`.
        progress: called whenever the step has advanced, at a yield point with the fraction of
            them that were passed.
        """
        self.step = step
        self.clock = StepClock()
        self.sent = SentBytes(engine.mesh.bytes_sent)
        self.cancelled = False
        self.dropped_mass: tuple[DroppedMass, ...] = ()
        """Attention mass that the computed step has dropped."""
        self._engine = engine
        self.progress = progress
        balanced_step = rebalanced(step)
        self.step_points = step_points_of(engine, balanced_step)
        member = step.group.index(engine.instance)
        self._points = YieldPoints(self.step_points, self._at_point)
        self._pace = DevicePace(engine.device)
        self.group = SpGroup(
            engine.mesh, engine.layout, balanced_step, member, self.clock, self._points
        )
        self._transfers = Transfers(engine.mesh, self.clock)
        self._departed = departed
        mover = partial(
            KvMover, self.group, engine.pool, transfers=self._transfers, departed=departed
        )
        self._balancing = mover(moves=history_moves(step), phase="balancing")
        self.placing = mover(moves=row_moves(self.group), phase="placing")
        self._stored = tuple(
            part for part in stored_of(self.group) if part.chunk.sequence_id not in departed
        )
        self._takes = self._to_take(reserved)
        """Spans that need slots, by sequence."""
        self.leads = engine.rank == min(engine.layout.ranks_of_all(step.group))
        """Flag that this rank reports for all members."""
        self.log_progress = LogProgress(partial(next_run, self), self._paused, self._pace.wait)
        self._taken: list[tuple[int, Span]] = []
        """Slots that were acquired (a subset of `_takes`)."""

    def _to_take(self, reserved: Set[int]) -> dict[int, list[Span]]:
        """Return the positions, by sequence, for which this rank needs new slots: the KV of its own
        rows that it stores, and the KV that arrives from others."""
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
        """Return the id by which the log names the step."""
        return self.step.step_id

    @property
    def sequences(self) -> tuple[int, ...]:
        """Return the sequences that the step computes."""
        return tuple(chunk.sequence_id for chunk in self.step.chunks)

    # --- slots ---------------------------------------------------------------------------------

    def take_slots(self) -> bool:
        """Take all slots that this member needs, or none; return whether it has them."""
        slots = self._engine.pool.slots
        takes = [
            (sequence_id, span) for sequence_id, spans in self._takes.items() for span in spans
        ]
        needed = sum(span.length for _, span in takes)
        # Slots that the sequence still has here: an earlier step is about to move that KV away,
        # and this one may move it back.
        if needed > slots.free or any(slots.runs(*take) for take in takes):
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
        """Free the slots of a step that does not begin."""
        for sequence_id, span in self._taken:
            self._engine.pool.slots.free_span(sequence_id, span)
        self._taken.clear()

    # --- the engine thread ---------------------------------------------------------------------

    def compute(
        self, send: SendKv, sample_first: SampleFirst, report_logprobs: ReportLogprobs
    ) -> None:
        """Compute all layers; return when the log has let the step come to its end, or has stopped
        it.

        Args:
            send: takes KV that is decoded elsewhere.
            sample_first: takes the residual stream, the last layer's queries, keys and values, and
                a function to call when no member waits for answers any more.
            report_logprobs: takes log-probabilities of prompts.
        """
        self.clock.started = time.monotonic()
        self.sent = SentBytes(self._engine.mesh.bytes_sent)
        strategy = strategy_of(self.group, self._engine)
        traced = traced_step(self.step, self.clock, self.sent, rank=self._engine.rank)
        with traced as span, strategy as entered, self._transfers:
            # Inside both contexts: a stopped step is no failure, and its costs are traced as well.
            # Its members stop at the same layer, so that exchanges under way end.
            try:
                self._send_history(send)
                self._balancing.start(0)
                self._layers(entered, send, sample_first, report_logprobs)
            except StepAborted:
                self.cancelled = True
                span.set_attribute(CANCELLED, True)
            for mover in (self._balancing, self.placing):
                mover.finish()
                mover.release_sources()
            self._pace.wait()
            if not self.cancelled:
                self.clock.end_last_layer()
                masses = self.group.dropped_mass.reports(self._engine.kv_heads.start)
                self.dropped_mass = tuple(masses)
            span.set_attributes(self._placing_figures())
        self.clock.finished = time.monotonic()

    def _placing_figures(self) -> dict[str, float]:
        """Return trace attributes of a step that stores KV elsewhere than it computes it."""
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
        """Send KV of the prompt that other sequences have computed, with the step that begins the
        prompt."""
        for chunk in self.step.chunks:
            if not (chunk.begins and self._leaves(chunk)):
                continue
            for span in spans_on(chunk.history, self._engine.instance):
                part = LocalChunk(chunk, span, slice(0, 0))
                for layer in range(self._engine.spec.layers):
                    send(layer, part, None)

    def _leaves(self, chunk: PrefillChunk) -> bool:
        """Return whether a chunk's KV is sent to a decode gang."""
        return bool(chunk.destinations) and chunk.decoded and self.group.is_active(chunk)

    def _layers(
        self,
        strategy: Strategy,
        send: SendKv,
        sample_first: SampleFirst,
        report_logprobs: ReportLogprobs,
    ) -> None:
        network, device = self._engine.network, self._engine.device
        ids = torch.from_numpy(np.frombuffer(self.step.tokens, dtype="<i4").astype(np.int64))
        assert len(ids) == len(self.group.positions), (
            f"step {self.step_id} brings {len(ids)} tokens for {len(self.group.positions)} rows"
        )
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
                # The first token waits for the queries of the last rows, so KV moves after them.
                moving = partial(self.placing.start, index, own)
                with self.clock.timeline.phase("last rows", layer=index):
                    sample_first(self, x_td, q_thd, own, moving)
                if self.step.prompt_logprobs:
                    # By the strategy, like any layer: as single queries, all rows of a prompt
                    # would each read its whole KV.
                    x_td = strategy.attend_layer(index, layer, x_td, rotary, _stored_already)
                    x_td = self._mlp(index, layer, x_td)
                    with self.clock.timeline.phase("prompt log-probabilities", layer=index):
                        report_prompt_logprobs(
                            self._engine, self.group, x_td, report_logprobs, self._points.point
                        )
        self.log_progress.end(self.step_points.total)

    def _begin_layer(self, index: int) -> None:
        """Begin a layer. Here members agree on the cancelled sequences: all drop them at the same
        layer."""
        self._pace.begin_layer()
        self._points.begin_layer(index)
        self.group.cancelled.update(self.log_progress.cancelled)
        # The log has let them leave, so it has cancelled them in the step's first entry.
        assert self._departed <= self.group.cancelled, f"step {self.step_id} wants who has left"

    def _at_point(self, number: int) -> None:
        """Reach a yield point, which all members pass with the same exchanges behind them."""
        self.progress(number / self.step_points.total)
        if number >= self.log_progress.until:
            self._points.before_pause()
        self.log_progress.reach(number)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self.clock.yielding(), self.sent.paused():
            yield

    def _mlp(self, index: int, layer: Layer, x_td: Tensor) -> Tensor:
        """Compute the MLP in place, in blocks of rows with a yield point after each. An instance
        whose ranks sum partial results, and a GPU, compute the layer as a whole."""
        timeline = self.clock.timeline
        if layer.all_reduce is not None or x_td.is_cuda:
            with timeline.phase("mlp", layer=index):
                return layer.mlp(x_td)
        for block_td in torch.split(x_td, step_points_module.MLP_ROWS):
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
        """Store the own rows' KV here, send it to members that store it, and to the decode gang. Of
        another member's rows, store those that belong here.

        The decode gang may get kept tokens only. The gang's own pools are complete, also for
        cancelled sequences, so that no read finds garbage.
        """
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
        """Write the own rows' KV into the pool and send it to the decode gang."""
        self._balancing.finish()
        for part in self._stored:
            k, v = k_thd[part.rows], v_thd[part.rows]
            chunk = part.chunk
            self._engine.pool.write(index, chunk.sequence_id, part.span, k, v)
            if self._leaves(chunk):
                kept = None if kept_ht is None else kept_ht[:, part.rows]
                send(index, part, kept)


def _stored_already(*_: object, **__: object) -> None:
    """Store nothing: the last layer's KV was stored before its first tokens were sampled."""


def step_points_of(engine: Engine, balanced_step: PrefillStep) -> StepPoints:
    """Return the yield points of a step's exchange program; alike at all ranks, members or not.

    Args:
        balanced_step: the step with its history where it is moved to (`rebalanced`).
    """
    on_cuda = engine.device.type == "cuda"
    shape = ModelShape.of(engine.spec, tp=engine.layout.tp, on_cuda=on_cuda)
    return step_points(balanced_step, shape)
