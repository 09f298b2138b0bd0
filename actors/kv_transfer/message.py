"""What announces a message of KV.

What a header announces: keys and values of one layer, in host memory.

Host memory that KV travels in, and the copies between it and a rank's device.

Between gangs KV never goes through NCCL: their ranks share no order of launches, in which
communicators would deadlock, and a gang that dies would take the other one's communicators along.
So it travels in host memory, over gloo. On the CPU that is where it lies anyway, and nothing is
copied; on a GPU it is copied to and from pinned memory, on a stream beside the engine's, and by
threads that the engine does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from csps.actors.kv_cache.sequence_slots import KeptKv
from csps.models.checkpoints.checkpoint import tensor_checksum
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span

_MAGIC = 0x63737073  # "csps"
_NONE = -1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class KvHeader:
    """Announces the keys and values of one layer, span and run of KV heads of a request."""

    epoch: int
    """Digest of the name of the pair of gangs."""
    sequence_id: int
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
        numbers = (self.sequence_id, self.layer, self.span.start, self.span.stop, self.span.step)
        heads = (self.heads.start, self.heads.stop, _DTYPES.index(self.dtype))
        options = (_NONE if it is None else it for it in (self.kept, self.checksum))
        return torch.tensor((_MAGIC, self.epoch, *numbers, *heads, *options))

    @classmethod
    def unpack(cls, words: Tensor) -> KvHeader:
        """Read a header; TransferError if it is none, because the stream is out of step then."""
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


def entry_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """Bytes that a (token, head) pair is charged for: key, value, and a byte of mask."""
    return 2 * head_dim * dtype.itemsize + 1


@dataclass(frozen=True)
class KvBody:
    """Shape suffixes as in `kept_kv`."""

    k: Tensor
    """(t, h, d) of all tokens, or (n, d) of kept ones."""
    v: Tensor
    kept_ht: Tensor | None = None
    """bool; None if all tokens are there."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """In the order in which they travel; empty ones do not."""
        whole = (self.k, self.v) if self.kept_ht is None else (self.kept_ht, self.k, self.v)
        return tuple(part for part in whole if part.numel())

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return self.k.nbytes + self.v.nbytes

    @property
    def kept(self) -> KeptKv | None:
        """If only some tokens are there."""
        return None if self.kept_ht is None else KeptKv(self.kept_ht, self.k, self.v)

    def moved(self, move: Callable[[Tensor], Tensor]) -> KvBody:
        """The same, each tensor somewhere else."""
        kept_ht = None if self.kept_ht is None else move(self.kept_ht)
        return KvBody(move(self.k), move(self.v), kept_ht)

    def checksum(self) -> int:
        """CRC-32 of all bytes that travel."""
        return reduce(lambda start, part: tensor_checksum(part, start), self.parts, 0)


class Launched(Protocol):
    """Something that was handed over to a device."""

    def query(self) -> bool:
        """Whether it has been done."""
        ...


def launched_so_far(device: torch.device) -> Launched | None:
    """What the calling thread has handed over to a device; None where all of it is done."""
    if device.type != "cuda":
        return None
    event: Launched = torch.cuda.current_stream(device).record_event()
    return event


class Staging:
    """The copies of one thread. Each thread has its own, so that none waits for another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is begun inside has ended when the block is left; the engine goes on meanwhile."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory, not initialised."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Contiguous and in host memory, once `copying` is left: itself if it is that already."""
        if not tensor.is_cuda:
            return tensor.contiguous()
        return self.buffer(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Where the pool is, once `copying` is left: itself if it is there already."""
        return tensor.to(self._device, non_blocking=True)
