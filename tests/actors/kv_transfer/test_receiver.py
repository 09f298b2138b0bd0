"""KV over a real connection: what was promised lands, and anything else is an error."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from csps.actors import link_heartbeat
from csps.actors.kept_kv import KeptKv
from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer import connection as connection_module
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.destinations import heads_to_deliver, send_layer
from csps.actors.kv_transfer.header import KvHeader
from csps.actors.kv_transfer.receiver import KvReceiver
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.layout import local_pieces
from csps.actors.link_heartbeat import LinkHeartbeat
from csps.actors.mesh import Pending
from csps.actors.name_digest import name_digest
from csps.models.spec import ModelSpec, kv_head_range, read_spec
from csps.protocols.errors import TransferError
from csps.protocols.messages import (
    ConnectKv,
    KvLanded,
    KvShare,
    PrefillPiece,
    RequestFailed,
    Reserve,
    Sampling,
    Span,
)

LAYERS, HEAD_DIM, RID, EPOCH = 2, 4, 7, "epoch"
NEXT_RID = 8
"""Of a request whose landing proves that whatever was sent before it has been dealt with."""
WAIT_S = 20.0


@pytest.fixture(scope="module")
def spec(tiny_llama: Path) -> ModelSpec:
    return replace(read_spec(tiny_llama), layers=LAYERS, head_dim=HEAD_DIM)


# --- headers -------------------------------------------------------------------------------


def header(**fields: Any) -> KvHeader:
    defaults: dict[str, Any] = {
        "epoch": name_digest(EPOCH),
        "rid": RID,
        "layer": 0,
        "span": Span(start=0, stop=10),
        "heads": range(2, 4),
        "dtype": torch.float32,
    }
    return KvHeader(**defaults | fields)


@given(
    st.builds(
        header,
        kept=st.none() | st.just(0),
        epoch=st.integers(0, 2**63 - 1),
        rid=st.integers(0, 2**63 - 1),
        layer=st.integers(0, 200),
        span=st.builds(
            lambda start, length: Span(start=start, stop=start + length),
            st.integers(0, 2**40),
            st.integers(0, 2**40),
        ),
        heads=st.builds(range, st.integers(0, 64), st.integers(64, 128)),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    )
)
def test_a_header_survives_the_wire(it: KvHeader) -> None:
    words = it.pack()
    assert words.dtype == torch.int64
    assert words.shape == (KvHeader.WORDS,)
    assert KvHeader.unpack(words) == it


@pytest.mark.parametrize("kept", [None, 0, 1, 20])
def test_a_header_says_how_much_is_kept(kept: int | None) -> None:
    assert KvHeader.unpack(header(kept=kept).pack()).kept == kept


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 1), (4, 11), (4, -1), (6, 5), (8, 9), (8, -1), (9, -2), (9, 21)],
)
def test_what_is_no_header_is_refused(word: int, value: int) -> None:
    words = header().pack()
    words[word] = value
    with pytest.raises(TransferError, match="expected a KV header"):
        KvHeader.unpack(words)


def test_epochs_are_told_apart() -> None:
    names = [f"{prefill}.{decode}.{n}" for prefill in "ab" for decode in "cd" for n in range(50)]
    numbers = {name_digest(name) for name in names}
    assert len(numbers) == len(names)
    assert all(0 <= number < 2**63 for number in numbers)


# --- reservations --------------------------------------------------------------------------


def reservation(
    spans: tuple[Span, ...],
    heads: range = range(2, 4),
    layers: int = LAYERS,
    *,
    kept_only: bool = False,
) -> Reservation:
    request = Reserve(
        rid=RID,
        epoch=EPOCH,
        shares=tuple(KvShare(instance=0, span=span) for span in spans),
        master=0,
        prompt_length=max(span.stop for span in spans),
        sampling=Sampling(),
        kept_only=kept_only,
    )
    return Reservation(request=request, spans=spans, heads=heads, layers=layers, owner="router")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": name_digest("a former epoch")},
        {"layer": LAYERS},
        {"layer": -1},
        {"span": Span(start=0, stop=11)},
        {"span": Span(start=12, stop=14)},
        {"span": Span(start=8, stop=22)},  # two spans of the share and what is between them
        {"span": Span(start=5, stop=5)},
        {"heads": range(2, 5)},
        {"heads": range(1, 3)},
        {"heads": range(3, 3)},
        {"kept": 5},
    ],
    ids=str,
)
def test_what_was_not_promised_is_not_counted(wrong: dict[str, Any]) -> None:
    it = reservation((Span(start=0, stop=10), Span(start=20, stop=25)))
    promised = it.missing
    with pytest.raises(TransferError):
        it.accept(header(**wrong))
    assert it.missing == promised


@pytest.mark.parametrize(
    "again",
    [{}, {"span": Span(start=9, stop=10)}, {"heads": range(3, 4)}, {"span": Span(start=4, stop=6)}],
    ids=str,
)
def test_nothing_is_counted_twice_however_it_is_cut(again: dict[str, Any]) -> None:
    it = reservation((Span(start=0, stop=10),))
    it.accept(header())
    with pytest.raises(TransferError, match="arrived before"):
        it.accept(header(**again))


@pytest.mark.parametrize("kept", [None, 5])
def test_all_of_a_layer_comes_whole_or_all_of_it_narrowed(kept: int | None) -> None:
    """Heads that lie side by side in a pool cannot be read if only some of them are complete."""
    it = reservation((Span(start=0, stop=10),), kept_only=True)
    it.accept(header(heads=range(2, 3), kept=kept))
    it.accept(header(layer=1, kept=None if kept else 5))
    with pytest.raises(TransferError, match="other tokens"):
        it.accept(header(heads=range(3, 4), kept=None if kept else 5))
    it.accept(header(heads=range(3, 4), kept=kept))
    assert it.missing == 0


@given(
    cuts=st.sets(st.integers(1, 29)),
    order=st.randoms(use_true_random=False),
    spans=st.sampled_from([((0, 30),), ((0, 10), (10, 30)), ((5, 9), (0, 2), (20, 21))]),
)
def test_a_share_is_complete_exactly_when_all_of_it_has_arrived(
    cuts: set[int], order: Any, spans: tuple[tuple[int, int], ...]
) -> None:
    it = reservation(tuple(Span(start=start, stop=stop) for start, stop in spans))
    parts = [
        header(layer=layer, span=Span(start=start, stop=stop), heads=range(head, head + 1))
        for begin, end in spans
        for start, stop in pairwise(sorted({begin, end, *(c for c in cuts if begin < c < end)}))
        for layer in range(LAYERS)
        for head in range(2, 4)
    ]
    order.shuffle(parts)
    for part in parts:
        assert it.missing
        it.accept(part)
    assert it.missing == 0


# --- between gangs of any shape ------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (12, 3)])
def test_every_wanted_head_is_delivered_by_one_rank_that_has_it(
    spec: ModelSpec, heads: int, kv_heads: int
) -> None:
    model = replace(spec, heads=heads, kv_heads=kv_heads)
    sizes = [tp for tp in range(1, heads + 1) if divides(model, tp)]
    assert len(sizes) >= 2
    for sender_tp in sizes:
        for receiver_tp in sizes:
            for receiver in range(receiver_tp):
                wanted = kv_head_range(model, receiver, receiver_tp)
                delivered: list[int] = []
                for sender in range(sender_tp):
                    own = kv_head_range(model, sender, sender_tp)
                    part = heads_to_deliver(model, sender, sender_tp, wanted)
                    assert set(part) <= set(own)
                    delivered += part
                assert delivered == list(wanted)


def divides(spec: ModelSpec, tp: int) -> bool:
    try:
        kv_head_range(spec, 0, tp)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Shape:
    """Both gangs, and how a prompt lies in each."""

    prefill: int
    prefill_tp: int
    decode: int
    decode_tp: int
    bounds: tuple[int, ...]
    destinations: tuple[KvShare, ...]

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
    shares = [
        KvShare(instance=draw(st.integers(0, decode - 1)), span=Span(start=start, stop=stop))
        for start, stop in pairwise(cuts)
    ]
    return Shape(
        prefill=prefill,
        prefill_tp=draw(st.sampled_from((1, 2, 4))),
        decode=decode,
        decode_tp=draw(st.sampled_from((1, 2, 4))),
        bounds=(0, *inner, length),
        destinations=tuple(draw(st.permutations(shares))),
    )


class Receiver:
    """The decode rank's end: pool, reservation, landing, and what it reported."""

    def __init__(
        self,
        connection: KvConnection,
        rank: int,
        spec: ModelSpec,
        shares: tuple[KvShare, ...],
        *,
        kept_only: bool = False,
    ) -> None:
        instance, tp_rank = connection.decode.instance_of(rank), connection.decode.tp_rank_of(rank)
        heads = kv_head_range(spec, tp_rank, connection.decode.tp)
        self.spans = tuple(share.span for share in shares if share.instance == instance)
        self.reservations: dict[int, Reservation] = {}
        self.pool = KvPool(
            layers=LAYERS,
            slots=64,
            kv_heads=len(heads),
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
        )
        self.heads = heads
        self.reports: SimpleQueue[Any] = SimpleQueue()
        if self.spans:
            for rid in (RID, NEXT_RID):
                self.reservations[rid] = reservation(self.spans, heads, kept_only=kept_only)
                self.pool.allocate(rid, self.spans)
        self.end = KvReceiver(
            connection,
            self.pool,
            rank=rank,
            find=self.reservations.get,
            on_landed=self.reports.put,
            on_failed=self.reports.put,
            on_lost=self.reports.put,
            on_broken=self.reports.put,
        )

    def report(self) -> Any:
        """The next thing that the rank reported."""
        return self.reports.get(timeout=WAIT_S)


def connections(shape: Shape) -> tuple[list[KvConnection], list[KvConnection]]:
    """All ranks' ends, prefill's and decode's."""
    store, world = HashStore(), shape.prefill_ranks + shape.decode_ranks

    def make(index: int) -> KvConnection:
        is_decode = index >= shape.prefill_ranks
        rank = index - shape.prefill_ranks if is_decode else index
        return KvConnection(
            store,
            shape.connection,
            rank=rank,
            is_decode=is_decode,
            device="cpu",
            host="127.0.0.1",
        )

    with ThreadPoolExecutor(world) as threads:
        made = list(threads.map(make, range(world)))
    return made[: shape.prefill_ranks], made[shape.prefill_ranks :]


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes(), keep=st.sampled_from((None, 0.0, 0.4, 1.0)))
def test_every_decode_rank_gets_its_tokens_and_heads(
    spec: ModelSpec, shape: Shape, keep: float | None
) -> None:
    """All of them, or in layer 1 those that are kept of each head, be they none."""
    model = replace(spec, heads=8, kv_heads=2)
    k, v = (torch.randn(LAYERS, shape.length, model.kv_heads, HEAD_DIM) for _ in range(2))
    kept_ht = None if keep is None else torch.rand(model.kv_heads, shape.length) < keep
    senders, ends = connections(shape)
    receivers = [
        Receiver(end, r, model, shape.destinations, kept_only=keep is not None)
        for r, end in enumerate(ends)
    ]
    piece = PrefillPiece(rid=RID, start=0, length=shape.length, destinations=shape.destinations)
    sendings: list[Pending] = []
    for rank, connection in enumerate(senders):
        heads = kv_head_range(model, connection.prefill.tp_rank_of(rank), shape.prefill_tp)
        columns = slice(heads.start, heads.stop)
        for part in local_pieces([piece], shape.bounds, connection.prefill.instance_of(rank)):
            rows = slice(part.span.start, part.span.stop)
            for layer in range(LAYERS):
                sendings += send_layer(
                    connection,
                    model,
                    rank=rank,
                    layer=layer,
                    part=part,
                    k_thd=k[layer, rows, columns],
                    v_thd=v[layer, rows, columns],
                    kept_ht=kept_ht[columns, rows] if layer and kept_ht is not None else None,
                )
    for receiver in receivers:
        if receiver.spans:
            landed = receiver.report()
            assert isinstance(landed, KvLanded)
            assert landed.tokens == sum(span.length for span in receiver.spans)
            check_pool(receiver, k, v, kept_ht)
        assert receiver.reports.empty()
    for sending in sendings:
        sending.wait()
    for receiver in receivers:
        receiver.end.close()


def check_pool(receiver: Receiver, k: Tensor, v: Tensor, kept_ht: Tensor | None) -> None:
    columns = slice(receiver.heads.start, receiver.heads.stop)
    for layer in range(LAYERS):
        seen = 0
        if layer and kept_ht is not None:
            check_kept(receiver, k[layer, :, columns], v[layer, :, columns], kept_ht[columns])
            continue
        for run in receiver.pool.view(layer, RID):
            assert torch.equal(run.k_thd, k[layer, run.positions, columns])
            assert torch.equal(run.v_thd, v[layer, run.positions, columns])
            seen += len(run.positions)
        assert seen == sum(span.length for span in receiver.spans)
    receiver.pool.check_integrity()


def check_kept(receiver: Receiver, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor) -> None:
    """Layer 1 has of each head what it keeps of the rank's spans, in whichever order."""
    mine = torch.zeros_like(kept_ht)
    for span in receiver.spans:
        mine[:, span.start : span.stop] = kept_ht[:, span.start : span.stop]
    for head in range(len(receiver.heads)):
        blocks = [
            it for it in receiver.pool.kept_blocks(1, RID) if it.heads.start <= head < it.heads.stop
        ]
        keys = [it.k_thd[:, head - it.heads.start] for it in blocks]
        values = [it.v_thd[:, head - it.heads.start] for it in blocks]
        assert rows_of(keys) == rows_of([k_thd[mine[head], head]])
        assert rows_of(values) == rows_of([v_thd[mine[head], head]])


def rows_of(tensors: list[Tensor]) -> list[list[float]]:
    return sorted(row for tensor in tensors for row in tensor.tolist())


# --- what goes wrong -----------------------------------------------------------------------

PAIR = Shape(1, 1, 1, 1, (0, 10), (KvShare(instance=0, span=Span(start=0, stop=10)),))


@contextmanager
def pair(spec: ModelSpec) -> Iterator[tuple[KvConnection, Receiver]]:
    """One rank on either side, and a reservation of 10 tokens."""
    senders, ends = connections(PAIR)
    receiver = Receiver(ends[0], 0, spec, PAIR.destinations)
    try:
        yield senders[0], receiver
    finally:
        receiver.end.close()
        senders[0].close()


def send(connection: KvConnection, it: KvHeader) -> None:
    k, v = (torch.ones(it.span.length, len(it.heads), HEAD_DIM, dtype=it.dtype) for _ in range(2))
    connection.send(0, it, k, v).wait()


def send_share(connection: KvConnection, spec: ModelSpec, rid: int) -> None:
    for layer in range(LAYERS):
        send(connection, header(rid=rid, layer=layer, heads=range(spec.kv_heads)))


def check_next_lands(connection: KvConnection, receiver: Receiver, spec: ModelSpec) -> None:
    """And nothing else was reported."""
    send_share(connection, spec, NEXT_RID)
    landed = receiver.report()
    assert isinstance(landed, KvLanded)
    assert landed.rid == NEXT_RID
    assert receiver.reports.empty()


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": name_digest("a former epoch")},
        {"span": Span(start=0, stop=11)},
        {"layer": LAYERS},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_wrong_kv_fails_its_request_and_nothing_of_it_lands(
    spec: ModelSpec, wrong: dict[str, Any]
) -> None:
    """The stream goes on behind it: the bad message was received to its end."""
    with pair(spec) as (connection, receiver):
        send(connection, header(heads=range(spec.kv_heads), **wrong))
        failed = receiver.report()
        assert isinstance(failed, RequestFailed)
        assert (failed.rid, failed.code) == (RID, "TransferError")
        send_share(connection, spec, RID)
        check_next_lands(connection, receiver, spec)


def test_a_mask_that_marks_another_number_fails_its_request(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        receiver.reservations[RID] = reservation(
            (Span(start=0, stop=10),), range(spec.kv_heads), kept_only=True
        )
        kept_ht = torch.ones(spec.kv_heads, 10, dtype=torch.bool)
        kept_ht[0, :3] = False
        rows = torch.ones(5, HEAD_DIM)
        it = header(heads=range(spec.kv_heads), kept=5)
        connection.send_kept(0, it, KeptKv(kept_ht, rows, rows)).wait()
        failed = receiver.report()
        assert isinstance(failed, RequestFailed)
        assert (failed.rid, failed.code) == (RID, "TransferError")
        assert "a mask of" in failed.message
        check_next_lands(connection, receiver, spec)


def test_kv_that_arrives_twice_fails_its_request(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        for _ in range(2):
            send(connection, header(heads=range(spec.kv_heads)))
        assert isinstance(receiver.report(), RequestFailed)
        check_next_lands(connection, receiver, spec)


def test_kv_of_a_request_that_has_left_is_dropped(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        del receiver.reservations[RID]
        send_share(connection, spec, RID)
        check_next_lands(connection, receiver, spec)


def test_a_stream_out_of_step_breaks_the_rank(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KvHeader, "pack", lambda self: torch.zeros(10, dtype=torch.int64))
            sending = connection.send(0, header(), torch.empty(0), torch.empty(0))
        assert isinstance(receiver.report(), TransferError)
        del sending  # never to be received; dropped earlier, it would never be sent


@pytest.mark.parametrize(
    "fails",
    ["csps.actors.kv_transfer.connection.torch.empty_like", "csps.actors.kv_pool.KvPool.write"],
)
def test_a_receiver_that_fails_by_itself_breaks_the_rank(spec: ModelSpec, fails: str) -> None:
    """Torch says with one class that memory ran out and that a peer is gone."""
    out_of_memory = RuntimeError("out of memory")

    def fail(*_: Any, **__: Any) -> None:
        raise out_of_memory

    it = header(heads=range(spec.kv_heads))
    rows = torch.ones(it.span.length, spec.kv_heads, HEAD_DIM)
    with pair(spec) as (connection, receiver):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fails, fail)
            sending = connection.send(0, it, rows, rows)
            assert receiver.report() is out_of_memory
        del sending  # as above


def test_a_peer_that_goes_ends_its_stream_and_nothing_else(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        connection.close()
        for thread in receiver.end._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert receiver.report().startswith("prefill rank 0: ")
        assert receiver.reports.empty()


def test_a_peer_that_falls_silent_is_reported(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE", timedelta(milliseconds=50))
    with pair(spec) as (_, receiver):
        assert receiver.report().startswith("prefill rank 0: ")


def test_a_peer_that_beats_is_not_silent(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats stand between announcements; the sender learns as well that the receiver has gone."""
    monkeypatch.setattr(link_heartbeat, "BEAT_S", 0.01)
    lost: SimpleQueue[str] = SimpleQueue()
    with pair(spec) as (connection, receiver):
        heartbeat = LinkHeartbeat(connection, lost.put)
        try:
            check_next_lands(connection, receiver, spec)
            receiver.end.close()
            assert lost.get(timeout=WAIT_S).startswith("decode rank 0: ")
        finally:
            heartbeat.close()


def test_closing_ends_the_receivers(spec: ModelSpec) -> None:
    with pair(spec) as (_, receiver):
        receiver.end.close()
        for thread in receiver.end._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert receiver.reports.empty()
