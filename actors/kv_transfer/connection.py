"""The connection that KV crosses from a prefill to a decode gang: a process group of both.

Prefill rank p is rank p of the group, decode rank d is rank P + d. Each message of KV is a
header, then keys, then values. Where only kept tokens are sent, a mask before the keys says which:
a byte for each token and head, which saves the vectors of those dropped. Row numbers would be
longer as soon as a quarter is kept.

Whatever was announced by a header is received, also for a request that was cancelled meanwhile, so
that neither side is left with half a message; whatever a header says is checked against the
receiver's reservation before it enters the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from csps.actors.kept_kv import KeptKv
from csps.actors.kv_transfer.header import KvHeader
from csps.actors.layout import GangLayout
from csps.actors.mesh import Mesh, Pending, Tag
from csps.actors.name_digest import name_digest
from csps.protocols.messages import ConnectKv

_BEAT = 0x62656174  # "beat"
SILENCE = timedelta(seconds=10)
"""Without an announcement or a beat, after which a connection counts as broken. Announcements stand
still while a body is received, which has a deadline of its own."""


class KvConnection:
    """One rank's end of the group between two gangs."""

    def __init__(
        self,
        store: Store,
        connection: ConnectKv,
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
            name=f"kv/{connection.epoch}",
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
