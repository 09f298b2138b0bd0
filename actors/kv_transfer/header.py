"""What announces a message of KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csps.protocols.errors import TransferError
from csps.protocols.span import Span

_MAGIC = 0x63737073  # "csps"
_NONE = -1
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
    checksum: int | None = None
    """Of what follows; None if nobody is to compare it."""

    WORDS = 12

    @property
    def entries(self) -> int:
        """(token, head) pairs that the span has, whether all of them follow or not."""
        return self.span.length * len(self.heads)

    def charge(self, head_dim: int) -> int:
        """Bytes that the message counts for against what the receiver has granted: as many as if
        everything was kept, so that both sides know it before anything is read."""
        return self.entries * entry_bytes(self.dtype, head_dim)

    def pack(self) -> Tensor:
        """As int64 words, the form it travels in."""
        numbers = (self.rid, self.layer, self.span.start, self.span.stop, self.span.step)
        heads = (self.heads.start, self.heads.stop, _DTYPES.index(self.dtype))
        options = (_NONE if it is None else it for it in (self.kept, self.checksum))
        return torch.tensor((_MAGIC, self.epoch, *numbers, *heads, *options))

    @classmethod
    def unpack(cls, words: Tensor) -> KvHeader:
        """Read a header; TransferError if it is none, because the stream is out of step then."""
        magic, epoch, rid, layer, start, stop, step, head, head_stop, *options = words.tolist()
        dtype, kept, checksum = options
        ranges = 0 <= start <= stop and step >= 1 and 0 <= head <= head_stop
        if magic != _MAGIC or not ranges or not 0 <= dtype < len(_DTYPES):
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        span = Span(start, stop, step)
        if not _NONE <= kept <= span.length * (head_stop - head) or not _NONE <= checksum < 2**32:
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        return cls(
            epoch=epoch,
            rid=rid,
            layer=layer,
            span=span,
            heads=range(head, head_stop),
            dtype=_DTYPES[dtype],
            kept=None if kept == _NONE else kept,
            checksum=None if checksum == _NONE else checksum,
        )


def entry_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """Bytes that a (token, head) pair is charged for: key, value, and a byte of mask."""
    return 2 * head_dim * dtype.itemsize + 1
