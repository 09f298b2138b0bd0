"""Which part of a layer's KV goes to which decode rank."""

from __future__ import annotations

from collections.abc import Iterator

from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.layout import LocalPiece
from csps.models.spec import ModelSpec, kv_head_range
from csps.protocols.span import Span


def destinations_of(
    connection: KvConnection, spec: ModelSpec, rank: int, part: LocalPiece
) -> Iterator[tuple[int, Span, range]]:
    """(peer, span, KV heads) that this prefill rank has to deliver of a local piece."""
    tp_rank = connection.prefill.tp_rank_of(rank)
    decode = connection.decode
    for share in part.piece.destinations:
        span = share.span.intersection(part.span)
        if not span.length or share.origin is not None:
            continue
        for receiver in decode.ranks_of(share.instance):
            wanted = kv_head_range(spec, decode.tp_rank_of(receiver), decode.tp)
            heads = heads_to_deliver(spec, tp_rank, connection.prefill.tp, wanted)
            if heads:
                yield connection.decode_peers[receiver], span, heads


def heads_to_deliver(spec: ModelSpec, tp_rank: int, tp: int, wanted: range) -> range:
    """The wanted KV heads that fall to one tensor-parallel rank of the sender.

    Where several ranks of an instance hold copies of a head, the first of them delivers it.
    """
    own = kv_head_range(spec, tp_rank, tp)
    start = own.start
    if tp_rank and kv_head_range(spec, tp_rank - 1, tp).stop > start:
        start = kv_head_range(spec, tp_rank - 1, tp).stop
    return range(max(start, wanted.start), max(start, wanted.start, min(own.stop, wanted.stop)))
