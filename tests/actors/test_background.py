"""Lines of background tasks: their threads, and how long they keep what they work on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mesh_threads import on_ranks
from torch import Tensor

from csps.actors.collectives.background import Background
from csps.actors.collectives.row_gather import RowGather
from csps.actors.collectives.row_reduce import RowReduce
from csps.actors.collectives.row_shards import RowShards
from csps.actors.collectives.row_tree import server_tree
from csps.actors.job_clock import JobClock
from csps.actors.mesh import Mesh
from csps.actors.transfers import Transfers

DEADLINE_S = 30
LAYERS = 4


def test_a_thread_lets_go_of_a_task_that_it_has_done() -> None:
    line = Background(torch.device("cpu"), "line")
    term = torch.ones(3)
    gone, released = weakref.ref(term), threading.Event()
    weakref.finalize(term, released.set)

    def double(x: Tensor = term) -> int:
        return int(2 * x.sum())

    tasks = [line.submit(double)]
    del term, double
    assert tasks[0].result() == 6
    assert released.wait(DEADLINE_S)
    assert gone() is None
    line.close()


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
    line = Background(torch.device("cuda"), "line")
    term = torch.ones(3)
    gone = weakref.ref(term)

    def double(x: Tensor = term) -> Tensor:
        device.log.append(f"launched on {device.current}")
        return 2 * x

    task = line.submit(double)
    del term, double
    assert gone() is not None, "its block would be the computing stream's next one"
    assert not task.ready
    assert task.result().sum() == 6
    assert gone() is None
    assert device.log == [
        "side waits for computing",
        "launched on side",
        "computing waits for side",
    ]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of threads that background lines have started."""
    names: list[str] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return names


def test_a_job_has_one_thread_a_line_however_many_layers_it_has(begun: list[str]) -> None:
    def rank(mesh: Mesh) -> None:
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
        with Transfers(mesh, JobClock()) as transfers:
            for layer in range(LAYERS):
                gather = RowGather(shards, held_td, parts, transfers, layer=layer)
                reduce = RowReduce(shards, torch.empty(3), parts, transfers, layer=layer)
                with gather, reduce:
                    for part in parts:
                        gather.wait(part)
                        reduce.add(part, gather.rows_td[part.rows])
                    assert (reduce.result() == 4 * mesh.rank).all()

    on_ranks(4, rank)
    lines = [name for name in begun if name.startswith("row ")]
    assert sorted(lines) == sorted(4 * ["row relays", "row sums", "row forwards"])
