"""Both ends of a KV connection as tests drive them: pools, reservations, and what was reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from csps.actors.comm.layout import local_chunks, name_digest
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.connection import Credit, KvConnection
from csps.actors.kv_transfer.message import KvBody, KvHeader
from csps.actors.kv_transfer.receiver import KvReceiver
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.models.network.spec import ModelSpec, kv_head_range
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import ConnectKv, ReserveKv
from csps.protocols.gang.step_messages import PrefillChunk

LAYERS, HEAD_DIM, SEQUENCE_ID, EPOCH = 2, 4, 7, "epoch"
NEXT_RID = 8
"""Id of a sequence whose receipt proves that everything sent before was handled."""
WAIT_S = 60.0
IN_FLIGHT = 2**20


def header(**fields: Any) -> KvHeader:
    defaults: dict[str, Any] = {
        "epoch": name_digest(EPOCH),
        "sequence_id": SEQUENCE_ID,
        "layer": 0,
        "span": Span(start=0, stop=10),
        "heads": range(2, 4),
        "dtype": torch.float32,
    }
    return KvHeader(**defaults | fields)


def reservation(
    spans: tuple[Span, ...],
    heads: range = range(2, 4),
    layers: int = LAYERS,
    *,
    kept_only: bool = False,
    sequence_id: int = SEQUENCE_ID,
) -> Reservation:
    request = ReserveKv(
        sequence_id=sequence_id,
        epoch=EPOCH,
        slices=tuple(KvSlice.of(0, span) for span in spans),
        master=0,
        prompt_tokens=max(span.stop for span in spans),
        output_tokens=16,
        kept_only=kept_only,
    )
    return Reservation(request=request, spans=spans, heads=heads, layers=layers, owner="router")


@dataclass(frozen=True)
class Shape:
    """Both gangs, and how a prompt lies in each."""

    prefill: int
    prefill_tp: int
    decode: int
    decode_tp: int
    bounds: tuple[int, ...]
    destinations: tuple[KvSlice, ...]

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def prefill_ranks(self) -> int:
        return self.prefill * self.prefill_tp

    @property
    def decode_ranks(self) -> int:
        return self.decode * self.decode_tp

    @property
    def connection(self) -> ConnectKv:
        return ConnectKv(
            epoch=EPOCH,
            store_host="",
            store_port=0,
            prefill_ranks=self.prefill_ranks,
            decode_ranks=self.decode_ranks,
            prefill_tp=self.prefill_tp,
            decode_tp=self.decode_tp,
        )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    prefill, decode = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    length = draw(st.integers(1, 20))
    inner = sorted(
        draw(st.lists(st.integers(0, length), min_size=prefill - 1, max_size=prefill - 1))
    )
    cuts = sorted({0, length, *draw(st.sets(st.integers(0, length), max_size=3))})
    slices = [
        KvSlice(draw(st.integers(0, decode - 1)), start, stop) for start, stop in pairwise(cuts)
    ]
    return Shape(
        prefill=prefill,
        prefill_tp=draw(st.sampled_from((1, 2, 4))),
        decode=decode,
        decode_tp=draw(st.sampled_from((1, 2, 4))),
        bounds=(0, *inner, length),
        destinations=tuple(draw(st.permutations(slices))),
    )


class Receiver:
    """The decode rank's end: pool, reservation, receipt, and its reports."""

    def __init__(
        self,
        connection: KvConnection,
        rank: int,
        spec: ModelSpec,
        slices: tuple[KvSlice, ...],
        *,
        kept_only: bool = False,
        in_flight_bytes: int = IN_FLIGHT,
        backends: int = 16,
    ) -> None:
        instance, tp_rank = connection.decode.instance_of(rank), connection.decode.tp_rank_of(rank)
        heads = kv_head_range(spec, tp_rank, connection.decode.tp)
        self.spans = tuple(kv_slice.span for kv_slice in slices if kv_slice.instance == instance)
        self.reservations: dict[int, Reservation] = {}
        self.pool = KvPool(
            layers=LAYERS,
            slots=64,
            kv_heads=len(heads),
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
        )
        self.pool.k.fill_(torch.nan)  # what is written shows
        self.heads = heads
        self.reports: SimpleQueue[Any] = SimpleQueue()
        if self.spans:
            for sequence_id in (SEQUENCE_ID, NEXT_RID):
                self.reservations[sequence_id] = reservation(
                    self.spans, heads, kept_only=kept_only, sequence_id=sequence_id
                )
                self.pool.slots.allocate(sequence_id, self.spans)
        self.end = KvReceiver(
            connection,
            self.pool,
            rank=rank,
            in_flight_bytes=in_flight_bytes,
            backends=backends,
            find=self.reservations.get,
            on_received=self.reports.put,
            on_failed=self.reports.put,
            on_lost=self.reports.put,
            on_broken=self.reports.put,
        )

    def report(self) -> Any:
        """Return the next thing that the rank reported."""
        return self.reports.get(timeout=WAIT_S)


class Source:
    """The prefill rank's end: a pool whose slots are in no order, and what was said of sending."""

    def __init__(
        self,
        connection: KvConnection,
        rank: int,
        spec: ModelSpec,
        chunk: PrefillChunk,
        shape: Shape,
        k: Tensor,
        v: Tensor,
        *,
        in_flight_bytes: int = IN_FLIGHT,
        checked: float = 0.0,
    ) -> None:
        instance, tp_rank = (
            connection.prefill.instance_of(rank),
            connection.prefill.tp_rank_of(rank),
        )
        self.heads = kv_head_range(spec, tp_rank, connection.prefill.tp)
        self.pool = KvPool(
            layers=LAYERS,
            slots=64,
            kv_heads=len(self.heads),
            head_dim=HEAD_DIM,
            dtype=k.dtype,
            device="cpu",
        )
        self.parts = list(local_chunks([chunk], shape.bounds, instance))
        self._k, self._v = k, v
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.broken: SimpleQueue[BaseException] = SimpleQueue()
        self._ended = False
        self._sent: SimpleQueue[Exception | None] = SimpleQueue()
        for part in self.parts:
            cut = (part.span.start + part.span.stop) // 2
            self.pool.slots.allocate(SEQUENCE_ID, [Span(start=cut, stop=part.span.stop)])
            self.pool.slots.allocate(SEQUENCE_ID, [Span(start=part.span.start, stop=cut)])
        self.sender = KvSender(
            connection,
            self.pool,
            spec,
            rank=rank,
            in_flight_bytes=in_flight_bytes,
            checked=checked,
            on_lost=self.lost.put,
            on_broken=self.broken.put,
        )
        self.tracker = TransferTracker(self.pool.slots, self._sent.put)

    def send(self, layer: int, kept_ht: Tensor | None = None) -> None:
        """Compute a layer."""
        columns = slice(self.heads.start, self.heads.stop)
        for part in self.parts:
            rows = slice(part.span.start, part.span.stop)
            k, v = self._k[layer, rows, columns], self._v[layer, rows, columns]
            self.pool.write(layer, SEQUENCE_ID, part.span, k, v)
            mine = None if kept_ht is None else kept_ht[columns, rows]
            self.sender.post(self.tracker, layer, part, mine)

    def end_step(self) -> None:
        """End the step and give all free slots to somebody else."""
        if self._ended:
            return
        self._ended = True
        self.pool.slots.free_sequence(SEQUENCE_ID)
        # Those that wait to be sent are none of them.
        rest = Span(start=0, stop=self.pool.slots.free)
        self.pool.slots.allocate(NEXT_RID, [rest])
        for layer in range(LAYERS):
            shape = (rest.length, len(self.heads), HEAD_DIM)
            garbage = torch.full(shape, float("nan"), dtype=self.pool.k.dtype)
            self.pool.write(layer, NEXT_RID, rest, garbage, garbage)
        self.pool.slots.free_sequence(NEXT_RID)
        self.sender.finish(self.tracker)
        self.tracker.finish()

    def sent(self) -> Exception | None:
        """End the step, and wait for the rest of its KV to land."""
        self.end_step()
        failure = self._sent.get(timeout=WAIT_S)
        assert self._sent.empty()
        assert self.pool.slots.used == 0
        self.pool.slots.check_integrity()
        return failure


def connections(shape: Shape) -> tuple[list[KvConnection], list[KvConnection]]:
    """Return all ends of prefill and decode ranks."""
    store, world = HashStore(), shape.prefill_ranks + shape.decode_ranks

    def make(index: int) -> KvConnection:
        is_decode = index >= shape.prefill_ranks
        rank = index - shape.prefill_ranks if is_decode else index
        return KvConnection(
            store,
            shape.connection,
            rank=rank,
            is_decode=is_decode,
            host="127.0.0.1",
        )

    with ThreadPoolExecutor(world) as threads:
        made = list(threads.map(make, range(world)))
    return made[: shape.prefill_ranks], made[shape.prefill_ranks :]


DECODE = 1
"""The decode rank of a pair, as a peer."""
PAIR = Shape(1, 1, 1, 1, (0, 10), (KvSlice(0, 0, 10),))


@contextmanager
def pair(spec: ModelSpec) -> Iterator[tuple[KvConnection, Receiver]]:
    """Yield one rank on either side, and a reservation of 10 tokens."""
    starts, ends = connections(PAIR)
    receiver = Receiver(ends[0], 0, spec, PAIR.destinations)
    try:
        assert starts[0].next_credit(DECODE) == Credit(IN_FLIGHT, 0)
        yield starts[0], receiver
    finally:
        receiver.end.close()
        starts[0].close()
        ended(receiver.end.threads)


def ended(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that have nothing left to wait for."""
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def body(header: KvHeader) -> KvBody:
    k, v = (
        torch.ones(header.span.length, len(header.heads), HEAD_DIM, dtype=header.dtype)
        for _ in range(2)
    )
    return KvBody(k, v)
