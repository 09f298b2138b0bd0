"""Which part of a layer's KV goes to which decode rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from csps.actors.kept_kv import KeptKv
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.header import KvHeader
from csps.actors.layout import LocalPiece
from csps.actors.mesh import Pending
from csps.models.spec import ModelSpec, kv_head_range
from csps.protocols.messages import Span


def send_layer(
    connection: KvConnection,
    spec: ModelSpec,
    *,
    rank: int,
    layer: int,
    part: LocalPiece,
    k_thd: Tensor,
    v_thd: Tensor,
    kept_ht: Tensor | None = None,
) -> Iterator[Pending]:
    """Stream one layer's KV of a local piece to the decode ranks that its placement names.

    Args:
        kept_ht: (KV heads, t) bool, the tokens that decode is to see; None for all.
    """
    own_heads = kv_head_range(spec, connection.prefill.tp_rank_of(rank), connection.prefill.tp)
    for decode_rank, span, heads in _deliveries(connection, spec, rank, part):
        rows = slice(span.start - part.span.start, span.stop - part.span.start)
        columns = slice(heads.start - own_heads.start, heads.stop - own_heads.start)
        header = KvHeader(
            epoch=connection.epoch,
            rid=part.piece.rid,
            layer=layer,
            span=span,
            heads=heads,
            dtype=k_thd.dtype,
        )
        k, v = k_thd[rows, columns], v_thd[rows, columns]
        if kept_ht is None:
            yield connection.send(decode_rank, header, k, v)
        else:
            kept = KeptKv.of(k, v, kept_ht[columns, rows])
            yield connection.send_kept(decode_rank, replace(header, kept=len(kept.k_nd)), kept)


def _deliveries(
    connection: KvConnection, spec: ModelSpec, rank: int, part: LocalPiece
) -> Iterator[tuple[int, Span, range]]:
    """(decode rank, span, KV heads) that this prefill rank has to deliver of a local piece."""
    tp_rank = connection.prefill.tp_rank_of(rank)
    for share in part.piece.destinations:
        span = Span(
            start=min(max(share.span.start, part.span.start), part.span.stop),
            stop=max(min(share.span.stop, part.span.stop), part.span.start),
        )
        if not span.length:
            continue
        for receiver in connection.decode.ranks_of(share.instance):
            wanted = kv_head_range(
                spec, connection.decode.tp_rank_of(receiver), connection.decode.tp
            )
            heads = heads_to_deliver(spec, tp_rank, connection.prefill.tp, wanted)
            if heads:
                yield receiver, span, heads


def heads_to_deliver(spec: ModelSpec, tp_rank: int, tp: int, wanted: range) -> range:
    """The wanted KV heads that fall to one tensor-parallel rank of the sender.

    Where several ranks of an instance hold copies of a head, the first of them delivers it.
    """
    own = kv_head_range(spec, tp_rank, tp)
    start = own.start
    if tp_rank and kv_head_range(spec, tp_rank - 1, tp).stop > start:
        start = kv_head_range(spec, tp_rank - 1, tp).stop
    return range(max(start, wanted.start), max(start, wanted.start, min(own.stop, wanted.stop)))
