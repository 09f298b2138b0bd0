"""An iteration's batch through the network: its own rows, and what others ask of this rank.

Shape suffixes: r query rows, t tokens, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from csps.actors.engine.batch import Batch
from csps.actors.engine.engine import Engine
from csps.actors.engine.held_attention import attend_held
from csps.actors.mesh import Tag
from csps.actors.process_group import Pending
from csps.actors.strategies.query_exchange import (
    ExchangeTimes,
    Meeting,
    exchange_queries,
)


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
    exchanges = _exchanges(engine, batch)
    for index, (layer, others) in enumerate(zip(network.layers, exchanges, strict=True)):
        q_rhd, k_rhd, v_rhd = layer.qkv(x_td, rotary)
        if stores_all:
            pool.write_slots(index, slots_t, k_rhd, v_rhd)
        elif stored:
            pool.write_slots(index, slots_t, k_rhd[stored_t], v_rhd[stored_t])
        out_rhd = others.attend(q_rhd, k_rhd, v_rhd, times)
        x_td = layer.finish(x_td, out_rhd.to(q_rhd.dtype))
    if batch.pieces:
        x_td = x_td[[at for _, at in batch.drawing]]
    return network.logits(x_td)


def _serve_others(engine: Engine, batch: Batch) -> Tensor:
    """An iteration without rows of its own: a look at what is held for others' rows."""
    spec, pool = engine.spec, engine.pool
    none_rhd = pool.k.new_empty(0, engine.heads, spec.head_dim)
    no_kv_rhd = pool.k.new_empty(0, pool.kv_heads, spec.head_dim)
    for others in _exchanges(engine, batch):
        others.attend(none_rhd, no_kv_rhd, no_kv_rhd)
    return none_rhd.new_empty(0, spec.vocab)


def _exchanges(engine: Engine, batch: Batch) -> Iterable[_LayerOfOthers]:
    """Of all layers, where receives are expected ahead. Where exchanges are in order nothing is,
    and a device would have every layer's buffers at once in vain."""
    layers = (_LayerOfOthers(engine, batch, index) for index in range(engine.spec.layers))
    return layers if engine.mesh.in_order else list(layers)


class _LayerOfOthers:
    """One layer's exchange with peers, who hold KV of own rows or have rows whose KV is held here.
    What it receives is expected from here on."""

    def __init__(self, engine: Engine, batch: Batch, index: int) -> None:
        self._engine, self._batch, self._index = engine, batch, index
        pool = engine.pool
        self._kept = {
            peer: pool.k.new_empty(len(slots), 2, pool.kv_heads, pool.head_dim)
            for peer, slots in batch.received.items()
        }
        self._handing = engine.mesh.expect(list(self._kept.items()), Tag.KEPT_ROWS)
        self._meeting = Meeting(
            engine.mesh,
            batch.routes,
            pool.k,
            heads=engine.heads,
            head_dim=pool.head_dim,
            tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
        )

    def attend(
        self,
        q_rhd: Tensor,
        k_rhd: Tensor,
        v_rhd: Tensor,
        times: ExchangeTimes | None = None,
    ) -> Tensor:
        """Own rows' attention over all that lies before them, wherever it does. Keys and values go
        to those who keep them before queries do, and are there before these are answered."""
        others = self._batch.sent or self._batch.received
        handed = self._handing.send(self._handed(k_rhd, v_rhd)) if others else Pending([], [])

        def partial(peer: int | None, asked_rhd: Tensor) -> tuple[Tensor, Tensor]:
            if peer is not None:
                self._store(handed)
            own = (k_rhd, v_rhd) if peer is None else None
            return attend_held(self._engine, self._batch, self._index, peer, asked_rhd, own)

        out_rhd = exchange_queries(q_rhd, self._meeting, partial, times)
        self._store(handed)
        return out_rhd

    def _handed(self, k_rhd: Tensor, v_rhd: Tensor) -> list[tuple[int, Tensor]]:
        kv_rhd = torch.stack((k_rhd, v_rhd), 1)
        sent = self._batch.sent.items()
        return [(peer, torch.cat([kv_rhd[rows] for rows in cuts])) for peer, cuts in sent]

    def _store(self, handed: Pending) -> None:
        """What others have handed over, once."""
        handed.wait()
        while self._kept:
            peer, arrived = self._kept.popitem()
            slots_t = self._batch.received_at(peer, arrived.device)
            self._engine.pool.write_slots(self._index, slots_t, arrived[:, 0], arrived[:, 1])


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
