"""An iteration's batch through the network: its own rows, and what others ask of this rank.

Shape suffixes: r query rows, t tokens, h heads, d head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from csps.actors.engine.batch import Batch
from csps.actors.engine.engine import Engine
from csps.actors.engine.held_attention import attend_held
from csps.actors.mesh import Tag
from csps.actors.strategies.query_exchange import ExchangeTimes, exchange_queries


def forward(engine: Engine, batch: Batch, times: ExchangeTimes | None = None) -> Tensor:
    """Logits of the own rows that a token is drawn for.

    Args:
        times: what the exchange of queries took is added to these.
    """
    network, pool = engine.network, engine.pool
    device = engine.device
    if not batch.rows:
        return _serve_others(engine, batch)
    x_td = network.embed(_tokens(batch).to(device))
    rotary = network.rotary(_positions(batch).to(device))
    slots = [held.append() for held, _ in batch.growing] + batch.stored_slots
    stored = [row for _, row in batch.growing] + batch.stored_rows
    slots_t = torch.tensor(slots, dtype=torch.int64, device=device)
    stored_t = torch.tensor(stored, dtype=torch.int64, device=device)
    stores_all = stored == list(range(batch.rows))
    if None in batch.held:
        batch.held[None].grown()
    for index, layer in enumerate(network.layers):
        q_rhd, k_rhd, v_rhd = layer.qkv(x_td, rotary)
        if stores_all:
            pool.write_slots(index, slots_t, k_rhd, v_rhd)
        elif stored:
            pool.write_slots(index, slots_t, k_rhd[stored_t], v_rhd[stored_t])
        _hand_over(engine, batch, index, k_rhd, v_rhd)
        out_rhd = _attend(engine, batch, index, q_rhd, k_rhd, v_rhd, times)
        x_td = layer.finish(x_td, out_rhd.to(q_rhd.dtype))
    if batch.pieces:
        x_td = x_td[[at for _, at in batch.drawing]]
    return network.logits(x_td)


def _serve_others(engine: Engine, batch: Batch) -> Tensor:
    """An iteration without rows of its own: a look at what is held for others' rows."""
    spec, pool = engine.spec, engine.pool
    none_rhd = pool.k.new_empty(0, engine.heads, spec.head_dim)
    no_kv_rhd = pool.k.new_empty(0, pool.kv_heads, spec.head_dim)
    for index in range(spec.layers):
        _hand_over(engine, batch, index, no_kv_rhd, no_kv_rhd)
        _attend(engine, batch, index, none_rhd, no_kv_rhd, no_kv_rhd)
    return none_rhd.new_empty(0, spec.vocab)


def _hand_over(engine: Engine, batch: Batch, layer: int, k_rhd: Tensor, v_rhd: Tensor) -> None:
    """Keys and values of pieces to those who keep them."""
    if not batch.sent and not batch.received:
        return
    kv_rhd = torch.stack((k_rhd, v_rhd), 1)
    sends = [
        (peer, torch.cat([kv_rhd[rows] for rows in cuts])) for peer, cuts in batch.sent.items()
    ]
    buffers = {
        peer: kv_rhd.new_empty(len(slots), *kv_rhd.shape[1:])
        for peer, slots in batch.received.items()
    }
    engine.mesh.exchange(sends, list(buffers.items()), Tag.KEPT_ROWS).wait()
    for peer, arrived in buffers.items():
        slots_t = batch.received_at(peer, kv_rhd.device)
        engine.pool.write_slots(layer, slots_t, arrived[:, 0], arrived[:, 1])


def _attend(
    engine: Engine,
    batch: Batch,
    layer: int,
    q_rhd: Tensor,
    k_rhd: Tensor,
    v_rhd: Tensor,
    times: ExchangeTimes | None = None,
) -> Tensor:
    """Own rows' attention over all that lies before them, wherever it does."""

    def partial(peer: int | None, asked_rhd: Tensor) -> tuple[Tensor, Tensor]:
        own = (k_rhd, v_rhd) if peer is None else None
        return attend_held(engine, batch, layer, peer, asked_rhd, own)

    return exchange_queries(
        q_rhd,
        mesh=engine.mesh,
        routes=batch.routes,
        partial=partial,
        tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
        times=times,
    )


def _tokens(batch: Batch) -> Tensor:
    """(r,) int64, of own rows."""
    decoding = torch.tensor([row.token for row in batch.decoding], dtype=torch.int64)
    pieces = [torch.from_numpy(it.row.tokens(it.span).astype(np.int64)) for it in batch.pieces]
    return torch.cat([decoding, *pieces]) if pieces else decoding


def _positions(batch: Batch) -> Tensor:
    """(r,) int64, of own rows."""
    decoding = torch.tensor([row.next for row in batch.decoding], dtype=torch.int64)
    pieces = [torch.arange(it.span.start, it.span.stop) for it in batch.pieces]
    return torch.cat([decoding, *pieces]) if pieces else decoding
