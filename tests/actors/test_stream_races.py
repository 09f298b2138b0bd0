"""Reads on one stream of a device follow the writes of another, and memory stays allocated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_device_streams import NcclGroup, Race, Races
from mesh_threads import on_ranks
from strict_group import BrokenRule
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from csps.actors.attention.query_exchange import QueryExchange, QueryRoutes, exchange_queries
from csps.actors.comm.continuations import StreamContinuations
from csps.actors.comm.layout import name_digest
from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.row_collectives import RowGather, RowReduce, RowShards, server_tree
from csps.actors.comm.transfers import Label, Transfers
from csps.actors.engine.reservations import Reservations
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.message import KvBody, KvHeader, Staging
from csps.actors.kv_transfer.receiver import KvReceiver
from csps.actors.timing.device_pace import launched_so_far
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import ReserveKv, SamplerInputs, Sampling
from csps.protocols.rpc.schema import encode

CUDA = torch.device("cuda")
LABEL = Label(phase="all-gather")


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[Races]:
    races = Races()
    races.replace_cuda(monkeypatch)
    with torch.inference_mode(), races:
        yield races


# --- the checker ---------------------------------------------------------------------------------


def test_a_write_that_another_stream_may_miss_is_found(races: Races) -> None:
    memory, side = torch.zeros(4), races.stream()
    with pytest.raises(Race, match="add"), races.on(side):
        memory + 1
    side.wait_stream(races.current)
    with races.on(side):
        memory + 1
    with pytest.raises(Race, match="fill_"):
        memory.fill_(2)
    races.current.wait_stream(side)
    memory.fill_(3)


def test_memory_that_is_freed_too_early_is_found(races: Races) -> None:
    memory, side = torch.zeros(4), races.stream()
    side.wait_stream(races.current)
    with races.on(side):
        y = memory + 1
    del memory
    with pytest.raises(Race, match="given back"):
        torch.zeros(4)
    races.current.wait_stream(side)
    y + 1


def test_rows_that_are_told_apart_do_not_race(races: Races) -> None:
    memory, side = torch.zeros(4, 2), races.stream()
    side.wait_stream(races.current)
    with races.on(side):
        memory[:2] + 1
    memory[2:].fill_(1)
    with pytest.raises(Race):
        memory[1:3].fill_(1)
    races.current.wait_stream(side)


# --- KV that is sent -----------------------------------------------------------------------------


class Sending:
    """A prefill rank's pool and the thread that sends from it, which here is the same one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Tensor, "is_cuda", property(lambda races: True), raising=False)
        patch.setattr(Staging, "buffer", lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
        fields = {"layers": 1, "slots": 8, "kv_heads": 2, "head_dim": 4}
        self.pool = KvPool(**fields, dtype=torch.float32, device="cpu")
        self.staging = Staging(CUDA)

    def compute(self, sequence_id: int, span: Span) -> None:
        """Write a layer as the engine does."""
        self.pool.slots.allocate(sequence_id, [span])
        kv_thd = torch.ones(span.length, 2, 4)
        self.pool.write(0, sequence_id, span, kv_thd, kv_thd)

    def read(self, sequence_id: int, span: Span) -> list[Tensor]:
        """Read into host memory as `SendQueue` does."""
        with self.staging.copying():
            return [self.staging.to_host(tensor) for tensor in self.pool.read(0, sequence_id, span)]


@pytest.fixture
def sending(races: Races, monkeypatch: pytest.MonkeyPatch) -> Sending:
    return Sending(monkeypatch)


SPAN = Span(start=0, stop=4)


def test_kv_is_read_when_the_device_has_written_it(sending: Sending) -> None:
    sending.compute(1, SPAN)
    ready = launched_so_far(CUDA)
    assert ready is not None
    assert ready.query()
    read = sending.read(1, SPAN)
    # It was copied: the slots may be another request's.
    sending.pool.slots.free_sequence(1)
    sending.compute(2, Span(start=0, stop=8))
    with _disable_current_modes():  # the host's
        assert all(bool((tensor == 1).all()) for tensor in read)


def test_kv_that_may_not_be_written_yet_is_not_read(sending: Sending) -> None:
    sending.compute(1, SPAN)
    with pytest.raises(Race):
        sending.read(1, SPAN)


def test_kv_that_the_engine_writes_later_is_not_waited_for(sending: Sending) -> None:
    """The engine computes the next layer, or another sequence's rows, while the first ones are
    read."""
    sending.compute(1, SPAN)
    ready = launched_so_far(CUDA)
    assert ready is not None
    assert ready.query()
    sending.compute(2, Span(start=0, stop=2))
    sending.read(1, SPAN)


def test_slots_are_not_taken_while_they_are_copied(
    races: Races, sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_device_streams.Stream.synchronize", lambda stream: None)
    sending.compute(1, SPAN)
    ready = launched_so_far(CUDA)
    assert ready is not None
    assert ready.query()
    kept = sending.read(1, SPAN)
    sending.pool.slots.free_sequence(1)
    with pytest.raises(Race):
        sending.compute(2, Span(start=0, stop=8))
    races.current.wait_stream(cast(Any, sending.staging._stream))
    assert kept


# --- KV that is received -------------------------------------------------------------------------


class Receiving:
    """A decode rank's reservations and receiver, whose threads here are the same one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Staging, "to_device", lambda _, tensor: tensor)
        fields = {"layers": 1, "slots": 8, "kv_heads": 2, "head_dim": 4}
        self.pool = KvPool(**fields, dtype=torch.float32, device="cpu")
        engine = SimpleNamespace(
            instance=0,
            pool=self.pool,
            device=CUDA,
            kv_heads=range(2),
            spec=SimpleNamespace(layers=1, vocab=8, window=None),
            grammars=None,
        )
        self.reservations = Reservations(cast(Any, engine), lambda *told: None)
        self.receiver = KvReceiver.__new__(KvReceiver)
        self.receiver._pool = self.pool
        self.staging = Staging(CUDA)

    def reserve(self, sequence_id: int) -> None:
        """Reserve a prompt of four tokens and the rest of the pool for its answer."""
        request = ReserveKv(
            sequence_id=sequence_id,
            epoch="",
            slices=(KvSlice.of(0, SPAN),),
            master=0,
            prompt_tokens=SPAN.length,
            output_tokens=5,
            sampler=encode(SamplerInputs(sampling=Sampling(max_tokens=5))),
        )
        self.reservations.reserve(request, owner=1)

    def iterate(self, sequence_id: int) -> None:
        """Launch what an iteration writes of a sequence whose KV is stored here."""
        kv_thd = torch.ones(8, 2, 4)
        self.pool.write(0, sequence_id, Span(start=0, stop=8), kv_thd, kv_thd)

    def leave(self, sequence_id: int) -> None:
        """Let the sequence leave, as the log does: on the host, whatever the device does."""
        self.reservations.leave(sequence_id)
        self.pool.slots.free_sequence(sequence_id)

    def receive(self, sequence_id: int) -> None:
        """Store all KV of the sequence's prompt, which has arrived in host memory."""
        reservation = self.reservations.find(sequence_id)
        assert reservation is not None
        with _disable_current_modes():
            kv_thd = torch.full((SPAN.length, 2, 4), float(sequence_id))
        header = KvHeader(
            epoch=name_digest(""),
            sequence_id=sequence_id,
            layer=0,
            span=SPAN,
            heads=range(2),
            dtype=torch.float32,
        )
        body = KvBody(kv_thd, kv_thd)
        assert self.receiver._store(reservation, header, body, self.staging, began_s=0.0)


@pytest.fixture
def receiving(races: Races, monkeypatch: pytest.MonkeyPatch) -> Receiving:
    return Receiving(monkeypatch)


def test_kv_arrives_behind_what_was_launched_for_the_slots_last_sequence(
    races: Races, receiving: Receiving
) -> None:
    receiving.reserve(1)
    receiving.iterate(1)
    receiving.leave(1)
    receiving.reserve(2)
    receiving.receive(2)
    # `receive` has waited for its copies: the next iteration reads what has arrived.
    k_shd, _ = receiving.pool.layer(0)
    k_shd + 1


def test_kv_that_overtakes_the_slots_last_sequence_is_found(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving.reserve(1)
    receiving.iterate(1)
    receiving.leave(1)
    receiving.reserve(2)
    monkeypatch.setattr("fake_device_streams.Event.wait", lambda event, stream=None: None)
    with pytest.raises(Race, match="copy_"):
        receiving.receive(2)


def test_arriving_kv_does_not_wait_for_iterations_launched_after_its_reservation(
    races: Races, receiving: Receiving
) -> None:
    """They do not touch its slots; a transfer would take as long as the iterations beside it."""
    receiving.reserve(2)
    receiving.pool.slots.free_span(2, Span(start=4, stop=8))
    receiving.pool.slots.allocate(3, [Span(start=0, stop=4)])
    kv_thd = torch.ones(4, 2, 4)
    receiving.pool.write(0, 3, SPAN, kv_thd, kv_thd)
    receiving.receive(2)
    with pytest.raises(Race), races.on(cast(Any, receiving.staging._stream)):
        receiving.pool.read(0, 3, SPAN)[0] + 1


# --- exchanges -----------------------------------------------------------------------------------


def on_nccl(body: Any, ranks: int = 3) -> None:
    """Run `body(mesh, races)` on the first rank, whose peers do not exist."""
    races = Races()
    over = threading.Event()

    def rank(mesh: Mesh) -> None:
        if mesh.rank:
            assert over.wait(60)
            return
        try:
            mesh.device = torch.device("cpu")
            with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), races:
                races.replace_cuda(patch)
                body(mesh, races)
                torch.zeros(1)
        finally:
            over.set()

    on_ranks(ranks, rank, lambda store, rank, size, host: cast(Any, NcclGroup(races)))


def test_a_communicator_of_a_device_without_an_index_is_refused(races: Races) -> None:
    group = NcclGroup(races)
    with pytest.raises(BrokenRule, match="INDEXED_DEVICE"):
        group.eager_connect_single_device(CUDA)
    group.eager_connect_single_device(torch.device("cuda", 0))


def test_a_mesh_connects_the_current_device_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    races = Races()
    group = cast(Any, NcclGroup(races))
    assert on_ranks(2, lambda mesh: mesh.device.index, lambda *_: group, device="cuda") == [1, 1]


ROUTES = QueryRoutes(rows=3, resident_here=range(3), outgoing={1: [0, 2], 2: [1]}, incoming={1: 2})


def answers(peer: int | None, q_rhd: Tensor) -> tuple[Tensor, Tensor]:
    return q_rhd.float() * 2, q_rhd.sum(-1).float()


def test_queries_and_answers_are_there_when_they_are_used() -> None:
    def body(mesh: Mesh, races: Races) -> None:
        tags = Tag.DECODE_QUERY, Tag.DECODE_PARTIAL
        for _ in range(3):  # layers, whose tensors come and go
            q_rhd = torch.ones(3, 2, 4)
            exchange = QueryExchange(mesh, ROUTES, q_rhd, heads=2, head_dim=4, tags=tags)
            exchange_queries(q_rhd, exchange, answers)

    on_nccl(body)


def test_an_answer_that_is_used_before_it_is_there_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fake_device_streams.NcclWork.wait", lambda work: True)
    with pytest.raises(Race):
        test_queries_and_answers_are_there_when_they_are_used()


def gather_and_reduce(mesh: Mesh, device: torch.device) -> None:
    """Run layers of relays and sums, seen by a relay rank, or by an owner whose rows others pass
    on."""
    mesh.device = device
    shards = RowShards(
        mesh=mesh,
        ranks=(0, 1, 2, 3),
        bounds=(0, 2, 4, 6, 8),
        servers=(0, 0, 1, 1),
        takers=(0, 1, 2, 3),
        tree=server_tree,
        replicas=(0, 1, 2, 3),
    )
    parts = tuple(shards.parts(2))
    with Transfers(mesh, StepClock()) as transfers:
        for layer in range(3):
            held_td = torch.ones(2, 3)
            gather = RowGather(shards, held_td, parts, transfers, layer=layer)
            reduce = RowReduce(shards, torch.empty(3), transfers, layer=layer)
            with gather, reduce:
                for part in parts:
                    gather.wait(part)
                    reduce.add(part, gather.rows_td[part.rows] * 2)
                reduce.result() + 1
            del held_td, gather, reduce


def test_relays_and_sums_run_in_a_certain_order() -> None:
    on_nccl(lambda mesh, races: gather_and_reduce(mesh, CUDA), ranks=4)


def test_sums_that_nobody_waits_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "csps.actors.comm.continuations.Continuation.result", lambda task: task.future.result()
    )
    with pytest.raises(Race):
        test_relays_and_sums_run_in_a_certain_order()


def test_rows_that_are_used_before_they_are_there_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Transfers, "wait", lambda transfers, transfer: None)
    with pytest.raises(Race):
        test_relays_and_sums_run_in_a_certain_order()


def test_a_continuations_stream_waits_for_the_arrival() -> None:
    def body(mesh: Mesh, races: Races) -> None:
        mesh.device, room = CUDA, torch.zeros(2)
        with Transfers(mesh, StepClock()) as transfers:
            assert isinstance(transfers._continuations, StreamContinuations)
            arrival = transfers.start([], [(1, room)], Tag.ROWS, LABEL)
            task = transfers.then("sums", arrival, lambda: room + 1)
            transfers.wait(arrival)
            task.result() + 1

    on_nccl(body)
