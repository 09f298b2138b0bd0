"""The history that a member holds of a step's pieces: the KV of their earlier chunks, in its pool.

Shape suffixes: s tokens of history, g KV heads, d head dim.

History is a merge: attention over the KV of earlier chunks, wherever in the group it lies.

    queries that each member owns --> the ranks that hold history of their pieces
    attention there, without a mask: history precedes every row
    (out, LSE) <-- merged into what the strategy has computed of the chunk itself

So history may be cut and placed in any way, and strategies know nothing of it but the point in a
layer where every member asks: with own rows of all heads, or with all rows of own heads, whatever
it has there (CP Alg. 3). Where the history is far shorter than the chunk, keys and values would be
fewer bytes than queries and outputs (CP Alg. 1): `ring_kv` lets such history go round instead.

Shape suffixes: n query rows, s tokens of history, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from csps.actors.attention.base.group import HeadSplit, SpGroup, uniform_heads
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, Transfers
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_cache.sequence_slots import SlotSet
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into
from csps.protocols.gang.step_messages import PrefillChunk


class ResidentHistory:
    """One member's, looked up once for all layers."""

    def __init__(self, group: SpGroup, pool: KvPool) -> None:
        self._group, self._pool = group, pool
        self._slots: dict[int, slice | Tensor] = {}

    def keys(self, layer: int, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """k and v of a piece's history that lies here, (s, g, d), in no particular order."""
        assert not self._pool.narrowed(layer, chunk.sequence_id), "history has kept tokens only"
        k_shd, v_shd = self._pool.layer(layer)
        slots = self._slots_of(chunk)
        if isinstance(slots, slice):
            return k_shd[slots], v_shd[slots]
        return k_shd.index_select(0, slots), v_shd.index_select(0, slots)

    def _slots_of(self, chunk: PrefillChunk) -> slice | Tensor:
        """Where a piece's history lies here, alike in all layers: a slice if it is one run, which
        is read where it lies."""
        if chunk.sequence_id not in self._slots:
            held = self._pool.slots
            spans = self._group.history_of(chunk, self._group.member)
            # Attention does not care about the order of keys.
            runs = list(
                SlotSet(run for span in spans for run in held.runs(chunk.sequence_id, span))
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
"""Begins an exchange of (sends, recvs); what it returns blocks until both are done."""


@dataclass(frozen=True, kw_only=True)
class HistoryMember:
    """One rank of the group: what it asks with, and what it holds. All members know all of them.
    Heads are numbered over what the group's ranks have together."""

    rank: int
    instance: int
    rows: tuple[range, ...]
    """By piece, which rows of its queries are the piece's (`rows_by_chunk`)."""
    heads: range
    """Query heads that it has them of."""
    resident: range
    """KV heads in its pool."""


def members_of(
    group: SpGroup,
    *,
    rows: Callable[[int], tuple[range, ...]],
    heads: Callable[[int], range],
    resident: range,
) -> list[HistoryMember]:
    """The group's members at this rank's place in their instances.

    Args:
        rows, heads: of a member; `resident` is everyone's.
    """
    return [
        HistoryMember(
            rank=rank, instance=instance, rows=rows(member), heads=heads(member), resident=resident
        )
        for member, (rank, instance) in enumerate(zip(group.peers, group.step.group, strict=True))
    ]


def members_by_heads(group: SpGroup, split: HeadSplit) -> list[HistoryMember]:
    """Members that each ask with all rows of their own query heads."""
    rows = rows_by_chunk(group.step.chunks, range(group.total_rows))
    return members_of(
        group,
        rows=lambda member: rows,
        heads=lambda member: range(split.heads)[split.queries(member)],
        resident=range(split.kv_heads),
    )


@dataclass(frozen=True)
class _Question:
    """Query rows of one member that one holder attends to its history of one piece with."""

    chunk: int
    rows: range
    """Of the asker's queries."""
    heads: range


class History:
    """The history of one job's pieces, as one member sees it.

    Args:
        members: ranks of the group; an instance's KV heads are answered for by those of its ranks
            that are among them.
        group_heads: query heads of a KV head.
        begin: how the strategy exchanges.
        asks: of which pieces; a strategy may bring the others' history by on its own.
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
    ) -> None:
        self.group, self.pool = group, pool
        self.resident = ResidentHistory(group, pool)
        self.group_heads, self.scale = group_heads, scale
        self.begin = begin
        self.own = next(member for member in members if member.rank == group.mesh.rank)
        self._members = tuple(members)
        self._asks = asks
        self.any = any(chunk.history and asks(chunk) for chunk in group.step.chunks)
        """Then every layer has a phase for it, even if nobody wants the piece any more."""
        self.asked_of = self._routes((self.own, holder) for holder in members)
        """By holder, what this member asks of it."""
        self.asked_by = self._routes((asker, self.own) for asker in members)
        """By asker, what it asks here."""

    def ask(self, layer: int, q_nhd: Tensor) -> HistoryQueries:
        """Queries of own rows and heads, on their way to the holders. All members ask at the same
        point of a layer, those without queries too.

        Args:
            q_nhd: all rows and `heads` of this member.
        """
        return HistoryQueries(self, layer, q_nhd)

    def wanted(
        self, questions: Mapping[int, Sequence[_Question]]
    ) -> dict[int, tuple[_Question, ...]]:
        """Without pieces that were withdrawn, which all members know at the same layer."""
        chunks = self.group.step.chunks
        kept = {
            rank: tuple(it for it in asked if self.group.wanted(chunks[it.chunk]))
            for rank, asked in questions.items()
        }
        return {rank: asked for rank, asked in kept.items() if asked}

    def _routes(
        self, pairs: Iterator[tuple[HistoryMember, HistoryMember]]
    ) -> dict[int, tuple[_Question, ...]]:
        """By the one of each (asker, holder) that is not this member, or by itself."""
        routes: dict[int, tuple[_Question, ...]] = {}
        for asker, holder in pairs:
            other = holder if asker is self.own else asker
            routes[other.rank] = tuple(self._questions(asker, holder))
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
        """Of the asker's query heads those that the holder answers for: neighbours, as ranks hold
        disjoint ranges of KV heads or, where there are fewer of them than ranks, a single one."""
        answered = [head for head in asker.heads if self._holder(asker, holder, head) is holder]
        return range(answered[0], answered[-1] + 1) if answered else range(0)

    def _holder(
        self, asker: HistoryMember, holder: HistoryMember, head: int
    ) -> HistoryMember | None:
        """Who of the holder's instance answers for a query head: the asker if it can."""
        able = [
            member
            for member in self._members
            if member.instance == holder.instance and head // self.group_heads in member.resident
        ]
        return asker if asker in able else next(iter(able), None)


class HistoryQueries:
    """One layer's questions under way."""

    def __init__(self, history: History, layer: int, q_nhd: Tensor) -> None:
        self._history, self._layer, self._q_nhd = history, layer, q_nhd
        self._asked_of = history.wanted(history.asked_of)
        self._asked_by = history.wanted(history.asked_by)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._answers: dict[int, Tensor] = {}
        self._foreign = {
            rank: q_nhd.new_empty(sum(prod(self._shape(it)) for it in asked))
            for rank, asked in self._asked_by.items()
            if rank != history.own.rank
        }
        self._wait = self._begin(
            [(rank, self._packed(asked)) for rank, asked in self._others(self._asked_of)],
            list(self._foreign.items()),
            Tag.HISTORY,
        )

    def answer(self) -> None:
        """Attend own queries, and those of others once they are here, to the history held here,
        with urgent jobs in between; let the answers travel."""
        own = self._history.own.rank
        if own in self._asked_of:
            queries = [self._own_queries(it) for it in self._asked_of[own]]
            self._answers[own] = self._attended(self._asked_of[own], queries)
        self._wait()
        replies = [
            (rank, self._attended(asked, self._views(asked, self._foreign.pop(rank))))
            for rank, asked in self._others(self._asked_by)
        ]
        self._keys.clear()
        arriving = {
            rank: self._room(asked, self._q_nhd) for rank, asked in self._others(self._asked_of)
        }
        self._answers |= arriving
        if self._history.any:
            self._history.group.points.close()
        self._wait = self._begin(replies, list(arriving.items()), Tag.HISTORY_ANSWER)

    def merge_into(self, out_nhd: Tensor, lse_hn: Tensor) -> None:
        """Merge all answers, once they are here, into a running result of own rows and heads.

        Args:
            out_nhd, lse_hn: fp32, or fp64 for fp64 inputs; overwritten.
        """
        self._wait()
        own = self._history.own
        for rank, asked in self._asked_of.items():
            for it, part in zip(asked, self._results(asked, self._answers.pop(rank)), strict=True):
                rows = slice(it.rows.start, it.rows.stop)
                heads = _from(it.heads, own.heads)
                merge_into(out_nhd[rows, heads], lse_hn[heads, rows], *part)

    # --- attention ---------------------------------------------------------------------------

    def _attended(self, asked: Sequence[_Question], queries: Sequence[Tensor]) -> Tensor:
        """The answers to one member, packed."""
        payload = self._room(asked, self._q_nhd)
        results = self._results(asked, payload)
        for question, q_nhd, (out_nhd, lse_hn) in zip(asked, queries, results, strict=True):
            self._attend(question, q_nhd, out_nhd, lse_hn)
        return payload

    def _attend(self, question: _Question, q_nhd: Tensor, out_nhd: Tensor, lse_hn: Tensor) -> None:
        group, history = self._history.group, self._history
        if question.chunk not in self._keys:
            chunk = group.step.chunks[question.chunk]
            self._keys[question.chunk] = history.resident.keys(self._layer, chunk)
        k_sgd, v_sgd = self._keys[question.chunk]
        for rows in query_blocks(q_nhd, len(k_sgd)):
            with group.clock.timeline.phase("attention", layer=self._layer):
                for queries, keys in uniform_heads(question.heads, history.group_heads):
                    heads, resident = (
                        _from(queries, question.heads),
                        _from(keys, history.own.resident),
                    )
                    out_nhd[rows, heads], lse_hn[heads, rows] = attention(
                        q_nhd[rows, heads],
                        k_sgd[:, resident],
                        v_sgd[:, resident],
                        q_positions=None,
                        k_positions=None,
                        scale=history.scale,
                    )
            group.points.point()

    # --- messages ----------------------------------------------------------------------------

    def _begin(self, sends: Messages, recvs: Messages, tag: Tag) -> WaitExchange:
        if not sends and not recvs:
            return _nothing
        label = Label(phase="history exchange", layer=self._layer)
        return self._history.begin(sends, recvs, tag, label)

    def _others(
        self, asked: Mapping[int, tuple[_Question, ...]]
    ) -> Iterator[tuple[int, tuple[_Question, ...]]]:
        return ((rank, it) for rank, it in asked.items() if rank != self._history.own.rank)

    def _own_queries(self, question: _Question) -> Tensor:
        rows, heads = question.rows, _from(question.heads, self._history.own.heads)
        return self._q_nhd[rows.start : rows.stop, heads]

    def _packed(self, asked: Sequence[_Question]) -> Tensor:
        return torch.cat([self._own_queries(it).reshape(-1) for it in asked])

    def _shape(self, question: _Question) -> tuple[int, int, int]:
        return len(question.rows), len(question.heads), self._history.pool.head_dim

    def _views(self, asked: Sequence[_Question], payload: Tensor) -> list[Tensor]:
        """The queries (n, h, d) of each question."""
        shapes = [self._shape(it) for it in asked]
        parts = torch.split(payload, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _room(self, asked: Sequence[_Question], like: Tensor) -> Tensor:
        """For answers: all outputs, and then all LSEs."""
        dim = self._history.pool.head_dim
        rows = sum(len(it.rows) * len(it.heads) for it in asked)
        return like.new_empty(
            rows * (dim + 1), dtype=torch.promote_types(like.dtype, torch.float32)
        )

    def _results(self, asked: Sequence[_Question], payload: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(out (n, h, d), lse (h, n)) of each question."""
        dim = self._history.pool.head_dim
        lse_numbers = len(payload) // (dim + 1)
        outs, lses = torch.split(payload, [lse_numbers * dim, lse_numbers])
        rows = [len(it.rows) * len(it.heads) for it in asked]
        lse_views = zip(asked, torch.split(lses, rows), strict=True)
        return list(
            zip(
                self._views(asked, outs),
                [lse.view(len(it.heads), len(it.rows)) for it, lse in lse_views],
                strict=True,
            )
        )


def rows_by_chunk(chunks: Sequence[PrefillChunk], rows: range) -> tuple[range, ...]:
    """For members that have neighbouring rows of the batch: those of each piece, numbered from the
    first that they have."""
    ends = accumulate(chunk.length for chunk in chunks)
    bounds = (
        (max(rows.start, end - chunk.length) - rows.start, min(rows.stop, end) - rows.start)
        for chunk, end in zip(chunks, ends, strict=True)
    )
    return tuple(range(first, max(first, stop)) for first, stop in bounds)


def through(transfers: Transfers) -> Begin:
    """Exchanges that go on beside computing."""

    def begin(sends: Messages, recvs: Messages, tag: Tag, label: Label) -> WaitExchange:
        transfer = transfers.start(sends, recvs, tag, label)
        return lambda: transfers.wait(transfer)

    return begin


def _nothing() -> None:
    """Nothing is under way."""


def _from(inner: range, outer: range) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
