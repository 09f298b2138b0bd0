"""KV leaves the pool as fast as the receiver grants, against receivers that a test plays."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_ends import (
    HEAD_DIM,
    IN_FLIGHT,
    LAYERS,
    PAIR,
    SEQUENCE_ID,
    WAIT_S,
    Shape,
    Source,
    connections,
    ended,
)
from property_examples import examples
from torch import Tensor

from csps.actors.comm.process_group import PeerLost, Pending
from csps.actors.kv_transfer import sender as sender_module
from csps.actors.kv_transfer.connection import (
    Credit,
    KvConnection,
    KvTag,
    TransferEnded,
    TransferRequested,
)
from csps.actors.kv_transfer.message import KvBody, KvHeader, Staging
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.models.network.spec import ModelSpec
from csps.protocols.core.errors import ConfigError, TransferError
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.step_messages import PrefillChunk

TOKENS = 10
PREFILL = 0
"""The prefill rank of a pair, as a peer."""
TWO = Shape(
    1,
    1,
    2,
    1,
    (0, TOKENS),
    (
        KvSlice(0, 0, 4),
        KvSlice(1, 4, TOKENS),
    ),
)
"""Slices of ten tokens, of which the first decode rank gets four."""


def random_kv(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    shape = (LAYERS, TOKENS, spec.kv_heads, HEAD_DIM)
    return torch.randn(shape), torch.randn(shape)


@contextmanager
def sending(
    spec: ModelSpec, shape: Shape = PAIR, **options: Any
) -> Iterator[tuple[Source, list[KvConnection]]]:
    """Return one prefill rank with a step of ten tokens, and the decode ranks' ends."""
    (start,), ends = connections(shape)
    chunk = PrefillChunk(
        sequence_id=SEQUENCE_ID, start=0, length=TOKENS, destinations=shape.destinations
    )
    source = Source(start, 0, spec, chunk, shape, *random_kv(spec), **options)
    try:
        yield source, ends
    finally:
        source.sender.close()
        for end in ends:
            end.close()
        ended(source.sender.threads)


class SlowReceiver:
    """Takes messages one by one and acknowledges them when it likes."""

    def __init__(self, end: KvConnection, window: int | None = None) -> None:
        self.end = end
        self.acknowledged = 0
        self.messages: list[tuple[KvHeader, KvBody]] = []
        self._owed: deque[int] = deque()
        if window is not None:
            self.grant(window)

    def grant(self, window: int) -> None:
        self.window = window
        self.tell(Credit(window, 0))

    def tell(self, grant: Credit) -> None:
        self.end.send_credit(PREFILL, grant).wait(timedelta(seconds=WAIT_S))

    @property
    def owed(self) -> int:
        """Return the bytes that are still under way, for the sender."""
        return sum(self._owed)

    def receive_next(
        self, *, wanted: bool = True
    ) -> KvHeader | TransferRequested | TransferEnded | None:
        """Receive the sender's next message; a request for a transfer slot is granted."""
        word = self.end.next_message(PREFILL)
        if isinstance(word, TransferRequested):
            self.tell(Credit(self.window, self.acknowledged, word.transfer_slot, wanted))
        return word

    def take(self) -> KvHeader:
        while not isinstance(header := self.receive_next(), KvHeader):
            pass
        self._owed.append(header.charge(HEAD_DIM))
        staging = Staging(torch.device("cpu"))
        self.messages.append((header, self.end.receive(PREFILL, header, HEAD_DIM, staging)))
        return header

    def acknowledge(self) -> None:
        self.acknowledged += self._owed.popleft()  # before the sender can know
        self.tell(Credit(self.window, self.acknowledged))

    @property
    def entries(self) -> int:
        return sum(header.entries for header, _ in self.messages)

    def acknowledge_all(self) -> None:
        while self._owed:
            self.acknowledge()


# --- how much is under way -----------------------------------------------------------------


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(
    window=st.integers(66, 1500),
    own=st.integers(66, 1500),
    lags=st.lists(st.integers(0, 10), min_size=1, max_size=10),
)
def test_no_more_is_read_or_sent_than_the_credit_allows(
    spec: ModelSpec, window: int, own: int, lags: Sequence[int]
) -> None:
    """KV that is read from the pool takes memory. The receiver stays as many messages behind as the
    sender can go on without an acknowledgment."""
    limit, excess = min(window, own), []
    with sending(spec, in_flight_bytes=own) as (source, (end,)):
        receiver = SlowReceiver(end)
        read, read_pinned = [0], source.pool.read_pinned

        def counted(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            k, v = read_pinned(*args, **options)
            read[0] += k.nbytes + v.nbytes
            excess.append(read[0] - receiver.acknowledged - limit)
            return k, v

        source.pool.read_pinned = counted  # type: ignore[method-assign]
        for layer in range(LAYERS):
            source.send(layer)
        source.end_step()
        receiver.grant(window)
        row = spec.kv_heads * (2 * HEAD_DIM * 4 + 1)
        while receiver.entries < LAYERS * TOKENS * spec.kv_heads:
            while limit - receiver.owed < max(row, limit // 2) or (
                len(receiver._owed) > lags[len(receiver.messages) % len(lags)]
            ):
                receiver.acknowledge()
            receiver.take()
        while receiver.owed:
            assert source.pool.slots.used, "somebody may write where KV is still being read"
            receiver.acknowledge()
        assert source.sent() is None
        assert source.broken.empty()
        assert max(excess) <= 0
        check_messages(receiver, source)


def check_messages(receiver: SlowReceiver, source: Source) -> None:
    """Check that every row of every layer has come once, with the right numbers."""
    seen = torch.zeros(LAYERS, TOKENS, dtype=torch.int64)
    for header, body in receiver.messages:
        rows = slice(header.span.start, header.span.stop)
        heads = slice(header.heads.start, header.heads.stop)
        seen[header.layer, rows] += 1
        assert torch.equal(body.k, source._k[header.layer, rows, heads])
        assert torch.equal(body.v, source._v[header.layer, rows, heads])
    assert (seen == 1).all()


def test_contiguous_kv_is_sent_without_a_copy(spec: ModelSpec) -> None:
    """The connection gets the pool's own memory, unless it has to be gathered."""
    with sending(spec) as (source, (end,)):
        handed: list[KvBody] = []
        send = source.sender.connection.send

        def watched(peer: int, header: KvHeader, body: KvBody) -> Pending:
            handed.append(body)
            return send(peer, header, body)

        source.sender.connection.send = watched  # type: ignore[method-assign]
        source.send(1)
        source.send(0, torch.ones(spec.kv_heads, TOKENS, dtype=torch.bool))
        receiver = SlowReceiver(end, 8 * spec.kv_heads * (2 * HEAD_DIM * 4 + 1))
        while receiver.entries < LAYERS * TOKENS * spec.kv_heads:
            receiver.take()
            receiver.acknowledge()
        assert source.sent() is None
    inside = [in_pool(source, body.k) and in_pool(source, body.v) for body in handed]
    # Slots are 5 to 9 and 0 to 4, and a message has up to four tokens.
    assert inside == [True, False, True] + [False] * 3


def in_pool(source: Source, tensor: Tensor) -> bool:
    pools = (source.pool.k, source.pool.v)
    return any(0 <= tensor.data_ptr() - pool.data_ptr() < pool.nbytes for pool in pools)


def test_posting_never_blocks(spec: ModelSpec) -> None:
    """The receiver has not even sent its first credit."""
    with sending(spec) as (source, (end,)):
        for layer in range(LAYERS):
            source.send(layer)
        assert source.sender.connection.bytes_sent == 0
        receiver = SlowReceiver(end, IN_FLIGHT)
        for _ in range(LAYERS):
            receiver.take()
        receiver.acknowledge_all()
        assert source.sent() is None


def test_a_stalled_receiver_delays_no_other(spec: ModelSpec) -> None:
    with sending(spec, TWO) as (source, (stuck, other)):
        SlowReceiver(stuck, 100)
        receiver = SlowReceiver(other, IN_FLIGHT)
        for layer in range(LAYERS):
            source.send(layer)
            assert receiver.take().span == Span(start=4, stop=TOKENS)
            receiver.acknowledge()


def test_steps_take_turns(spec: ModelSpec) -> None:
    """The layer of a step that was posted last does not wait for all of the one before it."""
    with sending(spec) as (source, (end,)):
        source.send(0)
        other = TransferTracker(source.pool.slots, source._sent.put)
        source.pool.write(
            1,
            SEQUENCE_ID,
            Span(start=0, stop=TOKENS),
            *(pool_tensor[1] for pool_tensor in (source._k, source._v)),
        )
        source.sender.post(other, 1, source.parts[0])
        other.finish()
        receiver = SlowReceiver(end, 2 * spec.kv_heads * (2 * HEAD_DIM * 4 + 1))
        layers = []
        for _ in range(2 * TOKENS):  # token by token
            layers.append(receiver.take().layer)
            receiver.acknowledge()
        for sent in range(2 * TOKENS):  # two may have left when the other one's turn came
            first, other_step = layers[:sent].count(0), layers[:sent].count(1)
            assert abs(first - other_step) <= 2
        assert source._sent.get(timeout=WAIT_S) is None
        assert source.sent() is None
        check_messages(receiver, source)


def test_a_credit_smaller_than_a_token_is_a_configuration_error(spec: ModelSpec) -> None:
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, 65)
        source.send(0)
        assert isinstance(receiver.receive_next(), TransferRequested)
        broken = source.broken.get(timeout=WAIT_S)
        assert isinstance(broken, ConfigError)
        assert source.sent() is broken


def test_more_acknowledged_than_was_sent_ends_the_connection(spec: ModelSpec) -> None:
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, IN_FLIGHT)
        source.send(0)
        receiver.take()
        receiver.tell(Credit(IN_FLIGHT, 10**6))
        assert "acknowledged 1000000 bytes" in source.lost.get(timeout=WAIT_S)
        assert isinstance(source.sent(), TransferError)


# --- what is not sent ----------------------------------------------------------------------


def test_cancelled_kv_is_not_sent(spec: ModelSpec) -> None:
    """KV under way is still sent; its slots are free when it was received."""
    half = 5 * spec.kv_heads * (2 * HEAD_DIM * 4 + 1)
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, half)
        source.send(0)
        assert receiver.take().span.length == 2
        assert receiver.take().span.length == 2
        source.sender.cancel(SEQUENCE_ID + 1)
        source.send(1)
        source.sender.cancel(SEQUENCE_ID)
        sent = source.sender.connection.bytes_sent
        receiver.acknowledge_all()
        assert source.sent() is None
        assert source.sender.connection.bytes_sent == sent


def test_a_receiver_that_dies_fails_what_it_did_not_acknowledge(
    spec: ModelSpec,
) -> None:
    """All slots are freed, and KV that is posted later fails as well."""
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, 200)
        source.send(0)
        receiver.take()
        end.close()
        assert source.lost.get(timeout=WAIT_S).startswith("decode rank 0: ")
        source.send(1)
        assert isinstance(source.sent(), PeerLost)
        assert source.broken.empty()


def test_closing_fails_unacknowledged_kv_and_reports_no_lost_peer(spec: ModelSpec) -> None:
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, 200)
        for layer in range(LAYERS):
            source.send(layer)
        receiver.take()
        source.sender.close()
        assert isinstance(source.sent(), PeerLost)
        assert source.lost.empty()
        assert source.broken.empty()


def test_unreadable_kv_fails_its_step_and_the_queue_goes_on(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unreadable KV was not announced."""
    out_of_memory = RuntimeError("out of memory")

    def fail(*_: Any) -> None:
        raise out_of_memory

    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, IN_FLIGHT)
        with pytest.MonkeyPatch.context() as patch:
            failed = threading.Event()
            patch.setattr(source.tracker, "given_up", lambda _: failed.set())
            patch.setattr(Staging, "to_host", fail)
            source.send(0)
            assert isinstance(receiver.receive_next(), TransferRequested)
            assert failed.wait(WAIT_S)
        source.tracker.given_up(out_of_memory)
        source.send(1)
        assert receiver.take().layer == 1
        receiver.acknowledge_all()
        assert source.sent() is out_of_memory


# --- beats ---------------------------------------------------------------------------------


def message_received(end: KvConnection) -> int:
    words = torch.zeros(KvHeader.WORDS + 1, dtype=torch.int64)
    end._recv(words, PREFILL, KvTag.HEADER).wait(timedelta(seconds=WAIT_S))
    return int(words[0])


def test_an_idle_sender_sends_heartbeats(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after it has, and while a device has not written yet what is next."""
    monkeypatch.setattr(sender_module, "HEARTBEAT_S", 0.01)
    device = Device()
    monkeypatch.setattr(sender_module, "launched_so_far", lambda _: device)
    with sending(spec) as (source, (end,)):
        receiver = SlowReceiver(end, IN_FLIGHT)
        beats = [message_received(end) for _ in range(3)]
        source.send(0)
        while not isinstance(receiver.receive_next(), TransferRequested):
            pass
        beats += [message_received(end) for _ in range(3)]
        assert source.sender.connection.bytes_sent == 0
        device.done = True
        receiver.take()
        receiver.acknowledge_all()
        beats += [message_received(end) for _ in range(3)]
        assert len(set(beats)) == 1
        end.close()
        assert source.lost.get(timeout=WAIT_S).startswith("decode rank 0: ")


class Device:
    """Stands in for a GPU that has or has not finished its work."""

    done = False

    def query(self) -> bool:
        return self.done


# --- checksums -----------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "checked"), [(0.0, 0), (0.25, 5), (0.5, 10), (1.0, 20)])
def test_so_many_messages_carry_a_checksum_of_their_bytes(
    spec: ModelSpec, fraction: float, checked: int
) -> None:
    window = 2 * spec.kv_heads * (2 * HEAD_DIM * 4 + 1)
    with sending(spec, checked=fraction) as (source, (end,)):
        receiver = SlowReceiver(end, window)
        for layer in range(LAYERS):
            source.send(layer)
        for _ in range(LAYERS * TOKENS):  # token by token
            receiver.take()
            receiver.acknowledge()
        assert source.sent() is None
    carried = [
        (header.checksum, body) for header, body in receiver.messages if header.checksum is not None
    ]
    assert len(carried) == checked
    for checksum, body in carried:
        assert checksum == zlib.crc32(body.k.numpy().tobytes() + body.v.numpy().tobytes())
