"""The prefill loop of a rank: jobs in order, layer by layer, yielding to urgent ones.

A layer: QKV of own rows -> KV into the pool and on its way to the decode gang -> attention over
the group -> output projection and MLP. In the last layer only the rows from which a token is
drawn need attention: their queries go to where the KV lies (`query_exchange`), which saves the
last layer's attention and MLP.

Without tensor parallelism a job may be urgent and need one rank alone. Such a job runs wherever
the rank stands: between two layers of a long job, between two parts of one, or while the rank
waits for others to come to it (`meeting`). Any other urgent job runs between two layers only, when
the long job's leader says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from csps.actors.announce import Notify, request_failed, token_drawn
from csps.actors.engine.choice import strategy_of
from csps.actors.engine.engine import Engine
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.job_clock import JobClock
from csps.actors.job_queue import JobQueue
from csps.actors.kv_moves import KvMover
from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.layout import LocalPiece
from csps.actors.meeting import Meeting
from csps.actors.mesh import PEER_DEADLINE, ControlTag, Pending, Tag
from csps.actors.prefill_orders import MAX_URGENT, PrefillOrders
from csps.actors.progress_report import ProgressReport
from csps.actors.request_book import RequestBook
from csps.actors.sampler_request import drawn_before, sampler_of
from csps.actors.sampling import TokenSampler, draw_batch
from csps.actors.strategies import parts
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.parts import ModelShape, Points, step_parts
from csps.actors.strategies.query_exchange import QueryRoutes, exchange_queries
from csps.actors.strategies.strategy import Strategy
from csps.actors.timeline_export import CANCELLED, traced_job
from csps.models.network import Layer
from csps.protocols.errors import ConfigError, CspsError, DeadlineExceeded, TransferError
from csps.protocols.messages import PrefillDone, PrefillJob, PrefillPiece, TokenDrawn, Tokens

_log = logging.getLogger(__name__)

SLOTS_BACK_S = 60.0
"""For slots that a former router's jobs still hold; the present one counts what it has given."""


class _JobCancelled(Exception):
    """Nobody wants any of the job's requests any more."""


@dataclass(eq=False)
class _Run:
    """One job under way on this rank."""

    group: SpGroup
    ids_t: Tensor
    entered: AbstractContextManager[Strategy]
    mover: KvMover
    sender: KvSender | None
    clock: JobClock
    delivery: Delivery = field(init=False)
    told: list[Pending] = field(default_factory=list)
    """Orders to the other members."""
    cancelled: bool = False

    @property
    def job(self) -> PrefillJob:
        return self.group.job


class PrefillLoop:
    """Runs prefill jobs; `run` is the engine thread's body, the rest is called from others."""

    def __init__(self, engine: Engine, notify: Notify) -> None:
        self._engine = engine
        self._notify = notify
        self._queue = JobQueue()
        self._clocks: dict[int, JobClock] = {}
        self._book = RequestBook()
        self._slots_back = threading.Condition()
        self._sender: KvSender | None = None
        self._progress = ProgressReport(notify, rank=engine.rank)

    # --- called from the RPC thread --------------------------------------------------------

    def submit(self, job: PrefillJob) -> None:
        """Put a job in line; jobs must come in the router's order."""
        self._clocks[job.job_id] = JobClock()
        if self._engine.instance in job.group:
            self._book.enter(job)
        self._queue.put(job)

    def refuse(self, job: PrefillJob, error: ConfigError) -> None:
        """Tell the router that a job does not get in line; its group has nothing to do with it."""
        if self._engine.instance not in job.group:
            return
        for piece in job.pieces:
            self._fail(piece.rid, error)
        self._notify(
            "prefill_done",
            PrefillDone(
                job_id=job.job_id,
                rank=self._engine.rank,
                cancelled=True,
                queue_s=0.0,
                compute_s=0.0,
                communication_s=0.0,
                transfer_s=0.0,
                yielded_s=0.0,
            ),
        )

    def cancel(self, rid: int) -> None:
        """Stop a request's work at the next layer, but for its rows in a job that others share:
        they stay, without attention. Harmless for an unknown request."""
        if self._sender is not None:
            self._sender.withdraw(rid)
        if self._book.cancel(rid):
            self._free(rid)

    def cancel_all(self) -> None:
        """Stop everything: the router that asked for it is gone."""
        for rid in self._book.cancel_all():
            self._free(rid)
        self._progress.watch(self.open_jobs)

    @property
    def ending_steps(self) -> int:
        """Grows while the jobs get on that `cancel_all` has found open."""
        return self._progress.watched_steps

    @property
    def open_jobs(self) -> frozenset[int]:
        """Jobs of this rank that are in line, under way or not sent whole."""
        return self._book.open_jobs

    def use_sender(self, sender: KvSender | None) -> None:
        """Send KV through it from the next job on."""
        self._sender = sender

    @property
    def waiting(self) -> int:
        """Jobs in line."""
        return len(self._queue)

    def close(self) -> None:
        """End `run` after the job under way."""
        self._queue.close()

    # --- the engine thread -----------------------------------------------------------------

    def run(self) -> None:
        """Work until closed. An exception means that the gang is broken."""
        with torch.inference_mode():
            while (job := self._queue.next()) is not None:
                self._run_job(job)

    def _run_job(self, job: PrefillJob) -> None:
        clock = self._clocks.pop(job.job_id)
        if self._engine.instance not in job.group:
            return
        self._meet(job)
        clock.started = time.monotonic()
        run = self._prepare(job, clock)
        with traced_job(job, clock, self._engine.mesh) as job_span, run.entered as strategy:
            # Inside of both: a job that is stopped is no failure, and what it cost is told as well.
            # Its members stop at the same layer, so that exchanges under way end.
            try:
                self._compute(run, strategy)
            except _JobCancelled:
                run.cancelled = True
                job_span.set_attribute(CANCELLED, True)
        run.mover.finish()
        run.mover.release_sources()
        Pending.all(run.told).wait()
        clock.finished = time.monotonic()
        run.delivery.finish()

    def _prepare(self, job: PrefillJob, clock: JobClock) -> _Run:
        engine = self._engine
        member = job.group.index(engine.instance)
        shape = ModelShape.of(
            engine.spec, tp=engine.layout.tp, on_cuda=engine.device.type == "cuda"
        )
        points = Points(step_parts(job, shape), partial(self._give_way, job, clock))
        group = SpGroup(engine.mesh, engine.layout, job, member, clock, points)
        mover = KvMover(group, engine.pool)
        self._allocate(group, mover)
        ids = torch.from_numpy(np.frombuffer(job.tokens, dtype="<i4").astype(np.int64))
        assert len(ids) == len(group.positions), "the job's tokens are not this rank's share"
        strategy = strategy_of(group, engine)
        run = _Run(group, ids.to(engine.device), strategy, mover, self._sender, clock)
        on_step = partial(self._progress.step, job.job_id)
        run.delivery = Delivery(engine.pool, partial(self._sent, run), on_step)
        return run

    def _allocate(self, group: SpGroup, mover: KvMover) -> None:
        pool = self._engine.pool
        needed = sum(part.span.length for part in group.local) + mover.incoming_tokens
        with self._slots_back:
            if not self._slots_back.wait_for(lambda: pool.free >= needed, SLOTS_BACK_S):
                raise DeadlineExceeded("return of KV slots", SLOTS_BACK_S)
        for part in group.local:
            pool.allocate(part.piece.rid, [part.span])
        mover.allocate()

    def _compute(self, run: _Run, strategy: Strategy) -> None:
        network = self._engine.network
        rotary = network.rotary(run.group.positions.to(self._engine.device))
        x_td = network.embed(run.ids_t)
        keep = partial(self._keep, run)
        for index, layer in enumerate(network.layers):
            self._between_layers(run, index)
            if index + 1 < len(network.layers):
                x_td = strategy.attend_layer(index, layer, x_td, rotary, keep)
                x_td = self._mlp(run, index, layer, x_td)
            else:
                with run.clock.timeline.phase("qkv", layer=index):
                    q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
                keep(index, k_thd, v_thd)
                with run.clock.timeline.phase("last rows", layer=index):
                    self._draw_first_tokens(run, x_td, q_thd)

    def _mlp(self, run: _Run, index: int, layer: Layer, x_td: Tensor) -> Tensor:
        """In place and in blocks of rows, but where an instance's ranks sum their parts, which they
        have to do at the same time, and on a GPU, to which a layer is handed over as a whole."""
        timeline = run.clock.timeline
        if layer.all_reduce is not None or x_td.is_cuda:
            with timeline.phase("mlp", layer=index):
                return layer.mlp(x_td)
        for block_td in torch.split(x_td, parts.MLP_ROWS):
            with timeline.phase("mlp", layer=index):
                block_td.copy_(layer.mlp(block_td))
            run.group.points.point()
        return x_td

    def _keep(
        self,
        run: _Run,
        index: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
    ) -> None:
        """Own rows' KV into the pool, to other members that keep it, and to the decode gang, which
        may be to have kept tokens only; the gang's own pools are complete, also of requests that
        nobody wants any more, so that whatever is read there is a number."""
        for part in run.group.local:
            k, v = k_thd[part.rows], v_thd[part.rows]
            self._engine.pool.write(index, part.piece.rid, part.span, k, v)
            if part.piece.destinations and run.group.wanted(part.piece):
                kept = None if kept_ht is None else kept_ht[:, part.rows]
                self._stream(run, index, part, kept)
        run.mover.start(index)

    def _stream(self, run: _Run, index: int, part: LocalPiece, kept_ht: Tensor | None) -> None:
        """A lost decode gang fails the requests of the job, not this gang."""
        if run.sender is None:
            run.delivery.fail(TransferError("no decode gang is connected"))
        elif not run.delivery.failed:
            run.sender.post(run.delivery, index, part, kept_ht)

    # --- the last layer --------------------------------------------------------------------

    def _draw_first_tokens(self, run: _Run, x_td: Tensor, q_thd: Tensor) -> None:
        own = [
            (piece, row) for piece, row, owner in _last_rows(run.group) if owner == run.group.member
        ]
        rows = [row for _, row in own]
        out_thd = self._last_attention(run, q_thd[rows])
        if not own:
            return
        layer = self._engine.network.layers[-1]
        x_td = layer.finish(x_td[rows], out_thd.to(q_thd.dtype))
        if self._engine.tp_rank:
            return
        logits_tv = self._engine.network.logits(x_td)
        self._draw([run.job.pieces[index] for index, _ in own], logits_tv)

    def _last_attention(self, run: _Run, q_thd: Tensor) -> Tensor:
        """Attention of the own last rows over KV wherever in the group it lies."""
        engine = self._engine
        last_layer = engine.spec.layers - 1
        routes, pieces = _last_row_routes(run.group)

        def partial(peer: int | None, q_rhd: Tensor) -> tuple[Tensor, Tensor]:
            rids = [run.group.job.pieces[index].rid for index in pieces[peer]]
            held = [RequestSlots(engine.pool, rid, [last_layer]) for rid in rids]
            return engine.attend_rows(last_layer, q_rhd, HeldRows(held))

        return exchange_queries(
            q_thd,
            mesh=engine.mesh,
            routes=routes,
            partial=partial,
            tags=(Tag.LAST_ROW_QUERY, Tag.LAST_ROW_PARTIAL),
        )

    def _draw(self, pieces: Sequence[PrefillPiece], logits_tv: Tensor) -> None:
        samplers: dict[int, TokenSampler] = {}
        for row, piece in enumerate(pieces):
            try:
                samplers[row] = sampler_of(piece, self._engine.spec.vocab)
            except CspsError as exc:
                self._fail(piece.rid, exc)
        indices = [drawn_before(pieces[row].drawn) for row in samplers]
        draws = draw_batch(list(samplers.values()), logits_tv[list(samplers)], indices)
        drawn: list[TokenDrawn] = []
        for row, index, draw in zip(samplers, indices, draws, strict=True):
            if isinstance(draw, CspsError):
                self._fail(pieces[row].rid, draw)
            else:
                drawn.append(token_drawn(pieces[row].rid, index, draw))
        if drawn:
            self._notify("tokens", Tokens.of(drawn))

    # --- urgent jobs inside a long one -----------------------------------------------------

    def _between_layers(self, run: _Run, index: int) -> None:
        """Do as the group's leader says: let urgent jobs run first, give up requests, or all."""
        orders = self._orders(run)
        run.group.withdrawn.update(orders.withdrawn)
        if not any(map(run.group.wanted, run.job.pieces)):
            raise _JobCancelled
        self._run_urgent(run.clock, orders.urgent)
        run.group.points.begin_layer(index)

    def _give_way(self, job: PrefillJob, clock: JobClock, number: int) -> None:
        """Let urgent jobs of this rank alone run now, wherever the other members stand. Comes so
        often, and for any job, that it tells of the progress as well."""
        self._progress.step(job.job_id)
        if job.urgent:
            return
        # One at a time: there is less room for the next one.
        while urgent := self._queue.urgent_within(job, self._runs_now, 1):
            self._run_urgent(clock, urgent)

    def _run_urgent(self, clock: JobClock, job_ids: Sequence[int]) -> None:
        if not job_ids:
            return
        with clock.yielding():
            self._run_early(job_ids)

    def _run_early(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            job = self._queue.take(job_id)
            if job is not None:
                self._run_job(job)

    def _meet(self, job: PrefillJob) -> None:
        """Wait until all members have come to a job; until then urgent jobs of this rank alone run,
        of which there are none under tensor parallelism."""
        others = [rank for rank in self._ranks_of(job) if rank != self._engine.rank]
        if not others or job.urgent or self._engine.layout.tp > 1:
            return
        meeting = Meeting(self._engine.mesh, others, on_complete=self._queue.look_again)
        while urgent := self._queue.urgent_until(lambda: meeting.complete, job, self._runs_now):
            self._run_early(urgent)
        meeting.wait()

    def _runs_now(self, job: PrefillJob) -> bool:
        """It needs nobody else, and no slots that a job around it may hold until its end."""
        alone = self._ranks_of(job) == [self._engine.rank]
        return alone and sum(piece.length for piece in job.pieces) <= self._engine.pool.free

    def _ranks_of(self, job: PrefillJob) -> list[int]:
        """All that take part in a job, its leader first."""
        return [rank for i in job.group for rank in self._engine.layout.ranks_of(i)]

    def _orders(self, run: _Run) -> PrefillOrders:
        ranks = self._ranks_of(run.job)
        leader = ranks[0]
        if self._engine.rank != leader:
            words = PrefillOrders.room(run.job)
            self._engine.mesh.hear(words, leader, ControlTag.PREFILL_ORDERS).wait(PEER_DEADLINE)
            return PrefillOrders.unpack(words, run.job)
        orders = self._decide(run)
        words = orders.pack(run.job)
        for rank in ranks[1:]:
            run.told.append(self._engine.mesh.tell(words, rank, ControlTag.PREFILL_ORDERS))
        return orders

    def _decide(self, run: _Run) -> PrefillOrders:
        withdrawn = self._book.withdrawn(run.job)
        if run.job.urgent or len(withdrawn) == len(run.job.pieces):
            return PrefillOrders(withdrawn=withdrawn)
        urgent = self._queue.urgent_within(run.job, partial(self._shared, run), MAX_URGENT)
        return PrefillOrders(withdrawn=withdrawn, urgent=tuple(urgent))

    def _shared(self, run: _Run, job: PrefillJob) -> bool:
        """Several ranks take part, which all take part in the running job as well; one that runs
        alone needs no order."""
        return len(self._ranks_of(job)) > 1 and set(run.job.group).issuperset(job.group)

    # --- after computing -------------------------------------------------------------------

    def _sent(self, run: _Run, failure: Exception | None) -> None:
        """Any thread: all that a job had to send has landed, or never will."""
        if failure is not None:
            self._report_lost(run, failure)
        for rid in self._book.settle(run.job, cancelled=run.cancelled):
            self._engine.pool.free_request(rid)
        self._tell_slots_back()
        self._report_done(run, time.monotonic() - run.clock.finished)

    def _free(self, rid: int) -> None:
        self._engine.pool.free_request(rid)
        self._tell_slots_back()

    def _tell_slots_back(self) -> None:
        with self._slots_back:
            self._slots_back.notify_all()
        self._queue.look_again()

    def _report_lost(self, run: _Run, exc: Exception) -> None:
        _log.warning("KV of job %d was not sent: %s", run.job.job_id, exc)
        for piece in run.job.pieces:
            message = "the decode gang was lost while KV was being sent"
            self._fail(piece.rid, TransferError(message))

    def _fail(self, rid: int, error: CspsError) -> None:
        self._notify("failed", request_failed(rid, self._engine.rank, error))

    def _report_done(self, run: _Run, transfer_s: float) -> None:
        self._notify(
            "prefill_done",
            PrefillDone(
                job_id=run.job.job_id,
                rank=self._engine.rank,
                cancelled=run.cancelled,
                queue_s=run.clock.queue_s,
                compute_s=run.clock.compute_s,
                communication_s=run.clock.communication_s,
                exchange_s=run.clock.exchange_s,
                transfer_s=transfer_s,
                yielded_s=run.clock.yielded_s,
            ),
        )


def _last_rows(group: SpGroup) -> Iterator[tuple[int, int, int]]:
    """(piece index, local row at its owner, owner) of every row a token is drawn from; all members
    stand at the same layer, so they name the same."""
    end = 0
    for index, piece in enumerate(group.job.pieces):
        end += piece.length
        if piece.last and group.wanted(piece):
            owner = group.owner_of_last_row(index)
            yield index, end - 1 - group.job.bounds[owner], owner


def _last_row_routes(group: SpGroup) -> tuple[QueryRoutes, dict[int | None, list[int]]]:
    """Last rows go to every member that holds KV of their piece, history included.

    Returns:
        The routes, and by peer, or None for own rows, the pieces whose KV is held here.
    """
    pieces = group.job.pieces
    mine = [index for index, _, owner in _last_rows(group) if owner == group.member]
    outgoing: dict[int, list[int]] = {}
    held: dict[int | None, list[int]] = {None: []}
    for index, _, owner in _last_rows(group):
        for member in group.holders_of(pieces[index]):
            if member == group.member:
                peer = None if owner == group.member else group.peers[owner]
                held.setdefault(peer, []).append(index)
            elif owner == group.member:
                outgoing.setdefault(group.peers[member], []).append(mine.index(index))
    routes = QueryRoutes(
        rows=len(mine),
        held_here=[mine.index(index) for index in held[None]],
        outgoing=outgoing,
        incoming={peer: len(it) for peer, it in held.items() if peer is not None},
    )
    return routes, held
