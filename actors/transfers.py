"""Exchanges that go on while a rank computes, and how much of their time computing hid.

gloo moves data in threads of its own but does not say when it is done: only waiting tells. So
threads wait, one for what leaves and one for what arrives with each tag, each in the order in which
the exchanges were begun, and note the time; whoever needs the data waits for them. One thread for
all arrivals would notice what is to be passed on only when all that was begun before it is here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from csps.actors.collectives.background import Background, Task
from csps.actors.job_clock import JobClock
from csps.actors.mesh import Mesh, Pending, Tag
from csps.actors.timeline import Event, Phase, Timeline

T = TypeVar("T")


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
        self.overlap = overlap
        """Whether exchanges go on beside computing; without, `start` returns when all is over."""
        self._under_way: list[Transfer] = []
        self._together: list[Transfer] | None = None
        self._work: Callable[[], bool] | None = None
        self._backgrounds: dict[str, Background] = {}
        self._on_cuda = _InOrder() if mesh.on_cuda else None
        self._lines: dict[Tag | None, _Line] = {}
        """By tag for what arrives; None is what leaves."""
        self._making_line = threading.Lock()

    def __enter__(self) -> Transfers:
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
            for background in self._backgrounds.values():
                background.close()
            for line in self._lines.values():
                line.close()

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
        *,
        background: bool = False,
    ) -> Transfer:
        """Begin an exchange, see `Mesh.start_exchange`; without overlap, also finish it.

        Args:
            background: a `background` task is the caller: it never waits for the exchange, and its
                time is not the computing thread's.
        """
        begun_ns = time.time_ns()
        # gloo begins to write on the caller's thread: that time is not hidden.
        with nullcontext() if background else self._standing_still():
            begun = self._mesh.start_exchange(sends, recvs, tag)
        received, sent = self._line(tag).add(begun.received), self._line(None).add(begun.sent)
        transfer = Transfer(label, begun_ns, received, sent)
        self._under_way.append(transfer)
        if self._together is not None:
            self._together.append(transfer)
        elif not (self.overlap or background):
            self._finish_one(transfer)
        return transfer

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Without overlap, exchanges begun inside are one collective: they are under way together,
        and waited for at the end. With overlap nobody waits."""
        self._together = None if self.overlap else []
        try:
            yield
            for transfer in self._together or ():
                self._finish_one(transfer)
        finally:
            self._together = None

    def background(self, name: str, device: torch.device) -> Background:
        """The job's line of tasks of this name, which may `start` exchanges."""
        if name not in self._backgrounds:
            self._backgrounds[name] = Background(device, name)
        return self._backgrounds[name]

    def join(self, task: Task[T], label: Label) -> T:
        """What a background task returned, once it has; raises what it raised."""
        if task.ready:
            return task.result()
        with self._standing_still(), self._noted_wait(label):
            return task.result()

    @contextmanager
    def meanwhile(self, work: Callable[[], bool]) -> Iterator[None]:
        """Inside, `wait` does a share of this work rather than nothing, for as long as `work`
        returns true; without overlap it does not. On CUDA each `wait` does one share: nothing has
        ever arrived when the host asks, which is far ahead of the device, and the first to wait
        would take all the work and leave none for the others."""
        self._work = work if self.overlap else None
        try:
            yield
        finally:
            self._work = None

    def wait(self, transfer: Transfer) -> None:
        """Block until everything has arrived; raises RuntimeError when a peer died."""
        while self._work is not None and not transfer.received.done() and self._work():
            if self._on_cuda is not None:
                break
        self._wait(transfer, transfer.received)
        self._let_go(transfer)

    def _finish_one(self, transfer: Transfer) -> None:
        with self._standing_still(), self._noted_wait(transfer.label):
            transfer.received.result()
            transfer.sent.result()
        self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        if self._on_cuda is not None:
            self._on_cuda.let_go(transfer.sent)

    def _standing_still(self) -> AbstractContextManager[None]:
        """With overlap, `_finish` counts how long exchanges went on."""
        return self._clock.waiting() if self.overlap else self._clock.communicating()

    def _wait(self, transfer: Transfer, *futures: Future[int]) -> None:
        if all(future.done() for future in futures):
            for future in futures:
                future.result()
            return
        with self._standing_still(), self._noted_wait(transfer.label):
            for future in futures:
                future.result()

    def _line(self, tag: Tag | None) -> _Line:
        if self._on_cuda is not None:
            return self._on_cuda
        with self._making_line:
            if tag not in self._lines:
                self._lines[tag] = _Waiter("departures" if tag is None else "arrivals")
            return self._lines[tag]

    def _noted_wait(self, label: Label) -> AbstractContextManager[None]:
        return self.timeline.phase("wait", layer=label.layer, level=label.level, micro=label.micro)

    def _finish(self) -> None:
        for transfer in self._under_way:
            self._wait(transfer, transfer.received, transfer.sent)
            self._let_go(transfer)
        if self._on_cuda is not None:
            return
        if self.overlap:
            self._clock.exchange_s += _union_ns(t.span_ns for t in self._under_way) / 1e9
        if not self.timeline.on:
            return  # an event costs more than a phase that is not noted
        for transfer in self._under_way:
            begin, end = transfer.span_ns
            label = transfer.label
            self.timeline.add(Event(label.phase, begin, end, label.layer, label.level, label.micro))


class _Line(Protocol):
    """Operations that are waited for in the order in which they were added."""

    def add(self, pending: Pending) -> Future[int]: ...

    def close(self) -> None: ...


class _InOrder:
    """On CUDA waiting holds up the stream that is current, and not the host.

    Tensors under way stay alive until the computing stream, to whose memory they belong, has waited
    for their exchange. Of what is only sent nobody waits for the end; but NCCL works in the order
    of the calls, so a stream that waited for one exchange waits no longer for those before it.
    """

    def __init__(self) -> None:
        self._alive: deque[_StreamWait] = deque()

    def add(self, pending: Pending) -> Future[int]:
        wait = _StreamWait(pending)
        self._alive.append(wait)
        return wait

    def let_go(self, last: Future[int]) -> None:
        """Give back what was under way until `last`, for which the computing stream waits."""
        if last not in self._alive:
            return
        ended = None
        while ended is not last:
            ended = self._alive.popleft()
            ended.pending.wait()

    def close(self) -> None:
        """Nothing stands behind it."""


class _StreamWait(Future[int]):
    """The current stream waits when asked for its result, every stream that asks."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def result(self, timeout: float | None = None) -> int:
        self.pending.hold_up()
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
