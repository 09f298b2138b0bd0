"""KV that leaves a prefill rank's pool: which part of a layer goes to which decode rank.

It leaves as fast as its receivers give credit, and no computing thread waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from csps.actors.comm.layout import LocalChunk
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.message import launched_so_far
from csps.actors.kv_transfer.send_queue import SendQueue
from csps.actors.kv_transfer.transfer_tracker import Sending, TransferTracker
from csps.models.network.spec import ModelSpec, kv_head_range
from csps.protocols.core.placement import Span

_log = logging.getLogger(__name__)


def destinations_of(
    connection: KvConnection, spec: ModelSpec, rank: int, part: LocalChunk
) -> Iterator[tuple[int, Span, range]]:
    """Yield (peer, span, KV heads) that this prefill rank has to send of a local chunk."""
    tp_rank = connection.prefill.tp_rank_of(rank)
    decode = connection.decode
    for kv_slice in part.chunk.destinations:
        span = kv_slice.span.intersection(part.span)
        if not span.length or kv_slice.source:
            continue
        for receiver in decode.ranks_of(kv_slice.instance):
            wanted = kv_head_range(spec, decode.tp_rank_of(receiver), decode.tp)
            heads = heads_to_deliver(spec, tp_rank, connection.prefill.tp, wanted)
            if heads:
                yield connection.decode_peers[receiver], span, heads


def heads_to_deliver(spec: ModelSpec, tp_rank: int, tp: int, wanted: range) -> range:
    """Return the wanted KV heads that one tensor-parallel rank of the sender delivers.

    If several ranks of an instance have copies of a head, the first of them delivers it.
    """
    own = kv_head_range(spec, tp_rank, tp)
    start = own.start
    if tp_rank and kv_head_range(spec, tp_rank - 1, tp).stop > start:
        start = kv_head_range(spec, tp_rank - 1, tp).stop
    return range(max(start, wanted.start), max(start, wanted.start, min(own.stop, wanted.stop)))


class KvSender:
    """Sends to all ranks of one decode gang. Each has a queue of its own: a slow one delays no
    other."""

    def __init__(
        self,
        connection: KvConnection,
        pool: KvPool,
        spec: ModelSpec,
        *,
        rank: int,
        in_flight_bytes: int,
        checked: float,
        on_lost: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start the queues.

        Args:
            in_flight_bytes: bytes of KV that may be on their way from this rank, at most.
            checked: fraction of messages that carry a checksum.
            on_lost: called with the reason when a decode rank cannot be reached.
            on_broken: called when this rank can no longer send through its own fault.
        """
        self.connection = connection
        self._pool, self._spec, self._rank = pool, spec, rank
        tp_rank, tp = connection.prefill.tp_rank_of(rank), connection.prefill.tp
        self._heads = kv_head_range(spec, tp_rank, tp)
        self._queues = {
            peer: SendQueue(
                connection,
                peer,
                pool,
                limit_bytes=in_flight_bytes // len(connection.decode_peers),
                checked=checked,
                on_lost=on_lost,
                on_broken=on_broken,
            )
            for peer in connection.decode_peers
        }

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the threads of all queues; they end when the connection does."""
        return [thread for queue in self._queues.values() for thread in queue.threads]

    def post(
        self, tracker: TransferTracker, layer: int, part: LocalChunk, kept_ht: Tensor | None = None
    ) -> None:
        """Send one layer's KV of a local chunk from the pool to the chunk's destinations.

        Args:
            kept_ht: (KV heads, t) bool, the tokens that decode is to see; None for all.
        """
        sequence_id = part.chunk.sequence_id
        ready = launched_so_far(self._pool.k.device)
        pinned = tracker.pin(sequence_id, part.span)
        for peer, span, heads in destinations_of(self.connection, self._spec, self._rank, part):
            rows = part.span.rows_of(span)
            columns = slice(heads.start - self._heads.start, heads.stop - self._heads.start)
            self._queues[peer].post(
                Sending(
                    tracker=tracker,
                    sequence_id=sequence_id,
                    layer=layer,
                    span=span,
                    heads=heads,
                    columns=columns,
                    pinned=pinned,
                    kept_ht=None if kept_ht is None else kept_ht[columns, rows],
                    ready=ready,
                )
            )

    def finish(self, tracker: TransferTracker) -> None:
        """Note that a step will post nothing more: its slots are returned when what waits was
        sent."""
        for queue in self._queues.values():
            queue.finish(tracker)

    def cancel(self, sequence_id: int) -> None:
        """Drop what is not yet sent of a cancelled sequence. An unknown one is ignored."""
        _log.debug("rank %d: stop sending sequence %d", self._rank, sequence_id)
        for queue in self._queues.values():
            queue.cancel(sequence_id)

    def close(self) -> None:
        """Close the connection: what was not received fails."""
        self.connection.close()
        for queue in self._queues.values():
            queue.wake()
