"""A process group over gloo that behaves as NCCL does where gloo is kinder.

What it holds every program to:
- one line of calls for a communicator: a call begins when the one before it has ended;
- a grouped call ends only when all its parts have, and single calls are groups of one;
- tags mean nothing: what a pair sends arrives in the order of its sending;
- a receive buffer holds garbage (NaN) until it was waited for. NCCL's `wait` returns at once and
  makes the stream wait; on a CPU the stream is the host, which therefore reaches it in `wait`;
- what a call sends may be what an earlier one receives: both are on the communicator's stream;
- after `abort` a wait succeeds and leaves garbage.

And what it refuses, each rule by its name, so that a test can ask for all but those that are known
to be broken: `Rule`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from csps.actors.comm.process_group import GroupMaker, TorchGroup, gloo_group

HANG = timedelta(seconds=40)
"""Time limit of one call; longer calls wait for each other across ranks."""


class Rule(Enum):
    """A violation that NCCL or its watchdog would answer with a hang, a race or an error."""

    ALL_RANKS_FIRST = auto()
    """The first call makes the communicator, and every rank must take part in it."""
    ONE_THREAD = auto()
    """No call by one thread while calls of another are under way."""
    NO_DEADLINE = auto()
    """`wait(timeout)` polls on the host; only `wait()` orders the stream."""
    DEVICE = auto()
    """Tensors lie on the group's device, contiguous."""
    INDEXED_DEVICE = auto()
    """The device of a communicator has an index, by which later calls find the communicator."""


EVERY_RULE = frozenset(Rule)


@dataclass(frozen=True)
class Parts:
    """Parts of one call: (peer, bytes) of messages, and the bytes of a sum."""

    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    sums: int


Note = Callable[[Parts], None]
"""Told of each call, in order."""


class BrokenRule(AssertionError):
    """The program did what NCCL does not allow."""


def nameless(device: torch.device) -> bool:
    """Return whether NCCL could not find the communicator of this device again. It looks for the
    index of a tensor's device, which `cuda` alone does not have."""
    return device.type != "cpu" and device.index is None


class _Call:
    """Sends and receives that end together, or one sum."""

    def __init__(self) -> None:
        self.sends: list[tuple[Tensor, int]] = []
        self.recvs: list[tuple[Tensor, int]] = []
        self.sums: list[Tensor] = []
        """Tensors of all ranks, summed in place."""
        self.terms: list[Tensor] = []
        """Terms of this rank."""
        self.done: Future[list[Tensor] | None] = Future()
        """Received tensors; the host sees them after it has waited."""
        self.forwarded: dict[int, tuple[_Call, int]] = {}
        """Forwarded receives by place among the sends: the tensor comes from an earlier call for
        which the host has not waited.
        """

    @property
    def parts(self) -> Parts:
        """Return the parts of the call."""
        return Parts(
            tuple((peer, tensor.nbytes) for tensor, peer in self.sends),
            tuple((peer, tensor.nbytes) for tensor, peer in self.recvs),
            sum(tensor.nbytes for tensor in self.sums),
        )

    @property
    def rooms(self) -> list[Tensor]:
        """Return the tensors that are written."""
        return [*(room for room, _ in self.recvs), *self.sums]

    def holding(self, tensor: Tensor) -> int | None:
        """Return the receive that writes the tensor's memory."""
        begin, end = _memory(tensor)
        for place, room in enumerate(self.rooms):
            first, last = _memory(room)
            if first <= begin and end <= last:
                return place
            assert end <= first or last <= begin, "part of what is sent is yet to be received"
        return None

    def received(self, place: int, tensor: Tensor) -> Tensor:
        """Return the tensor of a receive that a later call sends."""
        staged = self.done.result(0)
        if staged is None:  # aborted
            return tensor
        begin = (tensor.data_ptr() - self.rooms[place].data_ptr()) // tensor.itemsize
        return staged[place].view(-1)[begin : begin + tensor.numel()]


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


class StrictWork:
    """A call under way."""

    def __init__(self, group: StrictGroup, call: _Call) -> None:
        self._group, self.call = group, call
        self._delivered = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the stream wait; received tensors can be read afterwards."""
        if timeout is not None:
            self._group.check(Rule.NO_DEADLINE, True, f"wait({timeout}) holds up the host")
        staged = self.call.done.result(2 * HANG.total_seconds())
        if not self._delivered:
            self._delivered = True
            self._group.ended(self)
            with torch.inference_mode():  # the waiting caller writes tensors of either kind
                for room, arrived in zip(self.call.rooms, staged or (), strict=False):
                    room.copy_(arrived)
        return True


class StrictGroup:
    """One communicator of one rank."""

    def __init__(
        self,
        inner: TorchGroup,
        store: Store,
        rank: int,
        size: int,
        rules: frozenset[Rule],
        note: Note | None,
    ) -> None:
        self._inner, self._store, self._note = inner, store, note
        self._rank, self._size, self._rules = rank, size, rules
        self._open: _Call | None = None
        self._caller: int | None = None
        self._under_way: list[StrictWork] = []
        self._lock = threading.Lock()
        self._joined = False
        self._aborted = threading.Event()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name="strict group", daemon=True).start()

    # --- what a program calls --------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        """Add a send to the open group, or make it a call of its own."""
        return self._add(tensors[0], peer, lambda call: call.sends)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        """Add a receive to the open group, or make it a call of its own."""
        return self._add(tensors[0], peer, lambda call: call.recvs)

    def allreduce(self, tensors: list[Tensor]) -> StrictWork:
        """Make an allreduce, which is a call of its own."""
        assert self._open is None, "a sum inside a group"
        self._check_device(tensors[0])
        call = _Call()
        call.sums += tensors
        return self._launch(call)

    def _start_coalescing(self) -> None:
        assert self._open is None, "a group inside a group"
        self._open = _Call()

    def _end_coalescing(self) -> StrictWork:
        assert self._open is not None, "the end of a group that was not begun"
        call, self._open = self._open, None
        return self._launch(call)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator, with all ranks."""
        self.check(Rule.INDEXED_DEVICE, nameless(device), f"connects {device}, which has no index")
        self._join()

    def abort(self) -> None:
        """End the calls under way, which then look successful."""
        with self._lock:  # or a call that is being begun would come to the line after its end
            self._aborted.set()
            self._queue.put(None)
        for peer in range(self._size):
            if peer != self._rank:
                try:
                    self._inner.recv([torch.empty(1)], peer, 99).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    # --- what is held ----------------------------------------------------------------------

    def check(self, rule: Rule, broken: bool, what: str) -> None:
        """Raise an error if this program is held to the rule."""
        if broken and rule in self._rules:
            raise BrokenRule(f"{rule.name}: {what}")

    def ended(self, work: StrictWork) -> None:
        """Record that a call was awaited."""
        with self._lock:
            self._under_way.remove(work)

    def _add(
        self, tensor: Tensor, peer: int, side: Callable[[_Call], list[tuple[Tensor, int]]]
    ) -> StrictWork:
        self._check_device(tensor)
        call = self._open or _Call()
        side(call).append((tensor, peer))
        # Parts of a group have no work of their own in NCCL either.
        return StrictWork(self, call) if self._open is not None else self._launch(call)

    def _check_device(self, tensor: Tensor) -> None:
        wrong = tensor.device.type != "cpu" or not tensor.is_contiguous()
        self.check(Rule.DEVICE, wrong, f"a tensor on {tensor.device}, strides {tensor.stride()}")

    def _launch(self, call: _Call) -> StrictWork:
        work = StrictWork(self, call)
        with self._lock:
            here = threading.get_ident()
            foreign = bool(self._under_way) and self._caller != here
            self.check(Rule.ONE_THREAD, foreign, "two threads launch calls")
            self._caller = here
            self._forward(call)
            if self._note is not None:
                self._note(call.parts)
            self._under_way.append(work)
        if Rule.ALL_RANKS_FIRST in self._rules:
            self._join()
        with torch.inference_mode():
            call.terms = [tensor.clone() for tensor in call.sums]
            for room in call.rooms:
                room.fill_(torch.nan if room.is_floating_point() else 1)
        with self._lock:
            if self._aborted.is_set():
                call.done.set_result(None)
            else:
                self._queue.put(call)
        return work

    def _forward(self, call: _Call) -> None:
        """Find what the call sends of what others under way receive, the latest of which counts."""
        for number, (tensor, _) in enumerate(call.sends):
            for earlier in self._under_way:
                place = earlier.call.holding(tensor)
                if place is not None:
                    call.forwarded[number] = earlier.call, place

    def _join(self) -> None:
        if self._joined:
            return
        self._joined = True
        everyone = [f"first call of {rank}" for rank in range(self._size)]
        self._store.set(everyone[self._rank], "")
        try:
            self._store.wait(everyone, HANG)
        except RuntimeError:
            what = f"the first call of rank {self._rank} is not one of all ranks"
            raise BrokenRule(f"{Rule.ALL_RANKS_FIRST.name}: {what}") from None

    # --- the communicator's line -----------------------------------------------------------

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call.done.set_result(self._run(call))
            except RuntimeError as error:
                if self._aborted.is_set():
                    call.done.set_result(None)
                else:
                    call.done.set_exception(error)

    def _run(self, call: _Call) -> list[Tensor]:
        if call.sums:
            self._inner.allreduce(call.terms).wait(HANG)
            return call.terms
        staged = [torch.empty_like(room) for room, _ in call.recvs]
        works = [
            self._inner.recv([room], peer, 0)
            for room, (_, peer) in zip(staged, call.recvs, strict=True)
        ]
        for number, (tensor, peer) in enumerate(call.sends):
            if number in call.forwarded:
                earlier, place = call.forwarded[number]
                tensor = earlier.received(place, tensor)
            works.append(self._inner.send([tensor], peer, 0))
        for work in works:
            work.wait(HANG)
        return staged


def strict(
    rules: Sequence[Rule] | frozenset[Rule] = EVERY_RULE, note: Note | None = None
) -> GroupMaker:
    """Make a mesh's or an instance's process group, held to the rules."""

    def make(store: Store, rank: int, size: int, host: str) -> TorchGroup:
        inner = gloo_group(store, rank, size, host)
        return cast(Any, StrictGroup(inner, store, rank, size, frozenset(rules), note))

    return make
