"""A device that lags behind its host, on virtual time, and a host whose own work takes no time.

Each thread has a clock and a device of its own, as each rank has. What is launched takes its time
on the device, one piece after the other. The host's clock goes on only while the host waits.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from csps.actors.engine import decode_batch, loop, move_run, pending_steps, step_reports, step_run
from csps.actors.timing import device_pace, timeline

NS = 10**9


class LaunchedWork:
    """An event behind all that was launched so far."""

    def __init__(self, device: LaggingDevice, done_ns: int) -> None:
        self._device, self._done_ns = device, done_ns

    def query(self) -> bool:
        """Return whether the device has got there."""
        return self._device.now_ns >= self._done_ns

    def synchronize(self) -> None:
        """Let the host wait for the device to get there."""
        self._device.now_ns = max(self._device.now_ns, self._done_ns)


class LaggingDevice(threading.local):
    """The devices of all threads. The time of a thread's host and of its device begin at 0."""

    now_ns = 0
    """Time of the host."""
    busy_until_ns = 0
    """Time at which the device will have done all that was launched."""

    def launch(self, ns: int) -> None:
        """Launch work that takes this long."""
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + ns

    @property
    def lag_ns(self) -> int:
        """Return how far the device is behind."""
        return max(0, self.busy_until_ns - self.now_ns)

    def launched_so_far(self, device: torch.device) -> LaunchedWork:
        """Stand for `device_pace.launched_so_far`."""
        return LaunchedWork(self, self.busy_until_ns)

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Let engines on the CPU run on this device, and count its time."""
        patch.setattr(device_pace, "launched_so_far", self.launched_so_far)
        clock = SimpleNamespace(
            monotonic=lambda: self.now_ns / NS,
            monotonic_ns=lambda: self.now_ns,
            time_ns=time.time_ns,
            thread_time_ns=time.thread_time_ns,
        )
        engine = (decode_batch, loop, move_run, pending_steps, step_reports, step_run)
        for module in (*engine, timeline):
            patch.setattr(module, "time", clock)
