"""One iteration of the decode batch on one rank: decoding sequences and chunks of prompts.

Each sequence has a master, which embeds its tokens and samples the next one. Queries go to the
instances that held KV of the sequence before this iteration, and new KV goes to the instances that
store it. All ranks derive their parts from the same sequences and lengths, in the same order
(`batch_of`). `forward` then runs the network over the own rows and the queries of others.

Shape suffixes: r query rows of this master, n query rows of a chunk, t tokens, s slots, h query
heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.query_exchange import (
    QueryExchange,
    QueryExchangeTimes,
    QueryRoutes,
    exchange_queries,
)
from csps.actors.comm.mesh import Tag
from csps.actors.comm.process_group import Pending
from csps.actors.engine.reservations import BatchSequence
from csps.actors.kv_cache.kv_pool import ResidentRows, SlotsOfSequence
from csps.kernels.arguments import ChunkRuns
from csps.kernels.attention import attention, chunk_attention
from csps.kernels.merge import merge_into
from csps.protocols.core.placement import Span


@dataclass(frozen=True, kw_only=True)
class IterationChunk:
    """Positions of a prompt that a master computes in this iteration."""

    sequence: BatchSequence
    span: Span
    rows: slice
    """Query rows of the master."""

    @property
    def samples(self) -> bool:
        """Return whether the prompt ends with this chunk."""
        return self.span.stop == self.sequence.prompt


@dataclass(frozen=True, kw_only=True)
class ResidentNearKeys:
    """Keys before chunks, of which each row sees those in its window; on the device, copied once
    for all layers."""

    rows: Tensor
    """Positions of the query rows."""
    positions: Tensor
    slots: Tensor
    offsets: Tensor
    """First key of each chunk, and the end."""


@dataclass(frozen=True, kw_only=True)
class ResidentChunks:
    """KV resident here of the sequences of one master's chunks, from before the chunks."""

    runs: ChunkRuns
    near: ResidentNearKeys | None = None
    """Keys in the runs, in layers with a window."""


@dataclass(eq=False)
class VisibleKv:
    """KV that query rows see in some layers, wherever it lies."""

    window: int | None = None
    """Positions that a row sees; None for all."""
    routes: QueryRoutes = field(default_factory=lambda: QueryRoutes(rows=0, resident_here=()))
    resident: dict[int | None, ResidentRows] = field(default_factory=dict)
    """Slots of decoding sequences by the peer that masters them; own ones under None."""
    resident_chunks: dict[int | None, ResidentChunks] = field(default_factory=dict)
    """Chunks with KV resident here, by peer. Own chunks have an entry also if nothing is
    resident."""


@dataclass(eq=False)
class IterationBatch:
    """One rank's part of an iteration."""

    decoding: list[BatchSequence] = field(default_factory=list)
    """Own sequences that decode; they are the first query rows."""
    chunks: list[IterationChunk] = field(default_factory=list)
    """Own chunks, after them."""
    whole: VisibleKv = field(default_factory=VisibleKv)
    near: VisibleKv = field(default_factory=VisibleKv)
    """Slots that rows see in layers with a window."""
    growing: list[tuple[SlotsOfSequence, int]] = field(default_factory=list)
    """Own decoding sequences whose KV is stored here, each with its query row: they take a slot in
    every iteration."""
    sent: dict[int, list[slice]] = field(default_factory=dict)
    """Query rows whose keys and values a peer stores, by peer."""
    received: dict[int, list[int]] = field(default_factory=dict)
    """Slots for keys and values that a peer computes, by peer."""
    stored_rows: list[int] = field(default_factory=list)
    stored_slots: list[int] = field(default_factory=list)
    """Query rows of chunks whose keys and values are stored here, and their slots."""

    _received_at: dict[int, Tensor] = field(default_factory=dict)

    def received_at(self, peer: int, device: torch.device) -> Tensor:
        """Return `received` of a peer as (t,) int64, moved to the device once for all layers."""
        if peer not in self._received_at:
            slots = torch.tensor(self.received[peer], dtype=torch.int64, device=device)
            self._received_at[peer] = slots
        return self._received_at[peer]

    def advance(self) -> None:
        """Go on to the next token of every row, if the same instances are asked for it."""
        for resident in self.near.resident.values():
            resident.advance()

    @property
    def rows(self) -> int:
        """Return the number of own query rows."""
        return self.whole.routes.rows

    @property
    def sampling(self) -> list[tuple[BatchSequence, int]]:
        """Return the own sequences for which a token is sampled, each with its last query row."""
        ends = [(chunk.sequence, chunk.rows.stop - 1) for chunk in self.chunks if chunk.samples]
        return [(sequence, at) for at, sequence in enumerate(self.decoding)] + ends


def batch_of(
    engine: Engine, sequences: Sequence[BatchSequence], lengths: Sequence[int]
) -> IterationBatch:
    """Return this rank's part of an iteration in which each sequence computes this many
    positions."""
    return _Builder(engine).batch(sequences, lengths)


class _SightBuilder:
    """Collects what the rows of an iteration see with a window, or without one."""

    def __init__(self, engine: Engine, window: int | None) -> None:
        self._engine, self._window = engine, window
        self._at_master = window is not None and bool(engine.pool.windowed)
        """Flag that all that rows see lies at their master."""
        self._here = engine.instance
        self._outgoing: dict[int, list[int]] = {}
        self._incoming: dict[int, int] = {}
        self._resident: dict[int | None, list[SlotsOfSequence]] = {}
        self._hidden: dict[int | None, list[int]] = {}
        self._chunks: dict[int | None, list[tuple[range, Sequence[range]]]] = {}
        """Positions of each chunk's rows, and runs of slots with earlier ones, by peer."""

    def decode(self, sequence: BatchSequence, row: int) -> None:
        """Add a sequence that decodes; `row` is that of its master."""
        hidden = None if self._window is None else sequence.next - self._window
        master = sequence.request.master
        if self._at_master:
            holders = {master}
        else:
            holders = sequence.holders if hidden is None else sequence.holders_behind(hidden)
        if sequence.slots is not None and self._here in (master, *holders):
            asker = self._asker(master)
            self._resident.setdefault(asker, []).append(sequence.slots)
            if hidden is not None:
                self._hidden.setdefault(asker, []).append(hidden)
        self._ask(master, holders, range(row, row + 1))

    def chunk(self, sequence: BatchSequence, span: Span, row: int) -> None:
        """Add a chunk of a prompt, from its master's row `row` on."""
        assert not self._at_master, "near keys before a chunk are not here"
        first = 0 if self._window is None else max(0, span.start - self._window + 1)
        before = Span(start=first, stop=max(first, span.start))
        master = sequence.request.master
        holders = {kv_slice.instance for kv_slice in sequence.slices_of(before)}
        if self._here in holders or master == self._here:
            runs = self._engine.pool.slots.runs(sequence.sequence_id, before)
            resident = self._chunks.setdefault(self._asker(master), [])
            resident.append((span.positions, runs))
        self._ask(master, holders, range(row, row + span.length))

    def visible(self, rows: int) -> VisibleKv:
        """Return what was collected, for so many own rows."""
        return VisibleKv(
            window=self._window,
            routes=QueryRoutes(
                rows=rows,
                resident_here=range(rows),
                outgoing=self._outgoing,
                incoming=self._incoming,
            ),
            resident={
                peer: ResidentRows(slots, self._hidden.get(peer))
                for peer, slots in self._resident.items()
            },
            resident_chunks={
                peer: ResidentChunks(
                    runs=ChunkRuns([len(rows) for rows, _ in chunks], [runs for _, runs in chunks]),
                    near=None if self._window is None else self._near(chunks),
                )
                for peer, chunks in self._chunks.items()
            },
        )

    def _near(self, chunks: Sequence[tuple[range, Sequence[range]]]) -> ResidentNearKeys:
        pool, device = self._engine.pool, self._engine.device
        none = torch.empty(0, dtype=torch.int64)
        runs = [run for _, of_chunk in chunks for run in of_chunk]
        positions = torch.cat([none, *(pool.slots.positions(run) for run in runs)])
        slots = torch.cat([none, *(torch.arange(run.start, run.stop) for run in runs)])
        rows = torch.cat([torch.arange(rows.start, rows.stop) for rows, _ in chunks])
        lengths = (sum(map(len, of_chunk)) for _, of_chunk in chunks)
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return ResidentNearKeys(
            rows=rows.to(device),
            positions=positions.to(device),
            slots=slots.to(device),
            offsets=offsets.to(device),
        )

    def _ask(self, master: int, holders: set[int], rows: range) -> None:
        """Ask the holders of KV about own rows, or be asked."""
        if master == self._here:
            for holder in sorted(holders - {self._here}):
                self._outgoing.setdefault(self._peer(holder), []).extend(rows)
        elif self._here in holders:
            peer = self._peer(master)
            self._incoming[peer] = self._incoming.get(peer, 0) + len(rows)

    def _asker(self, master: int) -> int | None:
        return None if master == self._here else self._peer(master)

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)


class _Builder:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._here = engine.instance
        self._batch = IterationBatch()
        self._whole = _SightBuilder(engine, None)
        self._near = _SightBuilder(engine, engine.spec.window)
        self._visible = [self._whole] if engine.spec.window is None else [self._whole, self._near]
        self._count = 0

    def batch(self, sequences: Sequence[BatchSequence], lengths: Sequence[int]) -> IterationBatch:
        active = [
            (sequence, length)
            for sequence, length in zip(sequences, lengths, strict=True)
            if length
        ]
        for sequence, _ in active:
            if sequence.decodes:
                self._decode(sequence)
        for sequence, length in active:
            if not sequence.decodes:
                self._chunk(sequence, length)
        self._batch.whole = self._whole.visible(self._count)
        self._batch.near = self._near.visible(self._count)
        return self._batch

    def _decode(self, sequence: BatchSequence) -> None:
        master, next_holder = sequence.request.master, sequence.next_holder
        if sequence.slots is not None and next_holder == self._here != master:
            received = self._batch.received.setdefault(self._peer(master), [])
            received.append(sequence.slots.append())
        for visible in self._visible:
            visible.decode(sequence, self._count)
        if master == self._here:
            at = self._count
            self._count += 1
            self._batch.decoding.append(sequence)
            if next_holder != self._here:
                sent = self._batch.sent.setdefault(self._peer(next_holder), [])
                sent.append(slice(at, at + 1))
            elif sequence.slots is not None:
                self._batch.growing.append((sequence.slots, at))

    def _chunk(self, sequence: BatchSequence, length: int) -> None:
        span = Span(start=sequence.next, stop=sequence.next + length)
        self._place_kv(sequence, span)
        for visible in self._visible:
            visible.chunk(sequence, span, self._count)
        if sequence.request.master == self._here:
            at = slice(self._count, self._count + length)
            self._count += length
            self._batch.chunks.append(IterationChunk(sequence=sequence, span=span, rows=at))

    def _place_kv(self, sequence: BatchSequence, span: Span) -> None:
        """Plan where a chunk's keys and values go."""
        master = sequence.request.master
        for kv_slice in sequence.slices_of(span):
            own = range(self._count, self._count + span.length)[span.rows_of(kv_slice.span)]
            if kv_slice.instance == self._here:
                slots = self._engine.pool.slots.by_position(
                    sequence.sequence_id, kv_slice.span
                ).tolist()
                if master == self._here:
                    self._batch.stored_rows += own
                    self._batch.stored_slots += slots
                else:
                    self._batch.received.setdefault(self._peer(master), []).extend(slots)
            elif master == self._here:
                sent = self._batch.sent.setdefault(self._peer(kv_slice.instance), [])
                sent.append(slice(own.start, own.stop, own.step))

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)


def attend_resident(
    engine: Engine,
    visible: VisibleKv,
    layer: int,
    peer: int | None,
    q_rhd: Tensor,
    own: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the partial attention of one master's rows over KV resident here.

    Args:
        peer: rank whose rows they are; None for own ones.
        q_rhd: queries of decoding sequences, then of chunks.
        own: k_rgd and v_rgd of own rows, to which own chunks attend causally.

    Returns:
        fp32 out (r, h, d) and lse (r, h); -inf for rows that attend to nothing.
    """
    resident = visible.resident.get(peer)
    first = len(resident.sequences) if resident is not None else 0
    parts: list[tuple[Tensor, Tensor]] = []
    if resident is not None:
        parts.append(engine.attend_rows(layer, q_rhd[:first], resident))
    if (chunks := visible.resident_chunks.get(peer)) is not None:
        rows = slice(first, first + chunks.runs.rows)
        kv = None if own is None else (own[0][rows], own[1][rows])
        parts.append(_attend_chunks(engine, chunks, layer, q_rhd[rows], kv, visible.window))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_chunks(
    engine: Engine,
    chunks: ResidentChunks,
    layer: int,
    q_nhd: Tensor,
    own: tuple[Tensor, Tensor] | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attend all chunks to the KV before them and, causally, to themselves: two calls, whatever
    chunks there are."""
    k_sgd, v_sgd = engine.pool.layer(layer)
    scale, offsets = engine.spec.scale, chunks.runs.offsets_on(engine.device)
    seen: list[tuple[Tensor, Tensor]] = []
    if chunks.near is None:
        # What lies before a chunk precedes every row, so no positions are compared.
        if chunks.runs.depth or own is None:
            seen.append(chunk_attention(q_nhd, k_sgd, v_sgd, chunks.runs, scale=scale))
    elif len(chunks.near.slots) or own is None:
        near = chunks.near
        seen.append(
            attention(
                q_nhd,
                engine.pool.numbers(k_sgd[near.slots]),
                engine.pool.numbers(v_sgd[near.slots]),
                q_positions=near.rows,
                k_positions=near.positions,
                scale=scale,
                cu_seqlens_q=offsets,
                cu_seqlens_k=near.offsets,
                window=window,
            )
        )
    if own is not None:
        rows = range(len(q_nhd))
        seen.append(
            attention(
                q_nhd,
                *own,
                q_positions=rows,
                k_positions=rows,
                scale=scale,
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                window=window,
            )
        )
    out_nhd, lse_hn = seen[0]
    if len(seen) == 2:
        merge_into(out_nhd, lse_hn, *seen[1])
    return out_nhd, lse_hn.T


def forward(
    engine: Engine, batch: IterationBatch, times: QueryExchangeTimes | None = None
) -> Tensor:
    """Return the logits of the own rows for which a token is sampled.

    Args:
        times: totals to which the times of the query exchange are added.
    """
    network, pool = engine.network, engine.pool
    device = engine.device
    if not batch.rows:
        return _serve_others(engine, batch)
    x_td = network.embed(_tokens(batch).to(device))
    rotary = network.rotary(_positions(batch).to(device))
    slots = [resident.append() for resident, _ in batch.growing] + batch.stored_slots
    stored = [row for _, row in batch.growing] + batch.stored_rows
    slots_t = torch.tensor(slots, dtype=torch.int64, device=device)
    stored_t = torch.tensor(stored, dtype=torch.int64, device=device)
    stores_all = stored == list(range(batch.rows))
    near_slots = [
        sequence.slots.ring.slot(sequence.next)
        for sequence in batch.decoding
        if sequence.slots is not None and sequence.slots.ring is not None
    ]
    near_t = torch.tensor(near_slots, dtype=torch.int64, device=device)
    for visible in (batch.whole, batch.near):
        if None in visible.resident:
            visible.resident[None].grown()
    exchanges = _exchanges(engine, batch)
    for index, (layer, others) in enumerate(zip(network.layers, exchanges, strict=True)):
        q_rhd, k_rhd, v_rhd = layer.qkv(x_td, rotary)
        if index in pool.windowed:
            pool.write_slots(index, near_t, k_rhd, v_rhd)
        elif stores_all:
            pool.write_slots(index, slots_t, k_rhd, v_rhd)
        elif stored:
            pool.write_slots(index, slots_t, k_rhd[stored_t], v_rhd[stored_t])
        out_rhd = others.attend(q_rhd, k_rhd, v_rhd, times)
        x_td = layer.finish(x_td, out_rhd.to(q_rhd.dtype))
    if batch.chunks:
        x_td = x_td[[at for _, at in batch.sampling]]
    return network.logits(x_td)


def _serve_others(engine: Engine, batch: IterationBatch) -> Tensor:
    """Run an iteration without own rows: only answer the queries of others."""
    spec, pool = engine.spec, engine.pool
    none_rhd = engine.network.embedding_vd.new_empty(0, engine.heads, spec.head_dim)
    no_kv_rhd = none_rhd.new_empty(0, pool.kv_heads, spec.head_dim)
    for others in _exchanges(engine, batch):
        others.attend(none_rhd, no_kv_rhd, no_kv_rhd)
    return none_rhd.new_empty(0, spec.vocab)


def _exchanges(engine: Engine, batch: IterationBatch) -> Iterable[_LayerExchange]:
    """Return one exchange for each layer."""
    # With gloo, receives of all layers are posted ahead. Where exchanges are in order none is
    # posted, and all layers' buffers at once would only take memory on the device.
    layers = (_LayerExchange(engine, batch, index) for index in range(engine.spec.layers))
    return layers if engine.mesh.in_order else list(layers)


class _LayerExchange:
    """One layer's exchange with peers that hold KV of own rows, or whose rows have KV here.
    Receives are posted by the constructor."""

    def __init__(self, engine: Engine, batch: IterationBatch, index: int) -> None:
        self._engine, self._batch, self._index = engine, batch, index
        self._sight = batch.whole if engine.spec.window_of(index) is None else batch.near
        pool = engine.pool
        # In layers whose KV is all at the masters, none is sent.
        self._sent = {} if index in pool.windowed else batch.sent
        self._arriving = {
            peer: pool.k.new_empty(len(slots), 2, pool.kv_heads, pool.width)
            for peer, slots in ({} if index in pool.windowed else batch.received).items()
        }
        self._kv_exchange = engine.mesh.expect(list(self._arriving.items()), Tag.STORED_ROWS)
        self._exchange = QueryExchange(
            engine.mesh,
            self._sight.routes,
            engine.network.embedding_vd,
            heads=engine.heads,
            head_dim=pool.head_dim,
            tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
        )

    def attend(
        self,
        q_rhd: Tensor,
        k_rhd: Tensor,
        v_rhd: Tensor,
        times: QueryExchangeTimes | None = None,
    ) -> Tensor:
        """Return the own rows' attention over all their KV, wherever it lies. New keys and values
        reach their holders before the queries do, and are stored before the holders answer."""
        others = self._sent or self._arriving
        exchanged = (
            self._kv_exchange.send(self._outgoing_kv(k_rhd, v_rhd)) if others else Pending([], [])
        )

        def partial(peer: int | None, asked_rhd: Tensor) -> tuple[Tensor, Tensor]:
            if peer is not None:
                self._store(exchanged)
            own = (k_rhd, v_rhd) if peer is None else None
            return attend_resident(self._engine, self._sight, self._index, peer, asked_rhd, own)

        sinks_h = self._engine.sinks(self._index)
        out_rhd = exchange_queries(q_rhd, self._exchange, partial, times, sinks_h)
        self._store(exchanged)
        return out_rhd

    def _outgoing_kv(self, k_rhd: Tensor, v_rhd: Tensor) -> list[tuple[int, Tensor]]:
        pool = self._engine.pool
        kv_rhd = torch.stack((pool.stored(k_rhd), pool.stored(v_rhd)), 1)
        sent = self._sent.items()
        return [(peer, torch.cat([kv_rhd[rows] for rows in cuts])) for peer, cuts in sent]

    def _store(self, exchanged: Pending) -> None:
        """Store the keys and values that peers have sent, once."""
        exchanged.wait()
        while self._arriving:
            peer, arrived = self._arriving.popitem()
            slots_t = self._batch.received_at(peer, arrived.device)
            self._engine.pool.write_slots(self._index, slots_t, arrived[:, 0], arrived[:, 1])


def _tokens(batch: IterationBatch) -> Tensor:
    """Return the tokens of own rows, (r,) int64."""
    decoding = torch.tensor([sequence.token for sequence in batch.decoding], dtype=torch.int64)
    chunks = [
        torch.from_numpy(chunk.sequence.tokens(chunk.span).astype(np.int64))
        for chunk in batch.chunks
    ]
    return torch.cat([decoding, *chunks]) if chunks else decoding


def _positions(batch: IterationBatch) -> Tensor:
    """Return the positions of own rows, (r,) int64."""
    decoding = torch.tensor([sequence.next for sequence in batch.decoding], dtype=torch.int64)
    chunks = [torch.arange(chunk.span.start, chunk.span.stop) for chunk in batch.chunks]
    return torch.cat([decoding, *chunks]) if chunks else decoding
