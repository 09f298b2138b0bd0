"""The last layer of a step, of which only single rows are needed: those that a token is drawn from.

Their queries go to where the KV of their sequences is (`query_exchange`), which saves the last
layer's attention and MLP. Rows that the step computes are attended to where they were computed,
whoever keeps them: a member that keeps some of each other's has its own scattered over its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from csps.actors.announce import token_drawn
from csps.actors.engine.engine import Engine
from csps.actors.engine.moves import Rows
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.mesh import Tag
from csps.actors.sampler_request import drawn_before, sampler_of
from csps.actors.sampling import draw_batch
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.query_exchange import (
    Meeting,
    QueryRoutes,
    exchange_queries,
)
from csps.actors.token_sampler import TokenSampler
from csps.kernels.decode_attention import Run, SlotRuns, decode_attention
from csps.kernels.merge import merge_into
from csps.protocols.errors import CspsError
from csps.protocols.prefill_job import PrefillPiece
from csps.protocols.tokens import TokenDrawn

Fail = Callable[[int, CspsError], None]
"""(sequence, why it cannot go on)"""


def draw_first_tokens(
    engine: Engine,
    group: SpGroup,
    x_td: Tensor,
    q_thd: Tensor,
    own: Rows,
    answered: Callable[[], None],
    fail: Fail,
) -> list[TokenDrawn]:
    """Tokens that this rank draws, by a step that is about to end.

    Every member must call it: it answers the queries of the others.

    Args:
        x_td: the residual stream of own rows, at the last layer.
        q_thd: their queries there.
        own: their keys and values there; those of history are in the pools.
        answered: called when this member's queries are answered, and it has answered others'.
        fail: told of sequences whose token cannot be drawn.
    """
    drawing = [(piece, row) for piece, row, owner in _last_rows(group) if owner == group.member]
    rows = [row for _, row in drawing]
    out_thd = _last_attention(engine, group, q_thd[rows], own)
    answered()
    if not drawing:
        return []
    x_td = engine.network.layers[-1].finish(x_td[rows], out_thd.to(q_thd.dtype))
    if engine.tp_rank:
        return []
    logits_tv = engine.network.logits(x_td)
    return _draw(engine, [group.job.pieces[index] for index, _ in drawing], logits_tv, fail)


def _last_attention(engine: Engine, group: SpGroup, q_thd: Tensor, own: Rows) -> Tensor:
    """Attention of the own last rows over KV wherever in the group it is."""
    routes, pieces = _last_row_routes(group)

    def partial(peer: int | None, q_rhd: Tensor) -> tuple[Tensor, Tensor]:
        asked = [group.job.pieces[index] for index in pieces[peer]]
        runs = SlotRuns(len(asked), list(_computed(group, asked)))
        out_rhd, lse_rh = decode_attention(q_rhd, *own, runs, scale=engine.spec.scale)
        if any(group.history_of(it, group.member) for it in asked):
            held_rhd, held_rh = _history(engine, group, asked, q_rhd)
            merge_into(out_rhd, lse_rh.T, held_rhd, held_rh.T)
        return out_rhd, lse_rh

    tags = Tag.LAST_ROW_QUERY, Tag.LAST_ROW_PARTIAL
    heads, head_dim = q_thd.shape[1:]
    meeting = Meeting(engine.mesh, routes, q_thd, heads=heads, head_dim=head_dim, tags=tags)
    return exchange_queries(q_thd, meeting, partial)


def _computed(group: SpGroup, pieces: Sequence[PrefillPiece]) -> Iterator[Run]:
    """By the place of each piece, which of this member's rows are the piece's: neighbours."""
    for place, piece in enumerate(pieces):
        rows = [part.rows for part in group.local if part.piece is piece]
        if rows:
            yield place, rows[0].start, rows[-1].stop


def _history(
    engine: Engine, group: SpGroup, pieces: Sequence[PrefillPiece], q_rhd: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention to what this member has held of each row's piece since before the step."""
    last = engine.spec.layers - 1
    held = [
        RequestSlots(engine.pool, it.rid, [last], group.history_of(it, group.member))
        for it in pieces
    ]
    return engine.attend_rows(last, q_rhd, HeldRows(held))


def _draw(
    engine: Engine, pieces: Sequence[PrefillPiece], logits_tv: Tensor, fail: Fail
) -> list[TokenDrawn]:
    samplers: dict[int, TokenSampler] = {}
    for row, piece in enumerate(pieces):
        try:
            samplers[row] = sampler_of(piece, engine.spec.vocab)
        except CspsError as exc:
            fail(piece.rid, exc)
    indices = [drawn_before(pieces[row].drawn) for row in samplers]
    draws = draw_batch(list(samplers.values()), logits_tv[list(samplers)], indices)
    drawn: list[TokenDrawn] = []
    for row, index, draw in zip(samplers, indices, draws, strict=True):
        if isinstance(draw, CspsError):
            fail(pieces[row].rid, draw)
        else:
            drawn.append(token_drawn(pieces[row].rid, index, draw))
    return drawn


def _last_rows(group: SpGroup) -> Iterator[tuple[int, int, int]]:
    """(piece index, local row at its owner, owner) of every row a token is drawn from; all members
    stand at the same layer, so they name the same."""
    for index, piece in enumerate(group.job.pieces):
        if piece.last and group.wanted(piece):
            owner, row = group.last_row_of(piece)
            yield index, row, owner


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
