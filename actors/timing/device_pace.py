"""How far a device is behind the host that launches its work.

A GPU's host launches a layer long before the GPU computes it. Left alone it would launch a whole
step: what is measured on the host would be the time to launch, a preempting step would queue behind
all of it, and an exchange would be under way for as long as everything before it takes. So the host
waits: in a step for the layer before the last, and for everything before it turns to other work.
Times that a rank reports are then its device's. A CPU is never behind.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

AHEAD = 2
"""Layers of a step that may be launched and not done. With one the device would idle at the end of
each layer until the host had launched the next kernel."""


class Launched(Protocol):
    """Work that was handed to a device."""

    def query(self) -> bool:
        """Return whether the work is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the work is done."""
        ...

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what is launched on a stream from now on wait for the work; the host does not."""
        ...


def launched_so_far(device: torch.device) -> Launched | None:
    """Return all work on the calling thread's stream; None where work is done at once. All threads
    but those that copy KV have the stream of the engine."""
    if device.type != "cuda":
        return None
    # A blocking event, because a host that polls would take the core of another rank's host.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has done all that the calling thread has launched."""
    # There is no deadline here: a device that does not get on is silent, and the router's deadlines
    # (`prefill.progress_deadline_s`) or NCCL's watchdog (`DEVICE_DEADLINE`) end its gang.
    if (launched := launched_so_far(device)) is not None:
        launched.synchronize()


class DevicePace:
    """Keeps the host of one step at most `AHEAD` layers ahead of its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: deque[Launched] = deque()
        """Work before each of the last layers."""

    def begin_layer(self) -> None:
        """Wait for the layer before the last, before another one is begun."""
        if (before := launched_so_far(self._device)) is not None:
            self._begun.append(before)
            if len(self._begun) == AHEAD:
                self._begun.popleft().synchronize()

    def wait(self) -> None:
        """Wait for everything, before the host turns to other work."""
        self._begun.clear()
        wait_for_device(self._device)
