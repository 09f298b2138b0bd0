"""The process group that spans a prefill and a decode gang, and the KV that crosses it.

Prefill rank p is rank p of the bridge, decode rank d is rank P + d. Each message of KV is a
header, then keys, then values. Where only kept tokens are sent, a mask before the keys says which:
a byte for each token and head, which saves the vectors of those dropped. Row numbers would be
longer as soon as a quarter is kept.

Whatever was announced by a header is received, also for a request that was cancelled meanwhile, so
that neither side is left with half a message; whatever a header says is checked against the
receiver's reservation before it enters the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from csps.actors.kept_kv import KeptKv
from csps.actors.layout import GangLayout, LocalPiece
from csps.actors.mesh import Mesh, Pending, Tag
from csps.actors.name_digest import name_digest
from csps.models.spec import ModelSpec, kv_head_range
from csps.protocols.errors import TransferError
from csps.protocols.messages import ConnectBridge, Span

_MAGIC = 0x63737073  # "csps"
_BEAT = 0x62656174  # "beat"
_ALL_KEPT = -1
SILENCE = timedelta(seconds=10)
"""Without an announcement or a beat, after which a connection counts as broken. Announcements stand
still while a body is received, which has a deadline of its own."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class KvHeader:
    """Announces the keys and values of one layer, span and run of KV heads of a request."""

    epoch: int
    """Digest of the name of the pair of gangs."""
    rid: int
    layer: int
    span: Span
    heads: range
    """Numbered over the whole model, because the gangs' tensor parallelism may differ."""
    dtype: torch.dtype
    kept: int | None = None
    """How many (token, head) pairs follow, behind a mask; None if all do, and no mask."""

    WORDS = 10

    def pack(self) -> Tensor:
        """As int64 words, the form it travels in."""
        numbers = (self.rid, self.layer, self.span.start, self.span.stop)
        heads = (self.heads.start, self.heads.stop, _DTYPES.index(self.dtype))
        kept = _ALL_KEPT if self.kept is None else self.kept
        return torch.tensor((_MAGIC, self.epoch, *numbers, *heads, kept))

    @classmethod
    def unpack(cls, words: Tensor) -> KvHeader:
        """Read a header; TransferError if it is none, because the stream is out of step then."""
        magic, epoch, rid, layer, start, stop, head, head_stop, dtype, kept = words.tolist()
        ranges = 0 <= start <= stop and 0 <= head <= head_stop
        ranges = ranges and _ALL_KEPT <= kept <= (stop - start) * (head_stop - head)
        if magic != _MAGIC or not ranges or not 0 <= dtype < len(_DTYPES):
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        return cls(
            epoch=epoch,
            rid=rid,
            layer=layer,
            span=Span(start=start, stop=stop),
            heads=range(head, head_stop),
            dtype=_DTYPES[dtype],
            kept=None if kept == _ALL_KEPT else kept,
        )


class Bridge:
    """One rank's end of the group between two gangs."""

    def __init__(
        self,
        store: Store,
        connection: ConnectBridge,
        *,
        rank: int,
        is_decode: bool,
        device: str,
        host: str,
    ) -> None:
        self.epoch = name_digest(connection.epoch)
        self.device = device
        self.prefill = GangLayout(world_size=connection.prefill_ranks, tp=connection.prefill_tp)
        self.decode = GangLayout(world_size=connection.decode_ranks, tp=connection.decode_tp)
        self._mesh = Mesh(
            store,
            name=f"bridge/{connection.epoch}",
            rank=self.prefill.world_size + rank if is_decode else rank,
            world_size=self.prefill.world_size + self.decode.world_size,
            device=device,
            host=host,
        )

    def send(self, decode_rank: int, header: KvHeader, k_thd: Tensor, v_thd: Tensor) -> Pending:
        """Start sending; tensors are kept until the returned operation is waited for."""
        body = ((Tag.KV_KEYS, k_thd.contiguous()), (Tag.KV_VALUES, v_thd.contiguous()))
        return self._send(decode_rank, header, body)

    def send_kept(self, decode_rank: int, header: KvHeader, kv: KeptKv) -> Pending:
        """The same of kept tokens, as many as the header says."""
        assert header.kept == len(kv.k_nd) == len(kv.v_nd)
        mask = (Tag.KV_KEPT, kv.kept_ht.contiguous())
        body = (mask, (Tag.KV_KEYS, kv.k_nd), (Tag.KV_VALUES, kv.v_nd))
        return self._send(decode_rank, header, body)

    def _send(
        self, decode_rank: int, header: KvHeader, body: Sequence[tuple[Tag, Tensor]]
    ) -> Pending:
        # The body exists by now: what runs out of memory must not leave a header without it.
        peer = self.prefill.world_size + decode_rank
        message = [(Tag.KV_HEADER, header.pack()), *body]
        return Pending.all([self._mesh.send(it, peer, tag) for tag, it in message if it.numel()])

    def beat(self, decode_rank: int) -> Pending:
        """Start telling a decode rank that nothing else is on its way."""
        words = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
        words[0] = _BEAT
        return self._mesh.send(words, self.prefill.world_size + decode_rank, Tag.KV_HEADER)

    def next_header(self, prefill_rank: int) -> KvHeader:
        """Wait for the next announcement of one prefill rank; PeerLost if it falls silent."""
        words = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
        while True:
            self._mesh.recv(words, prefill_rank, Tag.KV_HEADER).wait(SILENCE)
            if words[0] != _BEAT:
                return KvHeader.unpack(words)

    def receive(self, prefill_rank: int, header: KvHeader, head_dim: int) -> tuple[Tensor, Tensor]:
        """The announced keys and values, each (t, heads, d)."""
        shape = (header.span.length, len(header.heads), head_dim)
        return self._receive(prefill_rank, header.dtype, shape)

    def receive_kept(self, prefill_rank: int, header: KvHeader, head_dim: int) -> KeptKv:
        """Those of kept tokens; whether the mask has as many is for the caller to check."""
        assert header.kept is not None
        shape = (len(header.heads), header.span.length)
        kept_ht = torch.empty(shape, dtype=torch.bool, device=self.device)
        self._mesh.recv(kept_ht, prefill_rank, Tag.KV_KEPT).wait()
        return KeptKv(kept_ht, *self._receive(prefill_rank, header.dtype, (header.kept, head_dim)))

    def _receive(
        self, prefill_rank: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        k = torch.empty(shape, dtype=dtype, device=self.device)
        v = torch.empty_like(k)
        if k.numel():
            keys = self._mesh.recv(k, prefill_rank, Tag.KV_KEYS)
            values = self._mesh.recv(v, prefill_rank, Tag.KV_VALUES)
            Pending.all((keys, values)).wait()
        return k, v

    def close(self) -> None:
        """Leave the group; waiting receivers fail."""
        self._mesh.close()


def send_layer(
    bridge: Bridge,
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
    own_heads = kv_head_range(spec, bridge.prefill.tp_rank_of(rank), bridge.prefill.tp)
    for decode_rank, span, heads in _deliveries(bridge, spec, rank, part):
        rows = slice(span.start - part.span.start, span.stop - part.span.start)
        columns = slice(heads.start - own_heads.start, heads.stop - own_heads.start)
        header = KvHeader(
            epoch=bridge.epoch,
            rid=part.piece.rid,
            layer=layer,
            span=span,
            heads=heads,
            dtype=k_thd.dtype,
        )
        k, v = k_thd[rows, columns], v_thd[rows, columns]
        if kept_ht is None:
            yield bridge.send(decode_rank, header, k, v)
        else:
            kept = KeptKv.of(k, v, kept_ht[columns, rows])
            yield bridge.send_kept(decode_rank, replace(header, kept=len(kept.k_nd)), kept)


def _deliveries(
    bridge: Bridge, spec: ModelSpec, rank: int, part: LocalPiece
) -> Iterator[tuple[int, Span, range]]:
    """(decode rank, span, KV heads) that this prefill rank has to deliver of a local piece."""
    tp_rank = bridge.prefill.tp_rank_of(rank)
    for share in part.piece.destinations:
        span = Span(
            start=min(max(share.span.start, part.span.start), part.span.stop),
            stop=max(min(share.span.stop, part.span.stop), part.span.start),
        )
        if not span.length:
            continue
        for receiver in bridge.decode.ranks_of(share.instance):
            wanted = kv_head_range(spec, bridge.decode.tp_rank_of(receiver), bridge.decode.tp)
            heads = heads_to_deliver(spec, tp_rank, bridge.prefill.tp, wanted)
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
