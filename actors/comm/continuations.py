"""Continuations of arrivals: rows that are passed on, and sums of rows that have arrived.

The thread that computes launches all of them, because NCCL wants one order of all calls. Where
exchanges end in the order of their calls (`Mesh.in_order`), that thread launches a continuation at
once, and the device's streams wait. With gloo somebody has to notice that a receive is complete, so
continuations run whenever the thread waits for something, or asks between two parts of its
computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class Continuation(Generic[T]):
    """A task that runs after an arrival.

    On CUDA its `result` must be asked for: until then it keeps its inputs alive. To the allocator,
    memory belongs to the stream on which it was allocated, here the caller's. If it were freed
    before that stream waits for the task's, it would be overwritten while the task has yet to read
    it. (`Tensor.record_stream` would do as well, but then memory is freed only when the host next
    finds an event complete, which is late for a host that runs ahead of its device.)
    """

    def __init__(
        self,
        future: Future[T],
        *,
        done: torch.cuda.Event | None = None,
        made_of: Callable[[], T] | None = None,
    ) -> None:
        self.future = future
        self._done = done
        self._made_of = made_of

    @property
    def ready(self) -> bool:
        """Return whether `result` is there without waiting; on CUDA this is never known."""
        return self._done is None and self.future.done()

    def result(self) -> T:
        """Return what the task returned, or raise its error. On CUDA the caller's stream waits."""
        if self._done is not None:
            self._done.wait()
            self._made_of = None
        return self.future.result()


class Continuations(Protocol):
    """Tasks that follow arrivals, in channels: one after the other in each."""

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        """Run a task once the arrival is complete and the earlier tasks of its channel have run."""
        ...

    def progress(self) -> None:
        """Run what can run now."""
        ...

    @property
    def waiting(self) -> bool:
        """Return whether any task has yet to run."""
        ...


class PolledContinuations:
    """Continuations that run on the caller's thread, when it calls `progress`."""

    def __init__(self) -> None:
        self._channels: dict[str, deque[tuple[Future[int], Callable[[], None]]]] = {}

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        future: Future[T] = Future()
        queue = self._channels.setdefault(channel, deque())
        queue.append((arrival, lambda: _resolve(future, arrival, task)))
        self.progress()
        return Continuation(future)

    def progress(self) -> None:
        for queue in self._channels.values():
            while queue and queue[0][0].done():
                queue.popleft()[1]()

    @property
    def waiting(self) -> bool:
        return any(self._channels.values())


class StreamContinuations:
    """Continuations that are launched at once, on a stream for each channel that waits for the
    arrival. Without streams, the host waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        future: Future[T] = Future()
        if self._device.type != "cuda":
            _resolve(future, arrival, task)
            return Continuation(future)
        stream = self._stream(channel)
        # Also for results of earlier tasks: they were allocated on this stream, and may have been
        # freed while the caller's stream has yet to read them.
        stream.wait_stream(torch.cuda.current_stream())
        with _current(stream):
            _resolve(future, arrival, task)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return Continuation(future, done=done, made_of=task)

    def progress(self) -> None:
        """Do nothing: all tasks are launched already."""

    @property
    def waiting(self) -> bool:
        return False

    def _stream(self, channel: str) -> torch.cuda.Stream:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[channel]


def _current(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream)


def _resolve(future: Future[T], arrival: Future[int], task: Callable[[], T]) -> None:
    try:
        arrival.result()
        future.set_result(task())
    except BaseException as exc:
        future.set_exception(exc)
