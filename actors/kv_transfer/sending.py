"""KV that waits for its turn to be sent: described, and not copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csps.actors.kept_kv import KeptKv
from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer.body import KvBody
from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.header import KvHeader, entry_bytes
from csps.actors.kv_transfer.staging import Launched, Staging
from csps.actors.slot_allocator import PinnedSpan
from csps.protocols.span import Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Sending:
    """One layer, span and run of KV heads of a request, for one receiver."""

    delivery: Delivery
    rid: int
    layer: int
    span: Span
    heads: range
    """Numbered over the whole model."""
    columns: slice
    """The same heads, as this rank's pool numbers them."""
    pinned: PinnedSpan
    """Contains the span."""
    kept_ht: Tensor | None = None
    """(heads, t) bool, the tokens that decode is to see; None for all."""
    ready: Launched | None = None
    """When the pool has it; None if it has it already."""

    def split(self, rows: int) -> tuple[Sending, Sending | None]:
        """The first so many tokens, and the others if there are any."""
        if rows >= self.span.length:
            return self, None
        self.delivery.posted()
        return self._within(slice(0, rows)), self._within(slice(rows, None))

    def _within(self, rows: slice) -> Sending:
        kept_ht = None if self.kept_ht is None else self.kept_ht[:, rows]
        return replace(self, span=self.span.part(rows), kept_ht=kept_ht)

    def row_bytes(self, pool: KvPool) -> int:
        """That a token is charged for."""
        return len(self.heads) * entry_bytes(pool.k.dtype, pool.head_dim)

    def read(self, pool: KvPool, staging: Staging) -> KvBody:
        """Out of the pool, into host memory if it is not there."""
        with torch.inference_mode(), staging.copying():
            k, v = pool.read_pinned(self.layer, self.pinned, self.span, heads=self.columns)
            if self.kept_ht is None:
                return KvBody(k, v).moved(staging.to_host)
            kept = KeptKv.of(k, v, self.kept_ht)
            return KvBody(kept.k_nd, kept.v_nd, kept.kept_ht).moved(staging.to_host)

    def header(self, epoch: int, body: KvBody, *, checked: bool) -> KvHeader:
        """Announces what was read."""
        return KvHeader(
            epoch=epoch,
            rid=self.rid,
            layer=self.layer,
            span=self.span,
            heads=self.heads,
            dtype=body.k.dtype,
            kept=None if body.kept_ht is None else len(body.k),
            checksum=body.checksum() if checked else None,
        )
