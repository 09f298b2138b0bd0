"""Attention to history: the KV of earlier chunks, on any instances of the group.

    queries of each member --> the ranks that hold history of their chunks
    attention there, without a mask, since history precedes every row
    (out, LSE) --> back, merged into the attention of the chunk itself

So history may have any placement. A strategy only chooses the point in a layer where every member
asks: with own rows of all heads, or with all rows of own heads (CP Alg. 3). If the history is far
shorter than the chunk, keys and values are fewer bytes than queries and outputs (CP Alg. 1);
`ring_kv` then passes the history around the ring.

Shape suffixes: n query rows, s tokens of history, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from csps.actors.attention.base.group import (
    HeadSplit,
    SpGroup,
    span_positions,
    spans_on,
    uniform_heads,
)
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, Transfers
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_cache.sequence_slots import SlotSet
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk


class ResidentHistory:
    """History of a step's chunks in this member's pool; slots are looked up once for all layers.

    Args:
        window: positions that layers with a window see.
    """

    def __init__(self, group: SpGroup, pool: KvPool, *, window: int | None = None) -> None:
        self._group, self._pool, self._window = group, pool, window
        self._slots: dict[int, slice | Tensor] = {}

    def near_spans(self, chunk: PrefillChunk, instance: int) -> list[Span]:
        """Return the history on an instance that any row of a chunk sees in a layer with a
        window."""
        assert self._window is not None, "no layer has a window"
        near = Span(max(0, chunk.start - self._window + 1), chunk.start)
        spans = (span.intersection(near) for span in spans_on(chunk.history, instance))
        return [span for span in spans if span.length]

    def near_keys(self, layer: int, chunk: PrefillChunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return k and v of the resident part of `near_spans`, and its positions."""
        spans = self.near_spans(chunk, self._group.step.group[self._group.member])
        found = [self._pool.read(layer, chunk.sequence_id, span) for span in spans]
        k_sgd, v_sgd = (self._pool.numbers(torch.cat(parts)) for parts in zip(*found, strict=True))
        return k_sgd, v_sgd, span_positions(spans).to(k_sgd.device)

    def keys(self, layer: int, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """Return k and v of the resident history of a chunk, (s, g, d), in any order."""
        assert not self._pool.narrowed(layer, chunk.sequence_id), (
            f"history of sequence {chunk.sequence_id} has kept tokens only in layer {layer}"
        )
        pool, slots = self._pool, self._slots_of(chunk)
        k_shd, v_shd = pool.layer(layer)
        if isinstance(slots, slice):
            k_sgd, v_sgd = k_shd[slots], v_shd[slots]
        else:
            k_sgd, v_sgd = k_shd.index_select(0, slots), v_shd.index_select(0, slots)
        return pool.numbers(k_sgd), pool.numbers(v_sgd)

    def _slots_of(self, chunk: PrefillChunk) -> slice | Tensor:
        """Return the slots of a chunk's history, the same in all layers."""
        if chunk.sequence_id not in self._slots:
            pool_slots = self._pool.slots
            spans = self._group.history_of(chunk, self._group.member)
            # The order of keys does not matter to attention, so adjacent runs may be joined; a
            # single run is a slice, which is read without a copy.
            runs = list(
                SlotSet(run for span in spans for run in pool_slots.runs(chunk.sequence_id, span))
            )
            slots: slice | Tensor = slice(runs[0].start, runs[0].stop)
            if len(runs) > 1:
                numbers = torch.cat([torch.arange(run.start, run.stop) for run in runs])
                slots = numbers.to(self._pool.k.device)
            self._slots[chunk.sequence_id] = slots
        return self._slots[chunk.sequence_id]


Messages = Sequence[tuple[int, Tensor]]
"""(peer, tensor)."""
WaitExchange = Callable[[], None]
Begin = Callable[[Messages, Messages, Tag, Label], WaitExchange]
"""Function that begins an exchange of (sends, recvs) and returns a function to wait for it."""


@dataclass(frozen=True, kw_only=True)
class HistoryMember:
    """Queries and KV of one rank of the group; all members know all of these.

    Heads are numbered over all ranks of the group together.
    """

    rank: int
    instance: int
    rows: tuple[range, ...]
    """Rows of its queries that belong to each chunk (`rows_by_chunk`)."""
    heads: range
    """Query heads of these rows."""
    resident: range
    """KV heads in its pool."""


def members_of(
    group: SpGroup,
    *,
    rows: Callable[[int], tuple[range, ...]],
    heads: Callable[[int], range],
    resident: range,
) -> list[HistoryMember]:
    """Return the members of the group at this rank's tp rank.

    Args:
        rows: function that returns the rows of a member by chunk.
        heads: function that returns the query heads of a member.
        resident: KV heads in the pool of every member.
    """
    return [
        HistoryMember(
            rank=rank, instance=instance, rows=rows(member), heads=heads(member), resident=resident
        )
        for member, (rank, instance) in enumerate(zip(group.peers, group.step.group, strict=True))
    ]


def members_by_heads(group: SpGroup, split: HeadSplit) -> list[HistoryMember]:
    """Return members that each ask with all rows of their own query heads."""
    rows = rows_by_chunk(group.step.chunks, range(group.total_rows))
    return members_of(
        group,
        rows=lambda member: rows,
        heads=lambda member: range(split.heads)[split.queries(member)],
        resident=range(split.kv_heads),
    )


@dataclass(frozen=True)
class _Question:
    """Query rows of one member that one holder attends to its history of one chunk."""

    chunk: int
    rows: range
    """Rows of the asker's queries."""
    heads: range
    positions: range | None = None
    """Positions of the rows, in a layer with a window."""


class History:
    """History of the chunks of one step, as one member sees it.

    Args:
        members: ranks of the group; they answer for the KV heads of their instances.
        group_heads: query heads of a KV head.
        begin: function that begins an exchange of the strategy.
        asks: function that returns True for chunks whose history is asked for; a strategy may
            move the history of other chunks by itself.
        window: positions that layers with a window see. Their rows are those of whole chunks.
        windowed: these layers.
    """

    def __init__(
        self,
        group: SpGroup,
        pool: KvPool,
        members: Sequence[HistoryMember],
        *,
        group_heads: int,
        scale: float,
        begin: Begin,
        asks: Callable[[PrefillChunk], bool] = lambda chunk: True,
        window: int | None = None,
        windowed: Set[int] = frozenset(),
    ) -> None:
        self.group, self.pool = group, pool
        self.window, self._windowed = window, windowed
        self.resident = ResidentHistory(group, pool, window=window)
        self.group_heads, self.scale = group_heads, scale
        self.begin = begin
        self.own = next(member for member in members if member.rank == group.mesh.rank)
        self._members = tuple(members)
        self._asks = asks
        self.any = any(chunk.history and asks(chunk) for chunk in group.step.chunks)
        """True if history is asked for. Every layer then has a phase for it, even if the chunk is
        cancelled later."""
        as_asker = [(self.own, holder) for holder in members]
        as_holder = [(asker, self.own) for asker in members]
        self._asked_of, self._asked_by = self._routes(as_asker), self._routes(as_holder)
        if windowed:
            self._near_of = self._routes(as_asker, near=True)
            self._near_by = self._routes(as_holder, near=True)

    def asked_of(self, layer: int) -> dict[int, tuple[_Question, ...]]:
        """Return the questions of this member to each holder."""
        return self._active(self._near_of if layer in self._windowed else self._asked_of)

    def asked_by(self, layer: int) -> dict[int, tuple[_Question, ...]]:
        """Return the questions of each asker to this member."""
        return self._active(self._near_by if layer in self._windowed else self._asked_by)

    def ask(self, layer: int, q_nhd: Tensor) -> HistoryQueries:
        """Send queries of own rows and heads to the holders.

        All members ask at the same point of a layer, also those without queries.

        Args:
            q_nhd: all rows and `heads` of this member.
        """
        return HistoryQueries(self, layer, q_nhd)

    def _active(
        self, questions: Mapping[int, Sequence[_Question]]
    ) -> dict[int, tuple[_Question, ...]]:
        """Return the questions without those of cancelled chunks."""
        # All members know of a cancellation from the same layer on, so their messages match.
        chunks = self.group.step.chunks
        active = {
            rank: tuple(
                question for question in asked if self.group.is_active(chunks[question.chunk])
            )
            for rank, asked in questions.items()
        }
        return {rank: asked for rank, asked in active.items() if asked}

    def _near_question(self, question: _Question, instance: int) -> _Question:
        """Return a question of a layer with a window: without the rows that see nothing there."""
        chunk = self.group.step.chunks[question.chunk]
        spans = self.resident.near_spans(chunk, instance)
        assert self.window is not None, "no layer has a window"
        assert len(question.rows) == chunk.length, "an asker without all rows of the chunk"
        last = max((span.stop - 1 for span in spans), default=-1)
        count = min(chunk.length, max(0, last + self.window - chunk.start))
        rows = question.rows[: count if spans else 0]
        positions = range(chunk.start, chunk.start + len(rows))
        return replace(question, rows=rows, positions=positions)

    def _routes(
        self, pairs: Sequence[tuple[HistoryMember, HistoryMember]], *, near: bool = False
    ) -> dict[int, tuple[_Question, ...]]:
        """Return the questions of each (asker, holder), by the rank that is not this member.

        Args:
            near: in layers with a window.
        """
        # This member's questions to itself have its own rank as key.
        routes: dict[int, tuple[_Question, ...]] = {}
        for asker, holder in pairs:
            other = holder if asker is self.own else asker
            asked = self._questions(asker, holder)
            if near:
                asked = (self._near_question(question, holder.instance) for question in asked)
            routes[other.rank] = tuple(question for question in asked if question.rows)
        return routes

    def _questions(self, asker: HistoryMember, holder: HistoryMember) -> Iterator[_Question]:
        heads = self._heads(asker, holder)
        if not heads:
            return
        chunks = self.group.step.chunks
        for index, (chunk, rows) in enumerate(zip(chunks, asker.rows, strict=True)):
            resident = any(kv_slice.instance == holder.instance for kv_slice in chunk.history)
            if rows and resident and self._asks(chunk):
                yield _Question(index, rows, heads)

    def _heads(self, asker: HistoryMember, holder: HistoryMember) -> range:
        """Return the asker's query heads that the holder answers for."""
        # These are adjacent: ranks have disjoint ranges of KV heads or, if there are fewer KV
        # heads than ranks, a single one each.
        answered = [head for head in asker.heads if self._holder(asker, holder, head) is holder]
        return range(answered[0], answered[-1] + 1) if answered else range(0)

    def _holder(
        self, asker: HistoryMember, holder: HistoryMember, head: int
    ) -> HistoryMember | None:
        """Return the member of the holder's instance that answers for a query head.

        It is the asker, if the asker has the KV head.
        """
        able = [
            member
            for member in self._members
            if member.instance == holder.instance and head // self.group_heads in member.resident
        ]
        return asker if asker in able else next(iter(able), None)


class HistoryQueries:
    """Exchange of the questions and answers of one layer."""

    def __init__(self, history: History, layer: int, q_nhd: Tensor) -> None:
        self._history, self._layer, self._q_nhd = history, layer, q_nhd
        self._asked_of, self._asked_by = history.asked_of(layer), history.asked_by(layer)
        self._keys: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._answers: dict[int, Tensor] = {}
        self._foreign = {
            rank: q_nhd.new_empty(sum(prod(self._shape(question)) for question in asked))
            for rank, asked in self._asked_by.items()
            if rank != history.own.rank
        }
        self._wait = self._begin(
            [(rank, self._pack_queries(asked)) for rank, asked in self._others(self._asked_of)],
            list(self._foreign.items()),
            Tag.HISTORY,
        )

    def answer(self) -> None:
        """Attend own queries, and those of others when they have arrived, to the resident history.

        Begins to send the answers. Passes yield points between blocks.
        """
        own = self._history.own.rank
        if own in self._asked_of:
            queries = [self._own_queries(question) for question in self._asked_of[own]]
            self._answers[own] = self._answer_questions(self._asked_of[own], queries)
        self._wait()
        replies = [
            (rank, self._answer_questions(asked, self._views(asked, self._foreign.pop(rank))))
            for rank, asked in self._others(self._asked_by)
        ]
        self._keys.clear()
        arriving = {
            rank: self._answer_buffer(asked, self._q_nhd)
            for rank, asked in self._others(self._asked_of)
        }
        self._answers |= arriving
        if self._history.any:
            self._history.group.points.close()
        self._wait = self._begin(replies, list(arriving.items()), Tag.HISTORY_ANSWER)

    def merge_into(self, out_nhd: Tensor, lse_hn: Tensor) -> None:
        """Wait for all answers and merge them into a running result of own rows and heads.

        Args:
            out_nhd, lse_hn: fp32, or fp64 for fp64 inputs; overwritten.
        """
        self._wait()
        own = self._history.own
        for rank, asked in self._asked_of.items():
            results = self._results(asked, self._answers.pop(rank))
            for question, part in zip(asked, results, strict=True):
                rows = slice(question.rows.start, question.rows.stop)
                heads = _relative(question.heads, own.heads)
                merge_into(out_nhd[rows, heads], lse_hn[heads, rows], *part)

    # --- attention ---------------------------------------------------------------------------

    def _answer_questions(self, asked: Sequence[_Question], queries: Sequence[Tensor]) -> Tensor:
        """Compute the packed answers to one member."""
        payload = self._answer_buffer(asked, self._q_nhd)
        results = self._results(asked, payload)
        for question, q_nhd, (out_nhd, lse_hn) in zip(asked, queries, results, strict=True):
            self._attend(question, q_nhd, out_nhd, lse_hn)
        return payload

    def _attend(self, question: _Question, q_nhd: Tensor, out_nhd: Tensor, lse_hn: Tensor) -> None:
        group, history = self._history.group, self._history
        if question.chunk not in self._keys:
            self._keys[question.chunk] = self._resident_keys(question)
        k_sgd, v_sgd, k_positions = self._keys[question.chunk]
        for rows in query_blocks(q_nhd, len(k_sgd)):
            with group.clock.timeline.phase("attention", layer=self._layer):
                for queries, keys in uniform_heads(question.heads, history.group_heads):
                    heads, resident = (
                        _relative(queries, question.heads),
                        _relative(keys, history.own.resident),
                    )
                    out_nhd[rows, heads], lse_hn[heads, rows] = attention(
                        q_nhd[rows, heads],
                        k_sgd[:, resident],
                        v_sgd[:, resident],
                        q_positions=question.positions and question.positions[rows],
                        k_positions=k_positions,
                        scale=history.scale,
                        window=None if question.positions is None else history.window,
                    )
            group.points.point()

    def _resident_keys(self, question: _Question) -> tuple[Tensor, Tensor, Tensor | None]:
        chunk, resident = (
            self._history.group.step.chunks[question.chunk],
            self._history.resident,
        )
        if question.positions is not None:
            return resident.near_keys(self._layer, chunk)
        return *resident.keys(self._layer, chunk), None

    # --- messages ----------------------------------------------------------------------------

    def _begin(self, sends: Messages, recvs: Messages, tag: Tag) -> WaitExchange:
        if not sends and not recvs:
            return _nothing
        label = Label(phase="history exchange", layer=self._layer)
        return self._history.begin(sends, recvs, tag, label)

    def _others(
        self, asked: Mapping[int, tuple[_Question, ...]]
    ) -> Iterator[tuple[int, tuple[_Question, ...]]]:
        own = self._history.own.rank
        return ((rank, questions) for rank, questions in asked.items() if rank != own)

    def _own_queries(self, question: _Question) -> Tensor:
        rows, heads = question.rows, _relative(question.heads, self._history.own.heads)
        return self._q_nhd[rows.start : rows.stop, heads]

    def _pack_queries(self, asked: Sequence[_Question]) -> Tensor:
        return torch.cat([self._own_queries(question).reshape(-1) for question in asked])

    def _shape(self, question: _Question) -> tuple[int, int, int]:
        return len(question.rows), len(question.heads), self._history.pool.head_dim

    def _views(self, asked: Sequence[_Question], payload: Tensor) -> list[Tensor]:
        """Return the queries (n, h, d) of each question."""
        shapes = [self._shape(question) for question in asked]
        parts = torch.split(payload, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _answer_buffer(self, asked: Sequence[_Question], like: Tensor) -> Tensor:
        """Allocate a buffer for answers: all outputs, then all LSEs."""
        dim = self._history.pool.head_dim
        rows = sum(len(question.rows) * len(question.heads) for question in asked)
        return like.new_empty(
            rows * (dim + 1), dtype=torch.promote_types(like.dtype, torch.float32)
        )

    def _results(self, asked: Sequence[_Question], payload: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views (out (n, h, d), lse (h, n)) of the answer to each question."""
        dim = self._history.pool.head_dim
        lse_count = len(payload) // (dim + 1)
        outs, lses = torch.split(payload, [lse_count * dim, lse_count])
        rows = [len(question.rows) * len(question.heads) for question in asked]
        lse_views = [
            lse.view(len(question.heads), len(question.rows))
            for question, lse in zip(asked, torch.split(lses, rows), strict=True)
        ]
        return list(zip(self._views(asked, outs), lse_views, strict=True))


def rows_by_chunk(chunks: Sequence[PrefillChunk], rows: range) -> tuple[range, ...]:
    """Return which of a member's adjacent batch rows belong to each chunk.

    Rows are numbered from the member's first.
    """
    ends = accumulate(chunk.length for chunk in chunks)
    bounds = (
        (max(rows.start, end - chunk.length) - rows.start, min(rows.stop, end) - rows.start)
        for chunk, end in zip(chunks, ends, strict=True)
    )
    return tuple(range(first, max(first, stop)) for first, stop in bounds)


def overlapping(transfers: Transfers) -> Begin:
    """Return a function that begins exchanges which overlap computing."""

    def begin(sends: Messages, recvs: Messages, tag: Tag, label: Label) -> WaitExchange:
        transfer = transfers.start(sends, recvs, tag, label)
        return lambda: transfers.wait(transfer)

    return begin


def _nothing() -> None:
    """Return at once: no exchange was begun."""


def _relative(inner: range, outer: range) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
