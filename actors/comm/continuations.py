"""What follows an arrival: rows that are passed on, sums that are formed of what has come.

All of it is launched by the thread that computes, because NCCL wants one order of all calls. Where
exchanges are over in the order of their calls (`Mesh.in_order`) that thread launches it at once,
and the device's streams wait. With gloo somebody has to see that a receive is complete, so it is
done whenever the thread waits for something, or asks between two parts of its computing.
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
    """Something that follows an arrival.

    On CUDA it must be asked for its `result`: until then it keeps what it was made of. To the
    allocator, memory belongs to the stream on which it was allocated, here the caller's; given
    back before that stream waits for the task's, it would be written anew while the task has yet to
    read it. (`Tensor.record_stream` would do as well, but then memory comes back only when the host
    next finds an event complete, which for a host that runs ahead of its device is late.)
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
        """Whether nobody has to wait for `result`; never known on CUDA."""
        return self._done is None and self.future.done()

    def result(self) -> T:
        """What the task returned; raises what it raised. On CUDA the caller's stream waits."""
        if self._done is not None:
            self._done.wait()
            self._made_of = None
        return self.future.result()


class Continuations(Protocol):
    """Tasks that follow arrivals, in lines: one after the other in each."""

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        """Run a task once the arrival is complete and those before it in its line have run."""
        ...

    def progress(self) -> None:
        """Run what can run now."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether any task has yet to run."""
        ...


class PolledContinuations:
    """On the caller's thread, when it calls `progress`."""

    def __init__(self) -> None:
        self._channels: dict[str, deque[tuple[Future[int], Callable[[], None]]]] = {}

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        """See `Continuations`."""
        future: Future[T] = Future()
        queue = self._channels.setdefault(channel, deque())
        queue.append((arrival, lambda: _settle(future, arrival, task)))
        self.progress()
        return Continuation(future)

    def progress(self) -> None:
        """See `Continuations`."""
        for queue in self._channels.values():
            while queue and queue[0][0].done():
                queue.popleft()[1]()

    @property
    def waiting(self) -> bool:
        """See `Continuations`."""
        return any(self._channels.values())


class StreamContinuations:
    """At once, on a stream of each line that waits for the arrival; where there are no streams,
    the host does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def then(self, channel: str, arrival: Future[int], task: Callable[[], T]) -> Continuation[T]:
        """See `Continuations`."""
        future: Future[T] = Future()
        if self._device.type != "cuda":
            _settle(future, arrival, task)
            return Continuation(future)
        stream = self._stream(channel)
        # Not only for the task's inputs: what earlier tasks returned was allocated on this stream,
        # and may have been given back while the caller's stream has yet to read it.
        stream.wait_stream(torch.cuda.current_stream())
        with _current(stream):
            _settle(future, arrival, task)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return Continuation(future, done=done, made_of=task)

    def progress(self) -> None:
        """Nothing is left to run."""

    @property
    def waiting(self) -> bool:
        """See `Continuations`."""
        return False

    def _stream(self, channel: str) -> torch.cuda.Stream:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[channel]


def _current(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream)


def _settle(future: Future[T], arrival: Future[int], task: Callable[[], T]) -> None:
    try:
        arrival.result()
        future.set_result(task())
    except BaseException as exc:
        future.set_exception(exc)
