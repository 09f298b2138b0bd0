"""Query exchange: the merged rows equal dense attention for any placement of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from threading import Event

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch_log import LaunchLog, replay
from mesh_threads import FINISH_S, on_ranks
from property_examples import examples
from torch import Tensor

from csps.actors.attention.query_exchange import (
    QueryExchange,
    QueryExchangeTimes,
    QueryRoutes,
    exchange_queries,
)
from csps.actors.comm import shared_memory
from csps.actors.comm.mesh import Mesh, Tag
from csps.kernels.attention import attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TAGS = (Tag.DECODE_QUERY, Tag.DECODE_PARTIAL)


@dataclass(frozen=True)
class Case:
    """Requests with one query row each."""

    ranks: int
    masters: tuple[int, ...]
    """Rank of each request's row."""
    holders: tuple[tuple[int, ...], ...]
    """KV holder of each key, by request."""

    def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(request)
        keys = len(self.holders[request])
        shapes = ((1, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
        q, k, v = (torch.randn(*shape, HEAD_DIM, generator=generator) for shape in shapes)
        return q, k, v

    def routes(self, rank: int) -> tuple[QueryRoutes, list[int], dict[int | None, list[int]]]:
        """Return routes, the requests of own rows, and the requests to attend by their owner."""
        rows = [r for r, master in enumerate(self.masters) if master == rank]
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int | None, list[int]] = {}
        for request, master in enumerate(self.masters):
            for holder in sorted(set(self.holders[request]) - {master}):
                if master == rank:
                    outgoing.setdefault(holder, []).append(rows.index(request))
                if holder == rank:
                    incoming.setdefault(master, []).append(request)
        resident = [row for row, request in enumerate(rows) if rank in self.holders[request]]
        routes = QueryRoutes(
            rows=len(rows),
            resident_here=resident,
            outgoing=outgoing,
            incoming={
                peer: len(requests) for peer, requests in incoming.items() if peer is not None
            },
        )
        return routes, rows, {None: [rows[row] for row in resident], **incoming}

    def body(self) -> Callable[[Mesh], tuple[list[int], Tensor]]:
        """Return what each rank does; it returns its requests and their attention."""

        def run(mesh: Mesh) -> tuple[list[int], Tensor]:
            routes, own, requests_of = self.routes(mesh.rank)

            def partial(peer: int | None, q: Tensor) -> tuple[Tensor, Tensor]:
                parts = [attend(request, q[row]) for row, request in enumerate(requests_of[peer])]
                return torch.cat([out for out, _ in parts]), torch.cat([lse.T for _, lse in parts])

            def attend(request: int, q_hd: Tensor) -> tuple[Tensor, Tensor]:
                _, k, v = self.tensors(request)
                mine = [i for i, rank in enumerate(self.holders[request]) if rank == mesh.rank]
                assert mine, f"rank {mesh.rank} has no keys of request {request}"
                return attention(q_hd[None], k[mine], v[mine], q_positions=None, k_positions=None)

            queries = [self.tensors(request)[0] for request in own]
            q = torch.cat(queries) if queries else torch.empty(0, HEADS, HEAD_DIM)
            return own, exchange_queries(q, new_exchange(mesh, routes), partial)

        return run


def new_exchange(mesh: Mesh, routes: QueryRoutes) -> QueryExchange:
    return QueryExchange(mesh, routes, torch.empty(0), heads=HEADS, head_dim=HEAD_DIM, tags=TAGS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 5))
    rank = st.integers(0, ranks - 1)
    holders = draw(st.lists(st.lists(rank, min_size=1, max_size=9), max_size=5))
    return Case(ranks, tuple(draw(rank) for _ in holders), tuple(map(tuple, holders)))


@pytest.mark.parametrize("held_to_rules", [False, True])
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_equals_dense_attention(case: Case, held_to_rules: bool) -> None:
    log = LaunchLog() if held_to_rules else None
    data_group = None if log is None else log.group("gang", range(case.ranks))

    answered = []
    outputs = on_ranks(case.ranks, case.body(), data_group)
    if log is not None:
        replay(log.launches, Random(0))
    for rows, out in outputs:
        assert out.dtype == torch.float32
        assert len(out) == len(rows)
        for request, row in zip(rows, out, strict=True):
            q, k, v = case.tensors(request)
            expected, _ = dense_attention(q, k, v, q_positions=None, k_positions=None)
            torch.testing.assert_close(row[None].double(), expected, atol=1e-5, rtol=0.0)
            answered.append(request)
    assert sorted(answered) == list(range(len(case.masters)))


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_gloo_and_shared_memory_carry_the_same(case: Case) -> None:
    near = on_ranks(case.ranks, case.body())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "machine", lambda: "")  # each rank is alone on its machine
        far = on_ranks(case.ranks, case.body())
    for (rows, out), (far_rows, far_out) in zip(near, far, strict=True):
        assert rows == far_rows
        assert torch.equal(out, far_out)


def routed(queries: Mapping[int, int], rank: int) -> QueryRoutes:
    """Return routes of one row for each rank that asks; it and the asked rank have the KV."""
    asked = queries.get(rank)
    asking = [asker for asker, holder in queries.items() if holder == rank]
    rows = range(0 if asked is None else 1)
    outgoing = {} if asked is None else {asked: rows}
    incoming = dict.fromkeys(asking, 1)
    return QueryRoutes(rows=len(rows), resident_here=rows, outgoing=outgoing, incoming=incoming)


def anything(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return some partial result."""
    return q.clone(), torch.zeros(q.shape[:2])


def test_the_own_part_is_computed_while_queries_travel_and_are_answered() -> None:
    """Rank 0 finishes its own part after rank 1 has the query, and rank 1 answers after rank 0 has
    begun its own part."""
    asked, begun = Event(), Event()

    def body(mesh: Mesh) -> QueryExchangeTimes:
        def partial(peer: int | None, q: Tensor) -> tuple[Tensor, Tensor]:
            mine, others = (begun, asked) if peer is None else (asked, begun)
            mine.set()
            assert others.wait(FINISH_S), "the own part does not overlap the exchange"
            return anything(q)

        routes, times = routed({0: 1}, mesh.rank), QueryExchangeTimes()
        q = torch.ones(routes.rows, HEADS, HEAD_DIM)
        exchange_queries(q, new_exchange(mesh, routes), partial, times)
        return times

    asking, answering = on_ranks(2, body)
    assert 0 < asking.waited_s < asking.under_way_s
    assert answering == QueryExchangeTimes(), "a rank that asks no other counts no time"


def test_answers_travel_while_those_to_others_are_computed() -> None:
    """Rank 0 finishes rank 2's row after rank 1 has sent its answer to rank 0."""
    answered = Event()

    def body(mesh: Mesh) -> None:
        def partial(peer: int | None, q: Tensor) -> tuple[Tensor, Tensor]:
            if peer == 2:
                assert answered.wait(FINISH_S), "no answer arrives while others' parts are computed"
            return anything(q)

        routes = routed({0: 1, 2: 0}, mesh.rank)
        q = torch.ones(routes.rows, HEADS, HEAD_DIM)
        exchange_queries(q, new_exchange(mesh, routes), partial)
        if mesh.rank == 1:
            answered.set()

    on_ranks(3, body)
