"""Attention that moves Q instead of KV: Q out, (O, LSE) back, merged (CSPS §4.2, CP Alg. 4).

Used by every decode iteration, and by a prefill's last layer, where the last row of a prompt is
all that must be computed.

CP Alg. 4 passes a batch's queries around a ring, N - 1 hops one after another, and returns answers
by an all-to-all. Here queries go straight to whoever holds KV of their rows, all at once. Bytes: a
ring sends every master's queries N - 1 times; so does this if all hold some of every row, and less
if not. Latency: one send before the last holder can begin, in place of N - 1, and decoding is
latency: a row of 32 heads of 128 in bf16 is 8 KiB. A ring pays where messages are so large that
each hop hides behind attention, which is prefill's case (`ring_q.py`). What each holder computes,
how answers return and how they are merged is the same.
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
from csps.kernels.merge import merge_rows

AttendPartial = Callable[[int | None, Tensor], tuple[Tensor, Tensor]]
"""(the peer whose rows these are, None for own ones; query rows (r, h, d)) -> fp32 (out (r, h, d),
lse (r, h)) over the KV held here."""


@dataclass(frozen=True)
class QueryRoutes:
    """Who holds KV for whose rows; every rank of the group must derive the same routes.

    There are `rows` local query rows. Of those in `resident_here` this rank holds KV itself, of those
    in `outgoing[peer]` the peer does; both ascend. `incoming[peer]` is how many rows the peer
    sends.
    """

    rows: int
    resident_here: Sequence[int]
    outgoing: Mapping[int, Sequence[int]] = field(default_factory=dict)
    incoming: Mapping[int, int] = field(default_factory=dict)

    def resident(self, q_rhd: Tensor) -> Tensor:
        """The rows whose own partial is due."""
        return self._picked(q_rhd, self.resident_here)

    def sent(self, q_rhd: Tensor) -> list[tuple[int, Tensor]]:
        """(peer, the rows that it holds KV of)."""
        return [(peer, self._picked(q_rhd, rows)) for peer, rows in self.outgoing.items()]

    @cached_property
    def merged_from(self) -> tuple[int, ...]:
        """The row of each partial, own ones first, then peer by peer."""
        return (*self.resident_here, *(row for rows in self.outgoing.values() for row in rows))

    @cached_property
    def one_partial_each(self) -> bool:
        """Whether every row has its KV in one place, and they come in order."""
        return self.merged_from == tuple(range(self.rows))

    def index(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """(n,) int64, made once and not at each layer: a list of rows would be copied to the
        device, and wait for it, every time."""
        key = tuple(rows)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.int64, device=device)
        return self._indices[key]

    def _picked(self, q_rhd: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) == self.rows:  # both ascend, so that as many are all
            return q_rhd
        return q_rhd.index_select(0, self.index(rows, q_rhd.device))

    @cached_property
    def _indices(self) -> dict[tuple[int, ...], Tensor]:
        return {}


@dataclass
class QueryExchangeTimes:
    """Of the rows whose queries a rank has sent to others, in seconds. Where exchanges are in order
    nothing is counted: the host never learns when they have ended."""

    under_way_s: float = 0.0
    """From the queries' sending until all answers were there."""
    waited_s: float = 0.0
    """Of that, the time in which this rank computed nothing."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the time inside."""
        begin = time.monotonic()
        yield
        self.under_way_s += time.monotonic() - begin

    def wait(self, pending: Pending) -> None:
        """Until it has ended."""
        begin = time.monotonic()
        pending.wait()
        self.waited_s += time.monotonic() - begin


class QueryExchange:
    """What one exchange of queries receives, expected ahead of it where that is of use
    (`Mesh.expect`).

    Args:
        like: of the queries' dtype and device.
        heads, head_dim: of a query row.
        tags: of queries, and of partial results.
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
        """The output and, in the last column, the LSE."""
        self.queries = mesh.expect(list(self.foreign.items()), tags[0])
        self.replies = mesh.expect(list(self.answers.items()), tags[1])


def exchange_queries(
    q_rhd: Tensor,
    exchange: QueryExchange,
    partial: AttendPartial,
    times: QueryExchangeTimes | None = None,
) -> Tensor:
    """Merged attention output (r, h, d), fp32, of the local query rows.

    One message to and from each peer. The own partials are computed while the queries travel, the
    peers' while the own answers do.

    Args:
        times: what it took is added to these.
    """
    routes = exchange.routes
    if not (routes.outgoing or routes.incoming):
        own = [partial(None, routes.resident(q_rhd))] if routes.resident_here else []
        return _merged(q_rhd, routes, own)
    counted = times is not None and routes.outgoing and not exchange.in_order
    spent = times if times is not None and counted else QueryExchangeTimes()
    with spent.under_way():
        parts = _exchanged(q_rhd, exchange, partial, spent)
    return _merged(q_rhd, routes, parts)


def _exchanged(
    q_rhd: Tensor, exchange: QueryExchange, partial: AttendPartial, times: QueryExchangeTimes
) -> list[tuple[Tensor, Tensor]]:
    """Own partials, and those of others."""
    routes = exchange.routes
    queries = exchange.queries.send(routes.sent(q_rhd))
    parts = [partial(None, routes.resident(q_rhd))] if routes.resident_here else []
    times.wait(queries)
    foreign = exchange.foreign.items()
    replies = [(peer, _packed(*partial(peer, rows_rhd))) for peer, rows_rhd in foreign]
    times.wait(exchange.replies.send(replies))
    return parts + [(packed[..., :-1], packed[..., -1]) for packed in exchange.answers.values()]


def _packed(out_rhd: Tensor, lse_rh: Tensor) -> Tensor:
    return torch.cat([out_rhd, lse_rh[..., None]], -1)


def _merged(q_rhd: Tensor, routes: QueryRoutes, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    if not routes.rows:
        return q_rhd.float()
    out_nhd = parts[0][0] if len(parts) == 1 else torch.cat([out for out, _ in parts])
    if routes.one_partial_each:
        return out_nhd
    lse_nh = torch.cat([lse for _, lse in parts])
    row_n = routes.index(routes.merged_from, q_rhd.device)
    return merge_rows(out_nhd, lse_nh, row_n, routes.rows)[0]
