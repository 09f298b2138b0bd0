"""The process group that spans a prefill and a decode gang, and the KV that crosses it.

Prefill rank p is rank p of the bridge, decode rank d is rank P + d. Each message of KV is a
header, then keys, then values. Whatever was announced by a header is received, also for a
request that was cancelled meanwhile, so that neither side is left with half a message; whatever
a header says is checked against the receiver's reservation before it enters the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from csps.actors.layout import GangLayout, LocalPiece
from csps.actors.mesh import IDLE, Mesh, Pending, Tag
from csps.actors.name_digest import name_digest
from csps.models.spec import ModelSpec, kv_head_range
from csps.protocols.errors import TransferError
from csps.protocols.messages import ConnectBridge, Span

_MAGIC = 0x63737073  # "csps"
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

    WORDS = 9

    def pack(self) -> Tensor:
        """As int64 words, the form it travels in."""
        numbers = (self.rid, self.layer, self.span.start, self.span.stop)
        heads = (self.heads.start, self.heads.stop, _DTYPES.index(self.dtype))
        return torch.tensor((_MAGIC, self.epoch, *numbers, *heads))

    @classmethod
    def unpack(cls, words: Tensor) -> KvHeader:
        """Read a header; TransferError if it is none, because the stream is out of step then."""
        magic, epoch, rid, layer, start, stop, head, head_stop, dtype = words.tolist()
        ranges = 0 <= start <= stop and 0 <= head <= head_stop
        if magic != _MAGIC or not ranges or not 0 <= dtype < len(_DTYPES):
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        return cls(
            epoch=epoch,
            rid=rid,
            layer=layer,
            span=Span(start=start, stop=stop),
            heads=range(head, head_stop),
            dtype=_DTYPES[dtype],
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
        peer = self.prefill.world_size + decode_rank
        # Copied first: what runs out of memory must not leave a header without its body.
        message = (header.pack(), k_thd.contiguous(), v_thd.contiguous())
        tags = (Tag.KV_HEADER, Tag.KV_KEYS, Tag.KV_VALUES)
        return Pending.all(
            [self._mesh.send(part, peer, tag) for part, tag in zip(message, tags, strict=True)]
        )

    def next_header(self, prefill_rank: int) -> KvHeader:
        """Wait for the next announcement of one prefill rank."""
        words = torch.empty(KvHeader.WORDS, dtype=torch.int64)
        self._mesh.recv(words, prefill_rank, Tag.KV_HEADER).wait(IDLE)
        return KvHeader.unpack(words)

    def receive(self, prefill_rank: int, header: KvHeader, head_dim: int) -> tuple[Tensor, Tensor]:
        """The announced keys and values, each (t, heads, d)."""
        shape = (header.span.length, len(header.heads), head_dim)
        k_thd = torch.empty(shape, dtype=header.dtype, device=self.device)
        v_thd = torch.empty_like(k_thd)
        keys = self._mesh.recv(k_thd, prefill_rank, Tag.KV_KEYS)
        values = self._mesh.recv(v_thd, prefill_rank, Tag.KV_VALUES)
        Pending.all((keys, values)).wait()
        return k_thd, v_thd

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
) -> Iterator[Pending]:
    """Stream one layer's KV of a local piece to the decode ranks that its placement names."""
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
        yield bridge.send(decode_rank, header, k_thd[rows, columns], v_thd[rows, columns])


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
