"""Host memory that KV travels in, and the copies between it and a rank's device.

Between gangs KV never goes through NCCL: their ranks share no order of launches, in which
communicators would deadlock, and a gang that dies would take the other one's communicators along.
So it travels in host memory, over gloo. On the CPU that is where it lies anyway, and nothing is
copied; on a GPU it is copied to and from pinned memory, on a stream beside the engine's, and by
threads that the engine does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


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
