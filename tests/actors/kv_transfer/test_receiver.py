"""KV over a real connection: promised KV is stored, and anything else is an error."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_ends import (
    DECODE,
    HEAD_DIM,
    LAYERS,
    NEXT_RID,
    SEQUENCE_ID,
    Receiver,
    Shape,
    Source,
    body,
    connections,
    ended,
    header,
    pair,
    reservation,
    shapes,
)
from property_examples import examples
from torch import Tensor

from csps.actors.comm.layout import name_digest
from csps.actors.comm.process_group import Pending
from csps.actors.kv_transfer import connection as connection_module
from csps.actors.kv_transfer.connection import KvConnection, KvTag
from csps.actors.kv_transfer.message import KvBody, KvHeader
from csps.actors.kv_transfer.sender import heads_to_deliver
from csps.models.network.spec import ModelSpec, kv_head_range
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import RankKvReceived, RequestFailed
from csps.protocols.gang.step_messages import PrefillChunk

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


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes(),
    keep=st.sampled_from((None, 0.0, 0.4, 1.0)),
    window=st.sampled_from((70, 200, 500, 5_000)),
)
def test_every_decode_rank_gets_its_tokens_and_heads(
    spec: ModelSpec, shape: Shape, keep: float | None, window: int
) -> None:
    """Layer 1 sends only the tokens that each head keeps, if any; in one message or token by
    token."""
    model = replace(spec, heads=8, kv_heads=2)
    k, v = (torch.randn(LAYERS, shape.length, model.kv_heads, HEAD_DIM) for _ in range(2))
    kept_ht = None if keep is None else torch.rand(model.kv_heads, shape.length) < keep
    starts, ends = connections(shape)
    receivers = [
        Receiver(
            end,
            r,
            model,
            shape.destinations,
            kept_only=keep is not None,
            in_flight_bytes=window * len(starts),
        )
        for r, end in enumerate(ends)
    ]
    chunk = PrefillChunk(
        sequence_id=SEQUENCE_ID, start=0, length=shape.length, destinations=shape.destinations
    )
    sources = [
        Source(start, r, model, chunk, shape, k, v, in_flight_bytes=window * len(ends))
        for r, start in enumerate(starts)
    ]
    for source in sources:
        for layer in range(LAYERS):
            source.send(layer, kept_ht if layer else None)
    for receiver in receivers:
        if receiver.spans:
            received_messages = receiver.report()
            assert isinstance(received_messages, RankKvReceived)
            assert received_messages.tokens == sum(span.length for span in receiver.spans)
            check_pool(receiver, k, v, kept_ht)
        assert receiver.reports.empty()
    for source in sources:
        assert source.sent() is None
        source.sender.close()
    for receiver in receivers:
        receiver.end.close()


def check_pool(receiver: Receiver, k: Tensor, v: Tensor, kept_ht: Tensor | None) -> None:
    columns = slice(receiver.heads.start, receiver.heads.stop)
    for layer in range(LAYERS):
        if layer and kept_ht is not None:
            check_kept(receiver, k[layer, :, columns], v[layer, :, columns], kept_ht[columns])
            continue
        for span in receiver.spans:
            k_thd, v_thd = receiver.pool.read(layer, SEQUENCE_ID, span)
            assert torch.equal(k_thd, k[layer, list(span.positions), columns])
            assert torch.equal(v_thd, v[layer, list(span.positions), columns])
    receiver.pool.slots.check_integrity()


def check_kept(receiver: Receiver, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor) -> None:
    """Check that layer 1 has, of each head, the kept tokens of the rank's spans, in any order."""
    mine = torch.zeros_like(kept_ht)
    for span in receiver.spans:
        mine[:, span.start : span.stop] = kept_ht[:, span.start : span.stop]
    for head in range(len(receiver.heads)):
        blocks = [
            kept_block
            for kept_block in receiver.pool.kept_blocks(1, SEQUENCE_ID)
            if kept_block.heads.start <= head < kept_block.heads.stop
        ]
        keys = [block.k_thd[:, head - block.heads.start] for block in blocks]
        values = [block.v_thd[:, head - block.heads.start] for block in blocks]
        assert rows_of(keys) == rows_of([k_thd[mine[head], head]])
        assert rows_of(values) == rows_of([v_thd[mine[head], head]])


def rows_of(tensors: list[Tensor]) -> list[list[float]]:
    return sorted(row for tensor in tensors for row in tensor.tolist())


# --- what goes wrong -----------------------------------------------------------------------


def send(connection: KvConnection, announced: KvHeader, message: KvBody | None = None) -> None:
    sending = connection.send(DECODE, announced, message or body(announced))
    connection.next_credit(DECODE)
    sending.wait()


def send_slice(connection: KvConnection, spec: ModelSpec, sequence_id: int) -> None:
    for layer in range(LAYERS):
        send(connection, header(sequence_id=sequence_id, layer=layer, heads=range(spec.kv_heads)))


def check_next_stored(connection: KvConnection, receiver: Receiver, spec: ModelSpec) -> None:
    """Check that the next KV is stored and nothing else was reported."""
    send_slice(connection, spec, NEXT_RID)
    received_messages = receiver.report()
    assert isinstance(received_messages, RankKvReceived)
    assert received_messages.sequence_id == NEXT_RID
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
def test_wrong_kv_fails_its_request_and_is_not_stored(
    spec: ModelSpec, wrong: dict[str, Any]
) -> None:
    """The channel goes on afterwards: the bad message was received to its end."""
    with pair(spec) as (connection, receiver):
        send(connection, header(heads=range(spec.kv_heads), **wrong))
        failed = receiver.report()
        assert isinstance(failed, RequestFailed)
        assert (failed.sequence_id, failed.code) == (SEQUENCE_ID, "TransferError")
        send_slice(connection, spec, SEQUENCE_ID)
        check_next_stored(connection, receiver, spec)


def test_a_mask_that_marks_another_number_fails_its_request(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        receiver.reservations[SEQUENCE_ID] = reservation(
            (Span(start=0, stop=10),), range(spec.kv_heads), kept_only=True
        )
        kept_ht = torch.ones(spec.kv_heads, 10, dtype=torch.bool)
        kept_ht[0, :3] = False
        rows = torch.ones(5, HEAD_DIM)
        announced = header(heads=range(spec.kv_heads), kept=5)
        send(connection, announced, KvBody(rows, rows, kept_ht))
        failed = receiver.report()
        assert isinstance(failed, RequestFailed)
        assert (failed.sequence_id, failed.code) == (SEQUENCE_ID, "TransferError")
        assert "a mask of" in failed.message
        check_next_stored(connection, receiver, spec)


def test_kv_that_arrives_twice_fails_its_request(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        for _ in range(2):
            send(connection, header(heads=range(spec.kv_heads)))
        assert isinstance(receiver.report(), RequestFailed)
        check_next_stored(connection, receiver, spec)


def test_kv_of_a_request_that_has_left_is_dropped(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        del receiver.reservations[SEQUENCE_ID]
        send_slice(connection, spec, SEQUENCE_ID)
        check_next_stored(connection, receiver, spec)


def test_a_message_larger_than_the_credit_ends_the_connection(spec: ModelSpec) -> None:
    """Before memory is taken for it."""
    with pair(spec) as (connection, receiver):
        announced = header(span=Span(start=0, stop=2**40))
        connection.send(DECODE, announced, KvBody(torch.empty(0), torch.empty(0))).wait()
        lost = receiver.report()
        assert lost.startswith("prefill rank 0: ")
        assert "; the credit is" in lost
        ended(receiver.end.threads)


@pytest.mark.parametrize("dies", [True, False])
def test_a_sender_lost_or_stalled_inside_a_message_is_reported(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The announced rest will never come."""
    with pair(spec) as (connection, receiver):
        monkeypatch.setattr(connection_module, "MESSAGE_DEADLINE", timedelta(milliseconds=50))
        announced = header(heads=range(spec.kv_heads))
        connection.send(DECODE, announced, KvBody(torch.empty(0), torch.empty(0))).wait()
        if dies:
            connection.close()
        assert receiver.report().startswith("prefill rank 0: ")
        assert receiver.pool.k.isnan().all()


@pytest.mark.parametrize("whole", [True, False])
def test_kv_that_was_changed_on_its_way_fails_its_request(spec: ModelSpec, whole: bool) -> None:
    """Only messages with a checksum show it. No more KV of the request is stored; other requests'
    is."""
    with pair(spec) as (connection, receiver):
        receiver.reservations[SEQUENCE_ID] = reservation(
            (Span(start=0, stop=10),), range(spec.kv_heads), kept_only=not whole
        )
        announced = header(heads=range(spec.kv_heads))
        sent = body(announced)
        if not whole:
            kept_ht = torch.zeros(spec.kv_heads, 10, dtype=torch.bool)
            kept_ht[:, 3:5] = True
            rows = torch.randn(2 * spec.kv_heads, HEAD_DIM)
            announced, sent = replace(announced, kept=len(rows)), KvBody(rows, -rows, kept_ht)
        checksum = sent.checksum()
        if sent.kept_ht is None:
            sent.v[9, 0, 1] += 1e-6
        else:
            sent.kept_ht[0, 3:7] = torch.tensor([False, True, True, False])
        send(connection, replace(announced, checksum=checksum), sent)
        failed = receiver.report()
        assert isinstance(failed, RequestFailed)
        assert (failed.sequence_id, failed.code) == (SEQUENCE_ID, "TransferError")
        assert "was changed on its way" in failed.message
        assert not receiver.pool.narrowed(0, SEQUENCE_ID)
        assert receiver.pool.k.isnan().all()
        send_slice(connection, spec, SEQUENCE_ID)
        check_next_stored(connection, receiver, spec)


@pytest.mark.parametrize(
    ("word", "value"), [(4, 8), (4, 11), (6, 2), (9, 4), (9, 3), (12, 0)], ids=str
)
def test_a_header_that_was_changed_ends_the_connection(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, word: int, value: int
) -> None:
    """Before anything is awaited that it announces: a message longer than that would make gloo end
    the process."""
    with pair(spec) as (connection, receiver):
        send = KvConnection._send

        def change(end: KvConnection, tensor: Tensor, peer: int, tag: KvTag) -> Pending:
            if tag == KvTag.HEADER:
                tensor[word] = value
            return send(end, tensor, peer, tag)

        announced = header(heads=range(spec.kv_heads))
        with monkeypatch.context() as patch:
            patch.setattr(KvConnection, "_send", change)
            sending = connection.send(DECODE, announced, body(announced))
            assert "were changed on their way" in receiver.report()
        ended(receiver.end.threads)
        assert receiver.pool.k.isnan().all()
        del sending  # as below


def test_a_channel_out_of_step_ends_the_connection(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        with pytest.MonkeyPatch.context() as patch:
            nonsense = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
            patch.setattr(KvHeader, "pack", lambda self: nonsense)
            sending = connection.send(DECODE, header(), KvBody(torch.empty(0), torch.empty(0)))
        assert "expected a KV header" in receiver.report()
        ended(receiver.end.threads)
        del sending  # never to be received; dropped earlier, it would never be sent


@pytest.mark.parametrize(
    "fails",
    ["csps.actors.kv_transfer.message.torch.empty", "csps.actors.kv_cache.kv_pool.KvPool.write"],
)
def test_a_receiver_that_fails_by_itself_breaks_the_rank(spec: ModelSpec, fails: str) -> None:
    """Torch raises one class of errors for a lack of memory and for a lost peer."""
    out_of_memory = RuntimeError("out of memory")

    def fail(*_: Any, **__: Any) -> None:
        raise out_of_memory

    announced = header(heads=range(spec.kv_heads))
    message = body(announced)
    with pair(spec) as (connection, receiver):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fails, fail)
            sending = connection.send(DECODE, announced, message)
            assert receiver.report() is out_of_memory
        del sending  # as above


def test_a_lost_peer_ends_its_own_thread_only(spec: ModelSpec) -> None:
    with pair(spec) as (connection, receiver):
        connection.close()
        ended(receiver.end.threads)
        assert receiver.report().startswith("prefill rank 0: ")
        assert receiver.reports.empty()


def test_a_peer_that_falls_silent_is_reported(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(spec) as (connection, receiver):
        monkeypatch.setattr(connection_module, "LIVENESS_TIMEOUT", timedelta(milliseconds=50))
        connection.send_heartbeat(DECODE)  # after which it is waited for so long
        assert receiver.report().startswith("prefill rank 0: ")


def test_closing_ends_the_receivers(spec: ModelSpec) -> None:
    with pair(spec) as (_, receiver):
        receiver.end.close()
        ended(receiver.end.threads)
        assert receiver.reports.empty()
