"""The connection that carries KV from a prefill gang to a decode gang: a gloo group of both.

Prefill rank p is peer p of the group, decode rank d is peer P + d. A message of KV is a header,
then keys, then values. If only kept tokens are sent, a mask comes before the keys: one byte for
each token and head. Row numbers would be longer as soon as a quarter is kept.

The receiver gives each sender a credit of bytes and acknowledges each message; a sender has no more
than its credit under way. A sender asks for a transfer slot before it sends KV of a sequence, and
returns the slot afterwards (`TransferSlots`). A sender with nothing under way sends heartbeats: a
router or firewall may forget an idle connection, and only its next user would notice.

A message is received whole, also for a cancelled sequence, so that neither side is left with half
of it. Headers and credits carry checksums: one that was changed ends the connection. Every header
is checked against the receiver's reservation before its KV enters the pool.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from csps.actors.comm.layout import GangLayout, name_digest
from csps.actors.comm.process_group import IDLE, Pending, close_gloo, gloo_group, with_peer
from csps.actors.kv_transfer.message import KvBody, KvHeader, Staging
from csps.actors.kv_transfer.reservation import TransferSlot
from csps.models.checkpoints.checkpoint import tensor_checksum
from csps.protocols.core.errors import TransferError
from csps.protocols.gang.messages import ConnectKv

_HEARTBEAT, _REQUEST, _END = 0x62656174, 0x61736B, 0x656E64  # "beat", "ask", "end"
_NOTHING, _BEGIN, _CANCELLED = range(3)
"""Answers about a transfer slot in a credit message."""
HEARTBEAT_S = 1.0
"""Seconds between two heartbeats; far less than `LIVENESS_TIMEOUT`."""
LIVENESS_TIMEOUT = timedelta(seconds=10)
"""Time without a message or a heartbeat after which a connection counts as broken; also the time
limit for a sender to take a credit message."""
MESSAGE_DEADLINE = timedelta(minutes=5)
"""Time limit for an announced message to arrive, or to be acknowledged. Messages are at most half
of the credit, which takes this long over a megabit a second."""


class KvTag(IntEnum):
    """Channels between two peers, each first in, first out."""

    HEADER = 1
    KEPT = 2
    KEYS = 3
    VALUES = 4
    CREDIT = 5


@dataclass(frozen=True)
class Credit:
    """A receiver's message to one sender: what it may send."""

    credit_bytes: int
    """Bytes that may be under way."""
    received: int
    """Bytes acknowledged since the connection exists."""
    transfer_slot: TransferSlot | None = None
    """Transfer slot that `wanted` answers; None if the message answers no request."""
    wanted: bool = True
    """Answer: the sender may begin; otherwise the sequence was cancelled."""


@dataclass(frozen=True)
class TransferRequested:
    """A sender requests a transfer slot."""

    transfer_slot: TransferSlot


@dataclass(frozen=True)
class TransferEnded:
    """A sender returns a transfer slot."""

    transfer_slot: TransferSlot


class KvConnection:
    """One rank's end of the connection. For each peer one thread may send and one may receive; they
    share nothing."""

    def __init__(
        self, store: Store, message: ConnectKv, *, rank: int, is_decode: bool, host: str
    ) -> None:
        self.epoch = name_digest(message.epoch)
        self.prefill = GangLayout(world_size=message.prefill_ranks, tp=message.prefill_tp)
        self.decode = GangLayout(world_size=message.decode_ranks, tp=message.decode_tp)
        self.rank = self.prefill.world_size + rank if is_decode else rank
        """Number of this end among the peers."""
        self._size = self.prefill.world_size + self.decode.world_size
        self._closed = threading.Event()
        self._closing = threading.Lock()
        scoped = PrefixStore(f"kv/{message.epoch}", store)
        self._group = gloo_group(scoped, self.rank, self._size, host)
        self._counting = threading.Lock()
        self.bytes_sent = 0
        """Bytes of messages with KV sent to all peers since the connection exists."""

    @property
    def prefill_peers(self) -> range:
        """Return the prefill ranks, as peers."""
        return range(self.prefill.world_size)

    @property
    def decode_peers(self) -> range:
        """Return the decode ranks, as peers."""
        return range(self.prefill.world_size, self._size)

    # --- the sender's end ------------------------------------------------------------------

    def send(self, peer: int, header: KvHeader, body: KvBody) -> Pending:
        """Start to send a message; the body must not change before the returned operation is waited
        for."""
        whole = ((KvTag.KEPT, body.kept_ht), (KvTag.KEYS, body.k), (KvTag.VALUES, body.v))
        parts = [(tag, part) for tag, part in whole if part is not None and part.numel()]
        message = [(KvTag.HEADER, _sealed(header.pack())), *parts]
        with self._counting:
            self.bytes_sent += sum(part.nbytes for _, part in message)
        return Pending.all([self._send(part, peer, tag) for tag, part in message])

    def send_heartbeat(self, peer: int) -> None:
        """Send a heartbeat to a receiver and wait until it is received, and so all earlier messages
        are."""
        self._send_words(peer, _HEARTBEAT).wait(IDLE)

    def ask(self, peer: int, transfer_slot: TransferSlot) -> Pending:
        """Start to request a transfer slot."""
        return self._send_words(peer, _REQUEST, *transfer_slot)

    def end(self, peer: int, transfer_slot: TransferSlot) -> Pending:
        """Start to return a transfer slot."""
        return self._send_words(peer, _END, *transfer_slot)

    def _send_words(self, peer: int, *values: int) -> Pending:
        words = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
        words[: len(values)] = torch.tensor(values)
        return self._send(_sealed(words), peer, KvTag.HEADER)

    def next_credit(self, peer: int, deadline: timedelta = IDLE) -> Credit:
        """Wait for a receiver's next credit message."""
        words = self._recv_words(5, peer, KvTag.CREDIT, deadline)
        credit_bytes, received, sequence_id, number, answer = words.tolist()
        if answer == _NOTHING:
            return Credit(credit_bytes, received)
        return Credit(credit_bytes, received, TransferSlot(sequence_id, number), answer == _BEGIN)

    # --- the receiver's end ----------------------------------------------------------------

    def send_credit(self, peer: int, credit: Credit) -> Pending:
        """Start to send a credit message."""
        answer = _BEGIN if credit.wanted else _CANCELLED
        transfer_slot = (
            (0, 0, _NOTHING) if credit.transfer_slot is None else (*credit.transfer_slot, answer)
        )
        words = torch.tensor(
            (credit.credit_bytes, credit.received, *transfer_slot), dtype=torch.int64
        )
        return self._send(_sealed(words), peer, KvTag.CREDIT)

    def next_message(self, peer: int) -> KvHeader | TransferRequested | TransferEnded | None:
        """Wait for a sender's next message and return it, None for a heartbeat; raise PeerLost if
        the sender falls silent."""
        words = self._recv_words(KvHeader.WORDS, peer, KvTag.HEADER, LIVENESS_TIMEOUT)
        kind, sequence_id, number = words[:3].tolist()
        if kind == _HEARTBEAT:
            return None
        if kind in (_REQUEST, _END):
            return (TransferRequested if kind == _REQUEST else TransferEnded)(
                TransferSlot(sequence_id, number)
            )
        return KvHeader.unpack(words)

    def receive(self, peer: int, header: KvHeader, width: int, staging: Staging) -> KvBody:
        """Receive what a header has announced, with heads of so many numbers. The caller checks
        that the mask marks as many tokens as the header says."""
        heads, tokens = len(header.heads), header.span.length
        if header.kept is None:
            shape: tuple[int, ...] = (tokens, heads, width)
            kept_ht = None
        else:
            shape = (header.kept, width)
            kept_ht = staging.buffer((heads, tokens), torch.bool)
        k, v = (staging.buffer(shape, header.dtype) for _ in range(2))
        parts = ((KvTag.KEPT, kept_ht), (KvTag.KEYS, k), (KvTag.VALUES, v))
        arriving = [
            self._recv(part, peer, tag) for tag, part in parts if part is not None and part.numel()
        ]
        Pending.all(arriving).wait(MESSAGE_DEADLINE)
        return KvBody(k, v, kept_ht)

    # --- both ------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Return whether this side has closed the connection."""
        return self._closed.is_set()

    def close(self) -> None:
        """Leave the group: all waits fail, here and at the peers. Idempotent."""
        with self._closing:
            if not self._closed.is_set():
                self._closed.set()
                close_gloo(self._group, self.rank, self._size)

    def _recv_words(self, count: int, peer: int, tag: KvTag, deadline: timedelta) -> Tensor:
        """Wait for so many words of a peer; raise TransferError if they were changed on their
        way."""
        words = torch.zeros(count + 1, dtype=torch.int64)
        self._recv(words, peer, tag).wait(deadline)
        if tensor_checksum(words[:-1]) != int(words[-1]):
            raise TransferError(f"words were changed on their way: {words.tolist()}")
        return words[:-1]

    @with_peer()
    def _send(self, tensor: Tensor, peer: int, tag: KvTag) -> Pending:
        return Pending([self._group.send([tensor], peer, tag)], [tensor], self._closed)

    @with_peer()
    def _recv(self, tensor: Tensor, peer: int, tag: KvTag) -> Pending:
        return Pending([self._group.recv([tensor], peer, tag)], [tensor], self._closed)


def _sealed(words: Tensor) -> Tensor:
    """Return words with their checksum behind them.

    What is received next depends on them. Of a message that is longer than what a peer waits for,
    gloo ends the peer's process.
    """
    return torch.cat((words, torch.tensor([tensor_checksum(words)])))
