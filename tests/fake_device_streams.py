"""Streams of a device that has none, and what its tensors' accesses on them leave to chance.

torch's sanitizer knows which access happens before which, from records of events, waits and
synchronisations (`torch.cuda._sanitizer`). Here they come from streams that only exist for it, and
from every operation. Memory that is given back counts as written by the next operation of the
stream that it was allocated on, to which it may be handed out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from strict_group import BrokenRule, Rule, nameless
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTING = 0
"""The default stream."""


class Race(AssertionError):
    """Two accesses of the same memory, one of them a write, in no certain order."""


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, races: Races, number: int) -> None:
        self.races, self.number = races, number

    def record_event(self) -> Event:
        event = Event(self.races)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.races.handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.races.handler._handle_stream_synchronization(self.number)


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, races: Races) -> None:
        self.races, self.number = races, races.new_number()
        self.over = True
        """True if the device has got there, for who asks."""
        races.handler._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.races.current
        self.races.handler._handle_event_record(self.number, stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.races.current).wait_event(self)

    def synchronize(self) -> None:
        self.races.handler._handle_event_synchronization(self.number)

    def query(self) -> bool:
        if self.over:
            self.races.handler._handle_event_synchronization(self.number)
        return self.over


@dataclass
class _Memory:
    """One life of a storage, whose address may come again."""

    life: StorageWeakRef
    stream: int
    """Stream on which it was allocated."""
    first: int
    """Number of its first cell."""
    cells: set[int] = field(default_factory=set)
    """Cells that were accessed."""


class Races(TorchDispatchMode):
    """Entered, it finds races of this thread's operations; raises at the second access."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = EventHandler()
        self._numbers = iter(range(1, 1 << 30))
        self.current = Stream(self, COMPUTING)
        self.handler._handle_stream_creation(COMPUTING)
        self._known: dict[int, _Memory] = {}

    def new_number(self) -> int:
        return next(self._numbers)

    # --- streams ------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Return a new stream."""
        stream = Stream(self, self.new_number())
        self.handler._handle_stream_creation(stream.number)
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Run operations inside on that stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def replace_cuda(self, patch: pytest.MonkeyPatch) -> None:
        """Replace `torch.cuda`'s streams and events by these."""
        patch.setattr(torch.cuda, "Stream", lambda device=None: self.stream())
        patch.setattr(torch.cuda, "Event", lambda **flags: Event(self))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    # --- memory -------------------------------------------------------------------------------

    def access(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record an operation on the current stream.

        Raises:
            Race: an access before it may happen after it, or at the same time.
        """
        self._hand_out()
        written = {cell for tensor in writes for cell in self._touched(tensor)}
        read = {cell for tensor in reads for cell in self._touched(tensor)} - written
        self._launch(name, self.current.number, read, written)

    def _hand_out(self) -> None:
        """Hand freed memory of the current stream out again."""
        for storage, memory in list(self._known.items()):
            if memory.stream == self.current.number and memory.life.expired():
                del self._known[storage]
                self._launch("given back", memory.stream, set(), memory.cells)

    def _launch(self, name: str, stream: int, read: set[int], written: set[int]) -> None:
        aliases = {cell: [hex(cell)] for cell in read | written}
        errors = self.handler._handle_kernel_launch(stream, read, written, set(), name, aliases)
        if errors:
            previous = errors[0].previous_access  # type: ignore[attr-defined]
            raise Race(f"{name} on stream {stream}, {previous.operator} on {previous.stream}")

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            life = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            memory = _Memory(life, self.current.number, self.new_number() << 32)
            self._known[storage._cdata] = memory
        return self._known[storage._cdata]

    def _touched(self, tensor: Tensor) -> set[int]:
        if not tensor.numel():
            return set()
        memory = self._memory_of(tensor)
        ids = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize) * tensor.itemsize
        touched = ids.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        cells = {memory.first + int(cell) for cell in touched.unique().tolist()}
        memory.cells.update(cells)
        return cells

    # --- operations ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        reads, writes = [], []
        named = list(zip(func._schema.arguments, args, strict=False))
        named += [
            (argument, kwargs[argument.name])
            for argument in func._schema.arguments
            if argument.name in kwargs
        ]
        for argument, value in named:
            tensors = [
                tree_leave for tree_leave in tree_leaves(value) if isinstance(tree_leave, Tensor)
            ]
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors)
        name = func.overloadpacket.__name__
        results = [tree_leave for tree_leave in tree_leaves(out) if isinstance(tree_leave, Tensor)]
        for tensor in results:
            self._memory_of(tensor)
        if not name.startswith(("empty", "new_empty", "detach", "lift")):
            writes += results
        self.access(name, reads, writes)
        return out


class NcclGroup:
    """A communicator: calls run on a stream of its own, one after the other."""

    def __init__(self, races: Races) -> None:
        self._races, self._stream = races, races.stream()
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        if nameless(device):
            raise BrokenRule(f"{Rule.INDEXED_DEVICE.name}: connects {device}, which has no index")

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None:
        self._reads, self._writes = [], []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._reads += tensors

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._writes += tensors

    def _end_coalescing(self) -> NcclWork:
        self._stream.wait_stream(self._races.current)
        with self._races.on(self._stream):
            self._races.access("nccl", self._reads, self._writes)
        self._reads, self._writes = [], []
        return NcclWork(self._races, self._stream.record_event())


class NcclWork:
    """A call under way."""

    def __init__(self, races: Races, done: Event) -> None:
        self._races, self._done = races, done

    def wait(self) -> bool:
        self._done.wait()
        return True
