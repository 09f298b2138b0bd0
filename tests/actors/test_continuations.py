"""Continuations of arrivals: when they run, on which stream, and how long their tensors live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from mesh_threads import on_ranks
from torch import Tensor

from csps.actors.comm.continuations import PolledContinuations, StreamContinuations
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.row_collectives import RowGather, RowReduce, RowShards, server_tree
from csps.actors.comm.transfers import Transfers
from csps.actors.timing.timeline import StepClock

LAYERS = 4


def arrived() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(0)
    return future


def test_tasks_of_a_channel_run_in_order_and_other_channels_do_not_wait() -> None:
    chained, ran = PolledContinuations(), list[str]()
    first: Future[int] = Future()
    chained.then("line", first, lambda: ran.append("first"))
    second = chained.then("line", arrived(), lambda: ran.append("second"))
    chained.then("other", arrived(), lambda: ran.append("other"))
    assert ran == ["other"]
    assert chained.waiting
    assert not second.ready
    first.set_result(0)
    assert ran == ["other"], "only the thread that computes runs tasks"
    chained.progress()
    assert ran == ["other", "first", "second"]
    assert second.ready
    assert not chained.waiting


def test_a_task_that_has_run_is_freed() -> None:
    chained, term = PolledContinuations(), torch.ones(3)
    freed = weakref.ref(term)

    def double(x: Tensor = term) -> int:
        return int(2 * x.sum())

    task = chained.then("line", arrived(), double)
    del term, double
    assert task.result() == 6
    assert freed() is None


def test_a_lost_peer_fails_the_continuation() -> None:
    chained, lost = PolledContinuations(), Future[int]()
    lost.set_exception(RuntimeError("lost"))
    task = chained.then("line", lost, lambda: pytest.fail("nothing has arrived"))
    with pytest.raises(RuntimeError, match="lost"):
        task.result()


class FakeDevice:
    """Streams that only note, in order, which of them waits for which."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "computing"

    def stream_class(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: FakeStream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.stream = device, ""

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name

    def wait(self) -> None:
        self.device.log.append(f"{self.device.current} waits for {self.stream}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream_class)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_on_cuda_a_task_keeps_its_tensors_until_the_callers_stream_waits(
    device: FakeDevice,
) -> None:
    chained = StreamContinuations(torch.device("cuda"))
    term = torch.ones(3)
    freed = weakref.ref(term)

    def double(x: Tensor = term) -> Tensor:
        device.log.append(f"launched on {device.current}")
        return 2 * x

    task = chained.then("line", arrived(), double)
    del term, double
    assert freed() is not None, "its block would be the computing stream's next one"
    assert not task.ready
    assert task.result().sum() == 6
    assert freed() is None
    assert device.log == [
        "side waits for computing",
        "launched on side",
        "computing waits for side",
    ]


def test_every_exchange_is_begun_by_the_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers: dict[int, set[int]] = {}
    real = Mesh.start_exchange

    def start_exchange(mesh: Mesh, *args: object) -> object:
        callers.setdefault(mesh.rank, set()).add(threading.get_ident())
        return real(mesh, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Mesh, "start_exchange", start_exchange)

    def rank(mesh: Mesh) -> int:
        shards = RowShards(
            mesh=mesh,
            ranks=(0, 1, 2, 3),
            bounds=(0, 2, 4, 6, 8),
            servers=(0, 0, 1, 1),
            takers=(0, 1, 2, 3),
            tree=server_tree,
            replicas=(0, 1, 2, 3),
        )
        parts, held_td = tuple(shards.parts(2)), torch.full((2, 3), float(mesh.rank))
        with Transfers(mesh, StepClock()) as transfers:
            for layer in range(LAYERS):
                gather = RowGather(shards, held_td, parts, transfers, layer=layer)
                reduce = RowReduce(shards, torch.empty(3), transfers, layer=layer)
                with gather, reduce:
                    for part in parts:
                        gather.wait(part)
                        reduce.add(part, gather.rows_td[part.rows])
                    assert (reduce.result() == 4 * mesh.rank).all()
        return threading.get_ident()

    own = on_ranks(4, rank)
    assert callers == {rank: {thread} for rank, thread in enumerate(own)}
