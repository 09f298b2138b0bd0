"""Short tasks that run, in order, beside what the calling thread computes.

A rank that passes data on must do so when the data arrives, not when its own computing next
pauses. On a CPU this takes a thread, as gloo tells nobody that a receive is complete but who waits
for it. With CUDA a thread would be wrong: NCCL wants all calls in one order on every rank. There
the tasks are launched at once by the caller, on a stream of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Background:
    """One line of tasks; meant to last for a job, as a thread or a stream stands behind it."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._name = name
        self._line: SimpleQueue[Callable[[], None] | None] | None = None

    def submit(self, task: Callable[[], T]) -> Task[T]:
        """Run a task after those submitted before it."""
        if self._stream is not None:
            return _launched(task, self._stream)
        if self._line is None:
            self._line = SimpleQueue()
            # A daemon: a task that waits for a dead peer must not keep the process from ending.
            worker = threading.Thread(target=_work, args=(self._line,), daemon=True)
            worker.name = self._name
            worker.start()
        future: Future[T] = Future()
        self._line.put(lambda: _settle(future, task))
        return Task(future)

    def close(self) -> None:
        """Take no more tasks; the thread ends after those it has."""
        if self._line is not None:
            self._line.put(None)


class Task(Generic[T]):
    """A task under way.

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
        self._future = future
        self._done = done
        self._made_of = made_of

    @property
    def ready(self) -> bool:
        """Whether nobody has to wait for `result`; never known on CUDA."""
        return self._done is None and self._future.done()

    def result(self) -> T:
        """What the task returned; raises what it raised. On CUDA the caller's stream waits."""
        if self._done is not None:
            self._done.wait()
            self._made_of = None
        return self._future.result()


def _work(line: SimpleQueue[Callable[[], None] | None]) -> None:
    # The mode is a thread's own, and inference tensors may not be changed outside it.
    with torch.inference_mode():
        while (task := line.get()) is not None:
            task()
            del task  # or its tensors would stay until the next one comes


def _settle(future: Future[T], task: Callable[[], T]) -> None:
    try:
        future.set_result(task())
    except BaseException as exc:
        future.set_exception(exc)


def _launched(task: Callable[[], T], stream: torch.cuda.Stream) -> Task[T]:
    future: Future[T] = Future()
    # Not only for the task's inputs: what earlier tasks returned was allocated on this stream, and
    # may have been given back while the caller's stream has yet to read it.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _settle(future, task)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
    return Task(future, done=done, made_of=task)
