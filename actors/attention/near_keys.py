"""Attention of layers with a sliding window: members fetch the keys that their rows reach.

    k, v of own rows and of resident history --> members with rows whose windows reach them
    attention of own rows to what they reach

A row reaches the `window` positions up to its own. So a member with contiguous rows needs no more
than the keys of `window - 1` positions before its first row, whatever the length of the prompt, and
members out of reach exchange nothing. Strategies that give members own rows of all heads (Ulysses,
rings, levels, CSA) all compute windowed layers in this way: moving queries or heads would move all
rows. Nothing is dropped, because nothing far is seen.

History in reach travels as keys and values, too. That is at most a window of them, while questions
and answers grow with the rows.

Shape suffixes: t own rows, n keys of one message, s keys that a chunk's rows reach, h query heads,
g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from csps.actors.attention.base.group import SpGroup, span_positions
from csps.actors.attention.base.strategy import (
    OverlappingStrategy,
    ProjectedAttention,
    Sinks,
    StoreKv,
    Strategy,
    no_sinks,
)
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.comm.layout import LocalChunk
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.arguments import Positions
from csps.kernels.attention import attention
from csps.kernels.merge import merge_sink, nothing_seen
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Supply:
    """Keys of a chunk's sequence that one member has and another one's rows reach."""

    chunk: int
    span: Span
    rows: slice | None
    """Rows of the member that has them; None for history in its pool."""


def reached_spans(parts: Sequence[LocalChunk], window: int) -> list[Span]:
    """Return the positions that rows of one chunk reach, disjoint and ascending."""
    reached: list[Span] = []
    for span in sorted((part.span for part in parts), key=lambda span: span.start):
        first = max(0, span.start - window + 1)
        if reached and first <= reached[-1].stop:
            last = reached.pop()
            first, stop = last.start, max(last.stop, span.stop)
            reached.append(Span(first, stop))
        else:
            reached.append(Span(first, span.stop))
    return reached


class NearKeys:
    """Keys that the members of a step have for each other in layers with a window."""

    def __init__(self, group: SpGroup, window: int) -> None:
        self._group, self._window = group, window
        self._found: dict[tuple[int, int], list[Supply]] = {}

    def rows_of(self, chunk: PrefillChunk) -> list[LocalChunk]:
        """Return the parts of a chunk that this member computes, in the order of its rows."""
        return self._parts(self._group.member, chunk)

    def supplies(self, holder: int, asker: int) -> list[Supply]:
        """Return what a holder has for the asker's rows, in one order at all members.

        Cancelled chunks are left out: all members know of them from the same layer on.
        """
        key = holder, asker
        if key not in self._found:
            chunks = enumerate(self._group.step.chunks)
            self._found[key] = [
                supply
                for index, chunk in chunks
                for supply in self._of_chunk(index, chunk, holder, asker)
            ]
        chunks_of_step = self._group.step.chunks
        return [
            supply
            for supply in self._found[key]
            if self._group.is_active(chunks_of_step[supply.chunk])
        ]

    def _of_chunk(
        self, index: int, chunk: PrefillChunk, holder: int, asker: int
    ) -> Iterator[Supply]:
        for reached in reached_spans(self._parts(asker, chunk), self._window):
            for part in self._parts(holder, chunk):
                if (span := part.span.intersection(reached)).length:
                    yield Supply(index, span, part.within(span).rows)
            for held in self._group.history_of(chunk, holder):
                if (span := held.intersection(reached)).length:
                    yield Supply(index, span, None)

    def _parts(self, member: int, chunk: PrefillChunk) -> list[LocalChunk]:
        return [part for part in self._group.parts[member] if part.chunk is chunk]


class WindowAttention(ProjectedAttention, OverlappingStrategy):
    """Attention of a step's layers with a window, on one rank."""

    def __init__(
        self,
        group: SpGroup,
        pool: KvPool,
        *,
        window: int,
        scale: float,
        sinks: Sinks = no_sinks,
    ) -> None:
        super().__init__(group)
        self._group, self._pool = group, pool
        self._window, self._scale, self._sinks = window, scale, sinks
        self._near = NearKeys(group, window)
        self._positions: dict[int, _ChunkPositions] = {}

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. Members get the keys in reach only."""
        return ()

    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """See `ProjectedAttention`."""
        group, own = self._group, (k_thd, v_thd)
        arrived = self._exchange(layer, own)
        arrived[group.member] = [
            self._read(layer, supply, own) for supply in self._near.supplies(*[group.member] * 2)
        ]
        out_thd, lse_ht = nothing_seen(q_thd)
        for index, chunk in enumerate(group.step.chunks):
            parts = self._near.rows_of(chunk)
            if parts and group.is_active(chunk):
                rows = slice(parts[0].rows.start, parts[-1].rows.stop)
                keys = self._keys_of(index, arrived)
                self._attend_chunk(layer, index, q_thd[rows], keys, out_thd[rows], lse_ht[:, rows])
        if (sinks_h := self._sinks(layer)) is not None:
            merge_sink(out_thd, lse_ht, sinks_h)
        group.points.close()
        return out_thd.to(q_thd.dtype)

    # --- keys ----------------------------------------------------------------------------------

    def _exchange(self, layer: int, own: KeysAndValues) -> dict[int, list[KeysAndValues]]:
        """Send what others' rows reach; return what own rows reach, by member and supply."""
        group, near = self._group, self._near
        sends, arriving = [], {}
        for member in group.others:
            if supplies := near.supplies(group.member, member):
                parts = [torch.stack(self._read(layer, supply, own)) for supply in supplies]
                sends.append((group.peers[member], torch.cat(parts, dim=1)))
            if supplies := near.supplies(member, group.member):
                tokens = sum(supply.span.length for supply in supplies)
                arriving[member] = own[0].new_empty(2, tokens, *own[0].shape[1:])
        if sends or arriving:
            recvs = [(group.peers[member], kv) for member, kv in arriving.items()]
            label = Label(phase="window exchange", layer=layer)
            self._transfers.wait(self._transfers.start(sends, recvs, Tag.WINDOW, label))
        return {
            member: [
                (k_ngd, v_ngd)
                for k_ngd, v_ngd in torch.split(
                    kv_2ngd,
                    [supply.span.length for supply in near.supplies(member, group.member)],
                    dim=1,
                )
            ]
            for member, kv_2ngd in arriving.items()
        }

    def _read(self, layer: int, supply: Supply, own: KeysAndValues) -> KeysAndValues:
        """Return keys and values that this member has."""
        if supply.rows is not None:
            return own[0][supply.rows], own[1][supply.rows]
        chunk = self._group.step.chunks[supply.chunk]
        k_sgd, v_sgd = self._pool.read(layer, chunk.sequence_id, supply.span)
        return self._pool.numbers(k_sgd), self._pool.numbers(v_sgd)

    def _keys_of(self, index: int, arrived: Mapping[int, Sequence[KeysAndValues]]) -> KeysAndValues:
        """Return all keys and values that own rows of a chunk reach, in the order of
        `_ChunkPositions`."""
        own, found = self._group.member, []
        for member, place in self._chunk_positions(index).order:
            at = [
                number
                for number, supply in enumerate(self._near.supplies(member, own))
                if supply.chunk == index
            ]
            found.append(arrived[member][at[place]])
        if len(found) == 1:
            return found[0]
        return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])

    def _chunk_positions(self, index: int) -> _ChunkPositions:
        if index not in self._positions:
            own, device = self._group.member, self._pool.k.device
            found = [
                (supply.span.start, member, place, supply.span)
                for member in range(self._group.size)
                for place, supply in enumerate(
                    supply for supply in self._near.supplies(member, own) if supply.chunk == index
                )
            ]
            found.sort(key=lambda entry: entry[:3])
            parts = self._near.rows_of(self._group.step.chunks[index])
            self._positions[index] = _ChunkPositions(
                order=tuple((member, place) for _, member, place, _ in found),
                queries=_positions([part.span for part in parts], device),
                keys=_positions([span for *_, span in found], device),
            )
        return self._positions[index]

    # --- attention -----------------------------------------------------------------------------

    def _attend_chunk(
        self,
        layer: int,
        index: int,
        q_thd: Tensor,
        keys: KeysAndValues,
        out_thd: Tensor,
        lse_ht: Tensor,
    ) -> None:
        positions = self._chunk_positions(index)
        for rows in query_blocks(q_thd, min(len(keys[0]), self._window)):
            with self._group.clock.timeline.phase("attention", layer=layer):
                out_thd[rows], lse_ht[:, rows] = attention(
                    q_thd[rows],
                    *keys,
                    q_positions=positions.queries[rows],
                    k_positions=positions.keys,
                    scale=self._scale,
                    window=self._window,
                )
            self._group.points.point()


@dataclass(frozen=True)
class _ChunkPositions:
    """Positions of a chunk's own rows and of the keys that they reach."""

    order: tuple[tuple[int, int], ...]
    """Supplies by first position: the member, and the number among its supplies of the chunk."""
    queries: Positions
    keys: Positions


def _positions(spans: Sequence[Span], device: torch.device) -> Positions:
    """Return the positions of spans, as a range if they are one; adjacent ones are joined."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.step == span.step == 1 and last.stop == span.start:
            joined[-1] = Span(last.start, span.stop)
        else:
            joined.append(span)
    return joined[0].positions if len(joined) == 1 else span_positions(joined).to(device)


class WindowedModel:
    """A step's strategy, and attention to near keys in layers with a window."""

    def __init__(
        self,
        strategy: AbstractContextManager[Strategy],
        near: WindowAttention,
        windowed: Collection[int],
    ) -> None:
        self._entered = ExitStack()
        self._contexts = strategy, near
        self._near, self._windowed = near, windowed

    def __enter__(self) -> Self:
        strategy, near = self._contexts
        self._strategy = self._entered.enter_context(strategy)
        self._entered.enter_context(near)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`."""
        return self._of(layer).offered(layer, member)

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """See `Strategy`."""
        return self._of(index).attend_layer(index, layer, x_td, rotary, store)

    def _of(self, layer: int) -> Strategy:
        return self._near if layer in self._windowed else self._strategy
