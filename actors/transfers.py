"""Exchanges that go on while a rank computes, and how much of their time computing hid.

gloo moves data in threads of its own but does not say when it is done: only waiting tells. So two
threads wait, one for what arrives and one for what leaves, each in the order in which the
exchanges were begun, and note the time; whoever needs the data waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

from torch import Tensor

from csps.actors.job_clock import JobClock
from csps.actors.mesh import Mesh, Pending, Tag
from csps.actors.timeline import Event, Phase, Timeline


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a transfer carries, for the timeline."""

    phase: Phase
    layer: int | None = None
    level: int | None = None
    micro: int | None = None


@dataclass(frozen=True)
class Transfer:
    """One exchange under way; `received` and `sent` give the time (Unix, ns) of their end."""

    label: Label
    begun_ns: int
    received: Future[int]
    sent: Future[int]

    @property
    def span_ns(self) -> tuple[int, int]:
        """Begin and end, once it has ended."""
        return self.begun_ns, max(self.received.result(), self.sent.result())


class Transfers:
    """Exchanges of one job on one rank; leaving the context waits until all have ended.

    On CUDA waiting only orders the streams, the host never learns when a transfer ended, and
    nothing is counted: use the device's profiler.
    """

    def __init__(self, mesh: Mesh, clock: JobClock, *, overlap: bool = True) -> None:
        self._mesh = mesh
        self._clock = clock
        self._overlap = overlap
        self._under_way: list[Transfer] = []
        self._work: Callable[[], bool] | None = None
        self._arrivals: _Line
        self._departures: _Line

    def __enter__(self) -> Transfers:
        on_cuda = self._mesh.on_cuda
        self._arrivals = _InOrder() if on_cuda else _Waiter("arrivals")
        self._departures = _InOrder() if on_cuda else _Waiter("departures")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._arrivals.close()
            self._departures.close()

    @property
    def timeline(self) -> Timeline:
        """Where the job's phases are noted."""
        return self._clock.timeline

    def start(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
        label: Label,
    ) -> Transfer:
        """Begin an exchange, see `Mesh.start_exchange`; without overlap, also finish it."""
        begun_ns = time.time_ns()
        # gloo begins to write on the caller's thread: that time is not hidden.
        with self._clock.waiting():
            begun = self._mesh.start_exchange(sends, recvs, tag)
        received, sent = self._arrivals.add(begun.received), self._departures.add(begun.sent)
        transfer = Transfer(label, begun_ns, received, sent)
        self._under_way.append(transfer)
        if not self._overlap:
            with self._clock.communicating(), self._noted_wait(label):
                received.result()
                sent.result()
        return transfer

    @contextmanager
    def meanwhile(self, work: Callable[[], bool]) -> Iterator[None]:
        """Inside, `wait` does a share of this work rather than nothing, for as long as `work`
        returns true; without overlap it does not."""
        self._work = work if self._overlap else None
        try:
            yield
        finally:
            self._work = None

    def wait(self, transfer: Transfer) -> None:
        """Block until everything has arrived; raises RuntimeError when a peer died."""
        while self._work is not None and not transfer.received.done() and self._work():
            pass
        self._wait(transfer, transfer.received)

    def _wait(self, transfer: Transfer, *futures: Future[int]) -> None:
        if all(future.done() for future in futures):
            for future in futures:
                future.result()
            return
        with self._clock.waiting(), self._noted_wait(transfer.label):
            for future in futures:
                future.result()

    def _noted_wait(self, label: Label) -> AbstractContextManager[None]:
        return self.timeline.phase("wait", layer=label.layer, level=label.level, micro=label.micro)

    def _finish(self) -> None:
        for transfer in self._under_way:
            self._wait(transfer, transfer.received, transfer.sent)
        if self._mesh.on_cuda:
            return
        if self._overlap:
            self._clock.exchange_s += _union_ns(t.span_ns for t in self._under_way) / 1e9
        for transfer in self._under_way:
            begin, end = transfer.span_ns
            label = transfer.label
            self.timeline.add(Event(label.phase, begin, end, label.layer, label.level, label.micro))


class _Line(Protocol):
    """Operations that are waited for in the order in which they were added."""

    def add(self, pending: Pending) -> Future[int]: ...

    def close(self) -> None: ...


class _InOrder:
    """Waits at once: on CUDA that holds up the stream, in the order of the calls."""

    def add(self, pending: Pending) -> Future[int]:
        return _LazyWait(pending)

    def close(self) -> None:
        pass


class _LazyWait(Future[int]):
    """Waits when asked for its result."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def result(self, timeout: float | None = None) -> int:
        self._pending.wait()
        return 0


class _Waiter:
    """A thread that waits for pending operations one after the other."""

    def __init__(self, name: str) -> None:
        self._items: SimpleQueue[tuple[Pending, Future[int]] | None] = SimpleQueue()
        # A daemon: a peer that hangs must not keep a rank from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, pending: Pending) -> Future[int]:
        future: Future[int] = Future()
        self._items.put((pending, future))
        return future

    def close(self) -> None:
        """End the thread when what was added has ended."""
        self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            pending, future = item
            try:
                pending.wait()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(time.time_ns())


def _union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
