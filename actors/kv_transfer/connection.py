"""The connection that KV crosses from a prefill to a decode gang: a gloo group of both.

Prefill rank p is peer p of the group, decode rank d is peer P + d. Each message of KV is a header,
then keys, then values. Where only kept tokens are sent, a mask before the keys says which: a byte
for each token and head, which saves the vectors of those dropped. Row numbers would be longer as
soon as a quarter is kept.

The receiver grants each sender a window of bytes, and says of each message that it has landed; the
sender has no more than a window under way. Before what it sends of a request, and after it, a
sender shakes hands: the receiver says when its turn has come (`turns`). A sender that has nothing
under way beats, because nothing else would show that the connection still carries something:
between two long prompts no KV is sent, and a connection that a router or a firewall has forgotten
fails only who uses it next.

Whatever was announced by a header is received, also for a request that was cancelled meanwhile, so
that neither side is left with half a message; whatever a header says is checked against the
receiver's reservation before it enters the pool.
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
from csps.protocols.gang.messages import ConnectKv

_HEARTBEAT, _ASKED, _ENDED = 0x62656174, 0x61736B, 0x656E64  # "beat", "ask", "end"
_NOTHING, _BEGIN, _CANCELLED = range(3)
"""What a grant says of a turn."""
HEARTBEAT_S = 1.0
"""Between two beats; `LIVENESS_TIMEOUT` is the longest that a receiver goes without one."""
LIVENESS_TIMEOUT = timedelta(seconds=10)
"""Without a word or a beat, after which a connection counts as broken; also for a sender to take a
grant."""
MESSAGE_DEADLINE = timedelta(minutes=5)
"""For a message to arrive that was announced, or to land; no longer than half a window, it takes so
long over a megabit a second."""


class KvTag(IntEnum):
    """Streams between two peers, each first in, first out."""

    HEADER = 1
    KEPT = 2
    KEYS = 3
    VALUES = 4
    GRANT = 5


@dataclass(frozen=True)
class Credit:
    """What a receiver lets one sender do."""

    credit_bytes: int
    """Bytes that may be under way."""
    received: int
    """Bytes that are not under way any more, since the connection exists."""
    transfer_slot: TransferSlot | None = None
    """Of which it is said whether it may begin; None: of none."""
    wanted: bool = True
    """It may; otherwise nobody expects the request's KV."""


@dataclass(frozen=True)
class TransferRequested:
    """A sender wants to send."""

    transfer_slot: TransferSlot


@dataclass(frozen=True)
class TransferEnded:
    """Nothing more of a turn comes."""

    transfer_slot: TransferSlot


class KvConnection:
    """One rank's end. One thread a peer may send and one may receive; they share nothing."""

    def __init__(
        self, store: Store, message: ConnectKv, *, rank: int, is_decode: bool, host: str
    ) -> None:
        self.epoch = name_digest(message.epoch)
        self.prefill = GangLayout(world_size=message.prefill_ranks, tp=message.prefill_tp)
        self.decode = GangLayout(world_size=message.decode_ranks, tp=message.decode_tp)
        self.rank = self.prefill.world_size + rank if is_decode else rank
        """Of this end among the peers."""
        self._size = self.prefill.world_size + self.decode.world_size
        self._closed = threading.Event()
        self._closing = threading.Lock()
        scoped = PrefixStore(f"kv/{message.epoch}", store)
        self._group = gloo_group(scoped, self.rank, self._size, host)
        self._counting = threading.Lock()
        self.bytes_sent = 0
        """Of messages with KV, to all peers, since the connection exists."""

    @property
    def prefill_peers(self) -> range:
        """Prefill ranks, as peers."""
        return range(self.prefill.world_size)

    @property
    def decode_peers(self) -> range:
        """Decode ranks, as peers."""
        return range(self.prefill.world_size, self._size)

    # --- the sender's end ------------------------------------------------------------------

    def send(self, peer: int, header: KvHeader, body: KvBody) -> Pending:
        """Start sending; the body must not change before the returned operation is waited for."""
        whole = ((KvTag.KEPT, body.kept_ht), (KvTag.KEYS, body.k), (KvTag.VALUES, body.v))
        parts = [(tag, part) for tag, part in whole if part is not None and part.numel()]
        message = [(KvTag.HEADER, header.pack()), *parts]
        with self._counting:
            self.bytes_sent += sum(part.nbytes for _, part in message)
        return Pending.all([self._send(part, peer, tag) for tag, part in message])

    def send_heartbeat(self, peer: int) -> None:
        """Tell a receiver that nothing else is on its way; waits until it listens, and so has heard
        all that was said before."""
        self._send_words(peer, _HEARTBEAT).wait(IDLE)

    def ask(self, peer: int, transfer_slot: TransferSlot) -> Pending:
        """Start to shake hands."""
        return self._send_words(peer, _ASKED, *transfer_slot)

    def end(self, peer: int, transfer_slot: TransferSlot) -> Pending:
        """Start to say that nothing more of a turn comes."""
        return self._send_words(peer, _ENDED, *transfer_slot)

    def _send_words(self, peer: int, *said: int) -> Pending:
        words = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
        words[: len(said)] = torch.tensor(said)
        return self._send(words, peer, KvTag.HEADER)

    def next_credit(self, peer: int, deadline: timedelta = IDLE) -> Credit:
        """Wait for a receiver's next word."""
        words = torch.zeros(5, dtype=torch.int64)
        self._recv(words, peer, KvTag.GRANT).wait(deadline)
        credit_bytes, received, sequence_id, number, said = words.tolist()
        if said == _NOTHING:
            return Credit(credit_bytes, received)
        return Credit(credit_bytes, received, TransferSlot(sequence_id, number), said == _BEGIN)

    # --- the receiver's end ----------------------------------------------------------------

    def send_credit(self, peer: int, credit: Credit) -> Pending:
        """Start telling a sender."""
        said = _BEGIN if credit.wanted else _CANCELLED
        transfer_slot = (
            (0, 0, _NOTHING) if credit.transfer_slot is None else (*credit.transfer_slot, said)
        )
        words = torch.tensor(
            (credit.credit_bytes, credit.received, *transfer_slot), dtype=torch.int64
        )
        return self._send(words, peer, KvTag.GRANT)

    def next_message(self, peer: int) -> KvHeader | TransferRequested | TransferEnded | None:
        """Wait for the next word of a sender, None for a beat; PeerLost if it falls silent."""
        words = torch.zeros(KvHeader.WORDS, dtype=torch.int64)
        self._recv(words, peer, KvTag.HEADER).wait(LIVENESS_TIMEOUT)
        said, sequence_id, number = words[:3].tolist()
        if said == _HEARTBEAT:
            return None
        if said in (_ASKED, _ENDED):
            return (TransferRequested if said == _ASKED else TransferEnded)(
                TransferSlot(sequence_id, number)
            )
        return KvHeader.unpack(words)

    def receive(self, peer: int, header: KvHeader, head_dim: int, staging: Staging) -> KvBody:
        """What a header has announced; whether a mask marks as many as it says is for the caller
        to check."""
        heads, tokens = len(header.heads), header.span.length
        if header.kept is None:
            shape: tuple[int, ...] = (tokens, heads, head_dim)
            kept_ht = None
        else:
            shape = (header.kept, head_dim)
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
        """By this side."""
        return self._closed.is_set()

    def close(self) -> None:
        """Leave the group: whoever waits fails, here and at the peers. Idempotent."""
        with self._closing:
            if not self._closed.is_set():
                self._closed.set()
                close_gloo(self._group, self.rank, self._size)

    @with_peer()
    def _send(self, tensor: Tensor, peer: int, tag: KvTag) -> Pending:
        return Pending([self._group.send([tensor], peer, tag)], [tensor], self._closed)

    @with_peer()
    def _recv(self, tensor: Tensor, peer: int, tag: KvTag) -> Pending:
        return Pending([self._group.recv([tensor], peer, tag)], [tensor], self._closed)
