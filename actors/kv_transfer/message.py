"""A message of KV: its header, its body in host memory, and the copies from and to a device.

Between gangs KV never goes through NCCL. Their ranks share no order of launches, without which
communicators would deadlock, and a dying gang would take the other's communicators along. So KV
travels in host memory, over gloo. A CPU rank copies nothing. A GPU rank copies to and from pinned
memory, on a stream beside the engine's, in threads for which the engine does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from csps.actors.kv_cache.sequence_slots import KeptKv
from csps.actors.timing.device_pace import Launched
from csps.models.checkpoints.checkpoint import tensor_checksum
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span

_MAGIC = 0x63737073  # "csps"
_NONE = -1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)


@dataclass(frozen=True, kw_only=True)
class KvHeader:
    """Header of the keys and values of one layer, span and run of KV heads of a sequence."""

    epoch: int
    """Digest of the name of the pair of gangs."""
    sequence_id: int
    layer: int
    span: Span
    heads: range
    """KV heads, numbered over the whole model, because the gangs' tensor parallelism may differ."""
    dtype: torch.dtype
    kept: int | None = None
    """Number of kept (token, head) pairs that follow, after a mask; None if all follow, without a
    mask."""
    checksum: int | None = None
    """Checksum of the body; None if nobody is to compare it."""

    WORDS = 12

    @property
    def entries(self) -> int:
        """Return the number of (token, head) pairs of the span, sent or not."""
        return self.span.length * len(self.heads)

    def charge(self, width: int) -> int:
        """Return the bytes that the message takes of the credit: as many as if all tokens were
        kept, so that both sides know the charge before anything is read.

        Args:
            width: numbers of a head of a token.
        """
        return self.entries * entry_bytes(self.dtype, width)

    def pack(self) -> Tensor:
        """Return the header as int64 words, the form in which it travels."""
        numbers = (self.sequence_id, self.layer, self.span.start, self.span.stop, self.span.step)
        heads = (self.heads.start, self.heads.stop, _DTYPES.index(self.dtype))
        options = (_NONE if option is None else option for option in (self.kept, self.checksum))
        return torch.tensor((_MAGIC, self.epoch, *numbers, *heads, *options))

    @classmethod
    def unpack(cls, words: Tensor) -> KvHeader:
        """Read a header; raise TransferError if it is none, because the channel is out of step
        then."""
        magic, epoch, sequence_id, layer, start, stop, step, head, head_stop, *options = (
            words.tolist()
        )
        dtype, kept, checksum = options
        ranges = 0 <= start <= stop and step >= 1 and 0 <= head <= head_stop
        if magic != _MAGIC or not ranges or not 0 <= dtype < len(_DTYPES):
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        span = Span(start, stop, step)
        if not _NONE <= kept <= span.length * (head_stop - head) or not _NONE <= checksum < 2**32:
            raise TransferError(f"expected a KV header, got {words.tolist()}")
        return cls(
            epoch=epoch,
            sequence_id=sequence_id,
            layer=layer,
            span=span,
            heads=range(head, head_stop),
            dtype=_DTYPES[dtype],
            kept=None if kept == _NONE else kept,
            checksum=None if checksum == _NONE else checksum,
        )


def entry_bytes(dtype: torch.dtype, width: int) -> int:
    """Return the bytes that a (token, head) pair is charged for: key and value, of so many numbers
    each, and a byte of mask."""
    return 2 * width * dtype.itemsize + 1


@dataclass(frozen=True)
class KvBody:
    """Keys and values of a message; shape suffixes as in `sequence_slots`."""

    k: Tensor
    """Keys: (t, h, d) of all tokens, or (n, d) of kept ones."""
    v: Tensor
    kept_ht: Tensor | None = None
    """Mask (bool) of kept tokens; None if all tokens are there."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order in which they travel, without empty ones, which do
        not."""
        whole = (self.k, self.v) if self.kept_ht is None else (self.kept_ht, self.k, self.v)
        return tuple(part for part in whole if part.numel())

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    @property
    def kept(self) -> KeptKv | None:
        """Return the body as kept tokens; None if all tokens are there."""
        return None if self.kept_ht is None else KeptKv(self.kept_ht, self.k, self.v)

    def moved(self, move: Callable[[Tensor], Tensor]) -> KvBody:
        """Return the body with each tensor moved by a function."""
        kept_ht = None if self.kept_ht is None else move(self.kept_ht)
        return KvBody(move(self.k), move(self.v), kept_ht)

    def checksum(self) -> int:
        """Return the CRC-32 of all bytes that travel."""
        return reduce(lambda start, part: tensor_checksum(part, start), self.parts, 0)


class Staging:
    """Copies of one thread between host and device. Each thread has its own stream, so that none
    waits for another's copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self, after: Launched | None = None) -> Iterator[None]:
        """Wait at the end of the block for the copies begun inside; the engine goes on
        meanwhile.

        Args:
            after: work that the copies wait for.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait(self._stream)
            yield
            self._stream.synchronize()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory, not initialized."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor contiguous in host memory, once `copying` is left: itself if it is that
        already."""
        if not tensor.is_cuda:
            return tensor.contiguous()
        return self.buffer(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the pool's device, once `copying` is left: itself if it is there
        already."""
        return tensor.to(self._device, non_blocking=True)
