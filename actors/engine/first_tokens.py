"""The last layer of a step, of which only single rows are needed: those that a token is drawn from.

Their queries go to where the KV of their sequences lies (`query_exchange`), which saves the last
layer's attention and MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from csps.actors.announce import token_drawn
from csps.actors.engine.engine import Engine
from csps.actors.engine.moves import stored_of
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.mesh import Tag
from csps.actors.sampler_request import drawn_before, sampler_of
from csps.actors.sampling import TokenSampler, draw_batch
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.query_exchange import (
    Meeting,
    QueryRoutes,
    exchange_queries,
)
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into
from csps.protocols.errors import CspsError
from csps.protocols.prefill_job import PrefillPiece
from csps.protocols.span import Span
from csps.protocols.tokens import TokenDrawn

Fail = Callable[[int, CspsError], None]
"""(sequence, why it cannot go on)"""
LooseKv = dict[int, tuple[Tensor, Tensor]]
"""By sequence, keys and values of the last layer that are in no pool: they are kept elsewhere, and
are on their way there."""


def draw_first_tokens(
    engine: Engine, group: SpGroup, x_td: Tensor, q_thd: Tensor, loose: LooseKv, fail: Fail
) -> list[TokenDrawn]:
    """Tokens that this rank draws, by a step that is about to end.

    Every member must call it: it answers the queries of the others.

    Args:
        x_td: the residual stream of own rows, at the last layer.
        q_thd: their queries there.
        loose: KV of own rows there; all other KV is in the pools.
        fail: told of sequences whose token cannot be drawn.
    """
    own = [(piece, row) for piece, row, owner in _last_rows(group) if owner == group.member]
    rows = [row for _, row in own]
    out_thd = _last_attention(engine, group, q_thd[rows], loose)
    if not own:
        return []
    x_td = engine.network.layers[-1].finish(x_td[rows], out_thd.to(q_thd.dtype))
    if engine.tp_rank:
        return []
    logits_tv = engine.network.logits(x_td)
    return _draw(engine, [group.job.pieces[index] for index, _ in own], logits_tv, fail)


def _last_attention(engine: Engine, group: SpGroup, q_thd: Tensor, loose: LooseKv) -> Tensor:
    """Attention of the own last rows over KV wherever in the group it lies."""
    last_layer = engine.spec.layers - 1
    routes, pieces = _last_row_routes(group)

    def partial(peer: int | None, q_rhd: Tensor) -> tuple[Tensor, Tensor]:
        asked = [group.job.pieces[index] for index in pieces[peer]]
        held = [
            RequestSlots(engine.pool, it.rid, [last_layer], _written(group, it)) for it in asked
        ]
        out_rhd, lse_rh = engine.attend_rows(last_layer, q_rhd, HeldRows(held))
        for row, piece in enumerate(asked):
            if piece.rid in loose:
                seen = _all_seen(engine, q_rhd[row : row + 1], *loose[piece.rid])
                merge_into(out_rhd[row : row + 1], lse_rh[row, :, None], *seen)
        return out_rhd, lse_rh

    tags = Tag.LAST_ROW_QUERY, Tag.LAST_ROW_PARTIAL
    heads, head_dim = q_thd.shape[1:]
    meeting = Meeting(engine.mesh, routes, q_thd, heads=heads, head_dim=head_dim, tags=tags)
    return exchange_queries(q_thd, meeting, partial)


def _written(group: SpGroup, piece: PrefillPiece) -> list[Span]:
    """What this member has of a piece's KV in its pool. Slots for what comes from others are there
    as well, and are not written yet."""
    stored = [it.span for it in stored_of(group) if it.piece is piece]
    return [*group.history_of(piece, group.member), *stored]


def _all_seen(engine: Engine, q_rhd: Tensor, k_nhd: Tensor, v_nhd: Tensor) -> tuple[Tensor, Tensor]:
    scale = engine.spec.scale
    return attention(q_rhd, k_nhd, v_nhd, q_positions=None, k_positions=None, scale=scale)


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
