"""Exchanges that go on while a rank computes, and how much of their time computing hid.

gloo moves data in threads of its own but does not say when it is done: only waiting tells. So
threads wait and note the time: one for all sends and one for the receives of each tag, each in the
order in which the exchanges were begun. Whoever needs the data waits for these threads. With one
thread for all receives, rows to pass on would be noticed only after all receives begun before them.
The threads only wait; the thread that computes begins every exchange.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, TypeVar

from torch import Tensor

from csps.actors.comm.continuations import (
    Continuation,
    Continuations,
    PolledContinuations,
    StreamContinuations,
)
from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.process_group import Pending
from csps.actors.timing.timeline import Phase, PhaseEvent, PhaseTimeline, StepClock

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Label:
    """Contents of a transfer, for the timeline."""

    phase: Phase
    layer: int | None = None
    level: int | None = None
    micro: int | None = None


@dataclass(frozen=True)
class PendingTransfer:
    """One exchange under way; `received` and `sent` give the time (Unix, ns) of their end."""

    label: Label
    begun_ns: int
    received: Future[int]
    sent: Future[int]
    sent_bytes: int

    @property
    def span_ns(self) -> tuple[int, int]:
        """Return begin and end, once the exchange has ended."""
        return self.begun_ns, max(self.received.result(), self.sent.result())


class Transfers:
    """Exchanges of one step on one rank; leaving the context waits until all have ended.

    Where exchanges end in the order of their calls, waiting only orders the streams. The host never
    learns when a transfer ended, and nothing is counted: use the device's profiler.
    """

    def __init__(self, mesh: Mesh, clock: StepClock, *, overlap: bool = True) -> None:
        self._mesh = mesh
        self._clock = clock
        self.overlap = overlap
        """Flag that exchanges go on beside computing; without it `start` returns when the exchange
        is over."""
        self._under_way: list[PendingTransfer] = []
        self._together: list[PendingTransfer] | None = None
        self._work: Callable[[], bool] | None = None
        self._in_order = _InOrder() if mesh.in_order else None
        self._continuations: Continuations = (
            StreamContinuations(mesh.device) if mesh.in_order else PolledContinuations()
        )
        self._in_continuation = False
        """Flag that a continuation runs: nobody waits for what it begins."""
        self._something_ended = threading.Event()
        """Event that is set when a send or a receive has ended."""
        self._is_blocked = False
        self._waiters: dict[Tag | None, _Waiter] = {}
        """Waiters by tag for receives; None is for sends."""

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
            for waiter in self._waiters.values():
                waiter.release()

    @property
    def timeline(self) -> PhaseTimeline:
        """Return the timeline of the step's phases."""
        return self._clock.timeline

    def start(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
        label: Label,
    ) -> PendingTransfer:
        """Begin an exchange, see `Mesh.start_exchange`; without overlap, also finish it."""
        begun_ns = time.time_ns()
        # gloo begins to write on the caller's thread: that time is not hidden.
        with self._blocked():
            begun = self._mesh.start_exchange(sends, recvs, tag)
        received, sent = self._waiter(tag).add(begun.received), self._waiter(None).add(begun.sent)
        for future in (received, sent):
            future.add_done_callback(lambda _: self._something_ended.set())
        sent_bytes = sum(tensor.nbytes for _, tensor in sends)
        transfer = PendingTransfer(label, begun_ns, received, sent, sent_bytes)
        self._under_way.append(transfer)
        if self._together is not None:
            self._together.append(transfer)
        elif not (self.overlap or self._in_continuation):
            self._finish_one(transfer)
        return transfer

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Combine exchanges begun inside into one collective: without overlap, all are under way
        together and are waited for at the end. With overlap nobody waits."""
        self._together = None if self.overlap else []
        try:
            yield
            for transfer in self._together or ():
                self._finish_one(transfer)
        finally:
            self._together = None

    def pass_on(
        self, arrival: PendingTransfer, sends: Sequence[tuple[int, Tensor]], tag: Tag, label: Label
    ) -> Continuation[None]:
        """Send what an exchange receives unchanged, once it has arrived."""
        if self._in_order is not None:  # then the receive ends before the send begins
            self._begin_forward(sends, tag, label)
            done: Future[None] = Future()
            done.set_result(None)
            return Continuation(done)
        return self.then("passed on", arrival, partial(self._begin_forward, sends, tag, label))

    def then(
        self, channel: str, arrival: PendingTransfer, task: Callable[[], T]
    ) -> Continuation[T]:
        """Run a task, which may `start` exchanges, after an arrival; see `Continuations`."""
        return self._continuations.then(
            channel, arrival.received, partial(self._run_continuation, task)
        )

    def progress(self) -> None:
        """Pass on what has arrived. Call it between two parts of a long computation."""
        self._continuations.progress()

    def drain(self) -> None:
        """Run all continuations. Call it before the thread turns to other work, when only exchanges
        that others have begun are waited for."""
        while self._continuations.waiting:
            self._something_ended.clear()
            self.progress()
            if self._continuations.waiting:
                self._something_ended.wait()

    def join(self, task: Continuation[T], label: Label) -> T:
        """Return what a continuation returned, once it has run, or raise its error."""
        if not task.ready and self._in_order is None:
            with self._blocked(), self._noted_wait(label):
                self._await(task.future)
        return task.result()

    def _begin_forward(self, sends: Sequence[tuple[int, Tensor]], tag: Tag, label: Label) -> None:
        self._run_continuation(lambda: self.start(sends, [], tag, label))

    def _run_continuation(self, task: Callable[[], T]) -> T:
        before, self._in_continuation = self._in_continuation, True
        try:
            return task()
        finally:
            self._in_continuation = before

    @contextmanager
    def meanwhile(self, work: Callable[[], bool]) -> Iterator[None]:
        """Let each `wait` inside do parts of this work instead of nothing, while `work` returns
        true. Without overlap `wait` does none."""
        self._work = work if self.overlap else None
        try:
            yield
        finally:
            self._work = None

    def wait(self, transfer: PendingTransfer) -> None:
        """Block until everything has arrived; raise RuntimeError when a peer died."""
        while self._work is not None and not transfer.received.done() and self._work():
            self.progress()
            # The host is far ahead of the device and never sees an arrival: the first `wait` would
            # take all the work and leave none to the others.
            if self._in_order is not None:
                break
        self._wait(transfer, transfer.received)
        self._release(transfer)

    def complete(self, transfer: PendingTransfer) -> None:
        """Block as `wait` does, and until what was sent may change."""
        self._wait(transfer, transfer.received, transfer.sent)
        self._release(transfer)

    def _finish_one(self, transfer: PendingTransfer) -> None:
        with self._blocked(), self._noted_wait(transfer.label):
            self._await(transfer.received)
            self._await(transfer.sent)
        self._release(transfer)

    def _release(self, transfer: PendingTransfer) -> None:
        if self._in_order is not None:
            self._in_order.release_until(transfer.sent)

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        """Count the time inside as waiting. With overlap, `_finish` counts how long exchanges went
        on."""
        if self._is_blocked:  # a continuation begins an exchange while others are waited for
            yield
            return
        self._is_blocked = True
        try:
            with self._clock.waiting() if self.overlap else self._clock.communicating():
                yield
        finally:
            self._is_blocked = False

    def _wait(self, transfer: PendingTransfer, *futures: Future[int]) -> None:
        if all(future.done() for future in futures):
            for future in futures:
                future.result()
            return
        with self._blocked(), self._noted_wait(transfer.label):
            for future in futures:
                self._await(future)

    def _await(self, future: Future[T]) -> None:
        """Wait for a future; what arrives meanwhile is passed on."""
        while self._continuations.waiting and not future.done():
            self._something_ended.clear()
            self.progress()
            if not future.done():
                self._something_ended.wait()
        future.result()

    def _waiter(self, tag: Tag | None) -> _Waiter:
        if self._in_order is not None:
            return self._in_order
        if tag not in self._waiters:
            self._waiters[tag] = self._mesh.waiting.lend()
        return self._waiters[tag]

    def _noted_wait(self, label: Label) -> AbstractContextManager[None]:
        return self.timeline.phase("wait", layer=label.layer, level=label.level, micro=label.micro)

    def _finish(self) -> None:
        for transfer in self._under_way:
            self.complete(transfer)
            self.progress()  # continuations append transfers, which this loop then completes
        if self._in_order is not None:
            return
        if self.overlap:
            self._clock.exchanged(transfer.span_ns for transfer in self._under_way)
        if not self.timeline.on:
            return  # an event costs more than a phase that is not noted
        for transfer in self._under_way:
            begin, end = transfer.span_ns
            label = transfer.label
            self.timeline.add(
                PhaseEvent(
                    label.phase,
                    begin,
                    end,
                    label.layer,
                    label.level,
                    label.micro,
                    bytes=transfer.sent_bytes,
                )
            )


class _Waiter(Protocol):
    """Operations that are waited for in the order in which they were added."""

    def add(self, pending: Pending) -> Future[int]: ...

    def release(self) -> None: ...


class _InOrder:
    """Waiting blocks the current stream and not the host (on a CPU that is the same).

    Tensors under way stay alive until the computing stream, to whose memory they belong, has waited
    for their exchange. Nobody waits for the end of a mere send. But NCCL works in the order of the
    calls, so a stream that waited for one exchange need not wait for those before it.
    """

    def __init__(self) -> None:
        self._alive: deque[_StreamWait] = deque()

    def add(self, pending: Pending) -> Future[int]:
        wait = _StreamWait(pending)
        self._alive.append(wait)
        return wait

    def release_until(self, last: Future[int]) -> None:
        """Free the tensors of all operations up to `last`, for which the computing stream waits."""
        if last not in self._alive:
            return
        ended = None
        while ended is not last:
            ended = self._alive.popleft()
            ended.pending.wait()

    def release(self) -> None:
        """Do nothing: there is no thread to give back."""


class _StreamWait(Future[int]):
    """A future whose `result` makes the current stream wait; every stream may ask."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def result(self, timeout: float | None = None) -> int:
        self.pending.block_stream()
        return 0
