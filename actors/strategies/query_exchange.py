"""Attention that moves Q instead of KV: Q out, (O, LSE) back, merged (CSPS §4.2, CP Alg. 4).

Used by every decode iteration, and by a prefill's last layer, where the last row of a prompt is
all that must be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csps.actors.mesh import Mesh, Tag
from csps.kernels.merge import merge

Partial = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(request, its query rows (t, h, d)) -> fp32 (out (t, h, d), lse (h, t)) over the KV held here."""


@dataclass(frozen=True)
class QueryRoutes:
    """Who holds KV for whose rows; every rank of the group must derive the same routes.

    `rows` lists the request of each local query row. `held_here` are the local rows whose
    request has KV on this rank. `outgoing[peer]` are the local rows the peer holds KV for;
    `incoming[peer]` the requests of the rows that the peer sends, in its order.
    """

    rows: Sequence[int]
    held_here: Sequence[int]
    outgoing: Mapping[int, Sequence[int]] = field(default_factory=dict)
    incoming: Mapping[int, Sequence[int]] = field(default_factory=dict)


def exchange_queries(
    q_thd: Tensor, *, mesh: Mesh, routes: QueryRoutes, partial: Partial, tags: tuple[Tag, Tag]
) -> Tensor:
    """Merged attention output (t, h, d), fp32, of the local query rows.

    The own partials are computed while the queries travel, the peers' while the own answers do.
    """
    query_tag, partial_tag = tags
    foreign = {
        peer: q_thd.new_empty(len(requests), *q_thd.shape[1:])
        for peer, requests in routes.incoming.items()
    }
    queries = mesh.exchange(
        [(peer, q_thd[list(rows)]) for peer, rows in routes.outgoing.items()],
        list(foreign.items()),
        query_tag,
    )
    answers = {peer: _packed_like(q_thd, rows=len(rows)) for peer, rows in routes.outgoing.items()}
    own = _partials(
        q_thd[list(routes.held_here)], [routes.rows[i] for i in routes.held_here], partial
    )
    queries.wait()
    replies = [
        (peer, _partials(foreign[peer], requests, partial))
        for peer, requests in routes.incoming.items()
    ]
    mesh.exchange(replies, list(answers.items()), partial_tag).wait()
    if not len(routes.rows):
        return q_thd.float()
    parts = [(routes.held_here, own)]
    parts += [(routes.outgoing[peer], answers[peer]) for peer in routes.outgoing]
    return _merge_rows(q_thd, parts)


def _packed_like(q_thd: Tensor, *, rows: int) -> Tensor:
    """(rows, h, d + 1) fp32: the output and, in the last column, the LSE."""
    heads, head_dim = q_thd.shape[1:]
    return torch.empty(rows, heads, head_dim + 1, dtype=torch.float32, device=q_thd.device)


def _partials(q_thd: Tensor, requests: Sequence[int], partial: Partial) -> Tensor:
    packed = _packed_like(q_thd, rows=len(requests))
    for row, request in enumerate(requests):
        out_thd, lse_ht = partial(request, q_thd[row : row + 1])
        packed[row, :, :-1] = out_thd[0]
        packed[row, :, -1] = lse_ht[:, 0]
    return packed


def _merge_rows(q_thd: Tensor, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Merge partials that each cover some of the rows; a row not covered has LSE -inf there."""
    present = [(rows, packed) for rows, packed in parts if len(rows)]
    if len(present) == 1 and len(present[0][0]) == q_thd.shape[0]:
        return present[0][1][..., :-1]
    outs, lses = [], []
    for rows, packed in present:
        out = torch.zeros(q_thd.shape, dtype=torch.float32, device=q_thd.device)
        lse = out.new_full((q_thd.shape[1], q_thd.shape[0]), -torch.inf)
        out[list(rows)] = packed[..., :-1]
        lse[:, list(rows)] = packed[..., -1].T
        outs.append(out)
        lses.append(lse)
    return merge(outs, lses)[0]
