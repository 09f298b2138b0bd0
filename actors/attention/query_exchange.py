"""Attention that moves queries instead of KV: Q out, (O, LSE) back, merged (CSPS §4.2, CP Alg. 4).

Every decode iteration uses it, and the last layer of a prefill step, which computes the last row of
each prompt only. Queries go to all KV holders of their rows at once.

CP Alg. 4 instead passes the queries around a ring in N - 1 hops. A ring sends every master's
queries N - 1 times; this exchange sends at most as many bytes. Its latency is one hop instead of
N - 1, and latency dominates decode: a row of 32 heads of 128 in bf16 is 8 KiB. A ring pays off if
messages are so large that attention hides each hop, as in prefill (`ring_q.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.process_group import Pending
from csps.kernels.merge import merge_rows, merge_sink

AttendPartial = Callable[[int | None, Tensor], tuple[Tensor, Tensor]]
"""(peer that owns the rows, None for own rows; query rows (r, h, d)) -> fp32 (out (r, h, d),
lse (r, h)) over the resident KV."""


@dataclass(frozen=True)
class QueryRoutes:
    """KV holders of query rows; every rank of the group must derive matching routes.

    There are `rows` local query rows. This rank has KV of the rows in `resident_here`, a peer has
    KV of the rows in `outgoing[peer]`; both ascend. The peer sends `incoming[peer]` rows.
    """

    rows: int
    resident_here: Sequence[int]
    outgoing: Mapping[int, Sequence[int]] = field(default_factory=dict)
    incoming: Mapping[int, int] = field(default_factory=dict)

    def resident(self, q_rhd: Tensor) -> Tensor:
        """Return the rows for which this rank computes a partial result itself."""
        return self._picked(q_rhd, self.resident_here)

    def sent(self, q_rhd: Tensor) -> list[tuple[int, Tensor]]:
        """Return the rows to send to each peer that has KV of them, as (peer, rows)."""
        return [(peer, self._picked(q_rhd, rows)) for peer, rows in self.outgoing.items()]

    @cached_property
    def merged_from(self) -> tuple[int, ...]:
        """Row of each partial result: own partials first, then peer by peer."""
        return (*self.resident_here, *(row for rows in self.outgoing.values() for row in rows))

    @cached_property
    def one_partial_each(self) -> bool:
        """True if every row has exactly one partial result, and these are in the order of rows."""
        return self.merged_from == tuple(range(self.rows))

    def index(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """Return the rows as (n,) int64 on the device."""
        # Cached for all layers: each copy of a list to the device would wait for the device.
        key = tuple(rows)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.int64, device=device)
        return self._indices[key]

    def _picked(self, q_rhd: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) == self.rows:  # rows ascend, so these are all
            return q_rhd
        return q_rhd.index_select(0, self.index(rows, q_rhd.device))

    @cached_property
    def _indices(self) -> dict[tuple[int, ...], Tensor]:
        return {}


@dataclass
class QueryExchangeTimes:
    """Seconds of exchanges in which a rank sent queries to others.

    Nothing is counted if exchanges are in order (`Mesh.in_order`): the host does not learn when
    they end.
    """

    under_way_s: float = 0.0
    """Time from sending the queries until all answers had arrived."""
    waited_s: float = 0.0
    """Part of `under_way_s` in which this rank computed nothing."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the time inside the context."""
        begin = time.monotonic()
        yield
        self.under_way_s += time.monotonic() - begin

    def wait(self, pending: Pending) -> None:
        """Wait for an exchange and count the time."""
        begin = time.monotonic()
        pending.wait()
        self.waited_s += time.monotonic() - begin


class QueryExchange:
    """Receive buffers of one exchange of queries; its receives are posted early (`Mesh.expect`).

    Args:
        like: a tensor of the queries' dtype and device.
        heads, head_dim: shape of a query row.
        tags: tags of the queries and of the partial results.
    """

    def __init__(
        self,
        mesh: Mesh,
        routes: QueryRoutes,
        like: Tensor,
        *,
        heads: int,
        head_dim: int,
        tags: tuple[Tag, Tag],
    ) -> None:
        self.routes, self.in_order = routes, mesh.in_order
        self.foreign = {
            peer: like.new_empty(rows, heads, head_dim) for peer, rows in routes.incoming.items()
        }
        self.answers = {
            peer: like.new_empty(len(rows), heads, head_dim + 1, dtype=torch.float32)
            for peer, rows in routes.outgoing.items()
        }
        """Answers of each peer: the output and, in the last column, the LSE."""
        self.queries = mesh.expect(list(self.foreign.items()), tags[0])
        self.replies = mesh.expect(list(self.answers.items()), tags[1])


def exchange_queries(
    q_rhd: Tensor,
    exchange: QueryExchange,
    partial: AttendPartial,
    times: QueryExchangeTimes | None = None,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Return the merged attention output (r, h, d), fp32, of the local query rows.

    Sends and receives one message each way for each peer. This rank computes own partials while
    the queries travel, and partials of the peers' rows while its answers travel.

    Args:
        times: the times of this exchange are added to them.
        sinks_h: logits of the heads' attention sinks, which are merged last.
    """
    routes = exchange.routes
    if not (routes.outgoing or routes.incoming):
        own = [partial(None, routes.resident(q_rhd))] if routes.resident_here else []
        return _merge(q_rhd, routes, own, sinks_h)
    counted = times is not None and routes.outgoing and not exchange.in_order
    spent = times if times is not None and counted else QueryExchangeTimes()
    with spent.under_way():
        parts = _exchange_partials(q_rhd, exchange, partial, spent)
    return _merge(q_rhd, routes, parts, sinks_h)


def _exchange_partials(
    q_rhd: Tensor, exchange: QueryExchange, partial: AttendPartial, times: QueryExchangeTimes
) -> list[tuple[Tensor, Tensor]]:
    """Return own partials, then those of the peers."""
    routes = exchange.routes
    queries = exchange.queries.send(routes.sent(q_rhd))
    parts = [partial(None, routes.resident(q_rhd))] if routes.resident_here else []
    times.wait(queries)
    foreign = exchange.foreign.items()
    replies = [(peer, _pack(*partial(peer, foreign_rhd))) for peer, foreign_rhd in foreign]
    times.wait(exchange.replies.send(replies))
    return parts + [(packed[..., :-1], packed[..., -1]) for packed in exchange.answers.values()]


def _pack(out_rhd: Tensor, lse_rh: Tensor) -> Tensor:
    return torch.cat([out_rhd, lse_rh[..., None]], -1)


def _merge(
    q_rhd: Tensor,
    routes: QueryRoutes,
    parts: Sequence[tuple[Tensor, Tensor]],
    sinks_h: Tensor | None,
) -> Tensor:
    if not routes.rows:
        return q_rhd.float()
    out_rhd = parts[0][0] if len(parts) == 1 else torch.cat([out for out, _ in parts])
    if routes.one_partial_each and sinks_h is None:
        return out_rhd
    lse_rh = torch.cat([lse for _, lse in parts])
    if not routes.one_partial_each:
        row_n = routes.index(routes.merged_from, q_rhd.device)
        out_rhd, lse_rh = merge_rows(out_rhd, lse_rh, row_n, routes.rows)
    if sinks_h is not None:
        merge_sink(out_rhd, lse_rh.T, sinks_h)
    return out_rhd
