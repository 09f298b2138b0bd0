"""Frames as a broken or hostile peer sends them, and what becomes of them at both ends of all
connections between processes.

A frame is mangled in its bytes, or in the values that it carries. Whatever comes, a connection
answers, or ends with an error of the tree; the process goes on and has as much memory as before.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import torch

from csps.actors.comm.layout import name_digest
from csps.actors.kv_transfer.message import KvHeader
from csps.actors.kv_transfer.reservation import Reservation
from csps.protocols.core.errors import CspsError, ProtocolError, TransferError
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang import messages as gang
from csps.protocols.gang import step_messages as steps
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import decode, encode, pack, unpack
from csps.protocols.rpc.server import Peer, RpcServer
from csps.protocols.rpc.wire import (
    NOTIFICATION,
    REQUEST,
    RESPONSE,
    SCHEMA_VERSION,
    ClientHandshake,
    RpcLimits,
    ServerHandshake,
)
from csps.protocols.sequencer import log_entries as log
from csps.protocols.sequencer.log_connection import LogSocket
from csps.protocols.sequencer.sequencer import Sequencer

SECRET = b"only for tests"
END_S = 20.0
"""Time for a connection to end. One that takes longer hangs."""
LONGEST_S = 1.0
"""Processor time that one frame may take."""
SHOWN = 20
"""Findings that a report shows."""

NUMBERS = [0, 1, -1, 2, 127, 128, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]
TEXTS = ["", "\x00", "hello", "$cancel", "$closing", "$ping", "9" * 5000, "\ufffd" * 40, "prefill"]


class Mangler:
    """Changes frames at random; the same seed makes the same changes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def frame(self, value: Any, encode: Callable[[Any], bytes]) -> bytes:
        """Return the frame of a value with wrong values in it, wrong bytes, or both."""
        if self.random.random() < 0.6:
            value = self.value(value)
        frame = encode(value)
        return self.data(frame) if self.random.random() < 0.6 else frame

    def data(self, frame: bytes) -> bytes:
        """Return bytes that were overwritten, cut out, doubled, or put in."""
        changed = bytearray(frame)
        for _ in range(self.random.choice([1, 1, 2, 4])):
            at = self.random.randint(0, len(changed))
            match self.random.randrange(7):
                case 6:
                    changed[at:at] = b"\x91" * self.random.choice([100, 1100, 60_000])
                case 0 | 1 if at < len(changed):
                    changed[at] ^= 1 << self.random.randrange(8)
                case 2 if at < len(changed):
                    changed[at] = self.random.choice([0x91, 0xC1, 0xC6, 0xC9, 0xDD, 0xDF, 0xFF])
                case 3:
                    del changed[at : at + self.random.randint(1, 16)]
                case 4:
                    changed[at:at] = self.random.randbytes(self.random.randint(1, 16))
                case 5:
                    changed += changed[at : at + 32] * self.random.randint(1, 8)
        return bytes(changed)

    def value(self, value: Any) -> Any:
        """Return a value of which a part is something else, missing, doubled, or nested."""
        if isinstance(value, dict) and value and self.random.random() < 0.8:
            key = self.random.choice(list(value))
            changed = {**value, key: self.value(value[key])}
            match self.random.randrange(8):
                case 0:
                    del changed[key]
                case 1:
                    changed[self.random.choice(TEXTS)] = self.scalar()
                case 2:
                    changed[self.random.choice(NUMBERS)] = self.scalar()
            return changed
        if isinstance(value, list | tuple) and value and self.random.random() < 0.8:
            items, at = list(value), self.random.randrange(len(value))
            match self.random.randrange(6):
                case 0:
                    del items[at]
                case 1:
                    items.insert(at, self.scalar())
                case 2:
                    items += [items[at]] * self.random.choice([1, 3, 300])
                case _:
                    items[at] = self.value(items[at])
            return items
        match self.random.randrange(8):
            case 0:
                return [value]
            case 1:
                return self.nested()
            case 2 if isinstance(value, int):
                return value + self.random.choice([-1, 1]) if abs(value) < 2**62 else 0
            case 3 if isinstance(value, str | bytes):
                return value * self.random.choice([0, 2, 50])
            case _:
                return self.scalar()

    def scalar(self) -> Any:
        """Return any value that has no parts."""
        kind = self.random.randrange(7)
        options = [None, True, self.random.choice(NUMBERS), self.random.random() * 1e300]
        options += [float("nan"), self.random.choice(TEXTS)]
        return self.random.randbytes(self.random.choice([0, 4, 32])) if kind == 6 else options[kind]

    def nested(self) -> Any:
        """Return lists or maps within one another."""
        value: Any = self.scalar()
        for _ in range(self.random.choice([1, 3, 60, 400])):
            value = [value] if self.random.random() < 0.5 else {"a": value}
        return value


@dataclass
class Findings:
    """What became of mangled frames."""

    frames: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Frames by what came of them."""
    wrong: list[str] = field(default_factory=list)
    """Frames that did what no frame may do, and what."""
    slowest_s: float = 0.0
    """Most processor time that one of them took."""

    def note(self, outcome: str) -> None:
        """Count a frame that ended as it may."""
        self.frames += 1
        self.outcomes[outcome] += 1

    def finds(self, what: str, frame: object) -> None:
        """Count a frame that did what it may not."""
        self.frames += 1
        self.outcomes["wrong"] += 1
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{what}: {frame!r:.600}")

    def judge(self, work: Callable[[], object], frame: object) -> None:
        """Run what reads a frame: it may succeed, or raise an error of the tree."""
        before = time.thread_time()
        try:
            work()
        except (ProtocolError, TransferError) as error:
            self.note(type(error).__name__)
        except CspsError as error:
            self.note(f"other {type(error).__name__}")
        except Exception as error:
            self.finds(f"{type(error).__name__}: {error}", frame)
        else:
            self.note("read")
        self.slowest_s = max(self.slowest_s, time.thread_time() - before)
        if self.slowest_s > LONGEST_S:
            self.finds(f"took {self.slowest_s:.1f} s of a processor", frame)
            self.slowest_s = 0.0


def memory_bytes() -> int:
    """Return the memory of this process that is resident, garbage apart."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- messages between router and ranks ---------------------------------------------------------

_SLICES = (KvSlice(0, 0, 8), KvSlice(1, 8, 16), KvSlice(0, 16, 17, 1, 5))
_PLACED = steps.SequencePlacement(
    slices=(KvSlice(0, 0, 8), KvSlice(1, 8, 16)), master=0, answer=(KvSlice(1, 16, 20),)
)
_RUN = gang.SavedRun(start=0, hashes=(b"h" * 16,), slices=(KvSlice(0, 0, 8), KvSlice(1, 8, 16)))
MESSAGES: dict[str, Any] = {
    "attach": gang.Attach(router_id="r", generation=7),
    "describe": gang.RankDescription(
        gang_id="g", role="elastic", rank=0, world_size=2, tp=1, location="0-0-0", kv_slots=4096,
        kv_bytes_per_token=256, layers=2, model="m", model_fingerprint="f" * 64,
        max_positions=65536, store_host="127.0.0.1", store_port=1, pid=1,
    ),
    "connect_kv": gang.ConnectKv(
        epoch="1.1", store_host="127.0.0.1", store_port=1, prefill_ranks=2, decode_ranks=2,
        prefill_tp=1, decode_tp=1,
    ),
    "cancel": gang.CancelSequence(sequence_id=7),
    "retain": gang.RetainKv(sequence_id=7, start=0, stop=16),
    "evict": gang.EvictKv(sequence_id=7, start=3, stop=9),
    "save": gang.SaveKv(sequence_id=7, run=_RUN, tenant=2, owner="alice", permille=500),
    "restore": gang.RestoreKv(
        sequence_id=9, parts=(gang.SavedPart(_RUN.name, 0, 16),), slices=_RUN.slices
    ),
    "saved": gang.KvSaved(rank=0, runs=(_RUN, _RUN), bytes_per_s=10, written=True),
    "restored": gang.KvRestored(
        sequence_id=9, rank=0, tokens=8, seconds=0.1
    ),
    "sampler": gang.FirstTokenSampler(sequence_id=7, inputs=b"x" * 40),
    "sampling": gang.SamplerInputs(
        sampling=gang.Sampling(logit_bias={5: 1.5}, stop_token_ids=(3, 4), logprobs=2),
        prompt_tokens=b"\0" * 16,
    ),
    "reserve": gang.ReserveKv(
        sequence_id=7, epoch="1.1", slices=(KvSlice(0, 0, 8, 1, 5), KvSlice(1, 8, 16)), master=0,
        prompt_tokens=16, output_tokens=4, answer=(KvSlice(1, 16, 20),), prompt=b"\0" * 64,
        trace={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    ),
    "join": gang.JoinBatch(sequence_id=7, first_token=5, budget=64, instances=(0, 1)),
    "prefill": steps.PrefillStep(
        step_id=3, group=(0, 1), bounds=(0, 8, 16), tokens=b"\0" * 32, samplers={7: b"x" * 20},
        chunks=(
            steps.PrefillChunk(
                sequence_id=7, start=16, length=16, history=_SLICES[:2], destinations=_SLICES[:2],
                placement=(KvSlice(0, 0, 16), KvSlice(1, 16, 32, 2), KvSlice(0, 17, 32, 2)),
                rows=(KvSlice(0, 16, 24), KvSlice(1, 24, 32)),
            ),
        ),
    ),
    "move": steps.MoveSequence(
        step_id=4, sequence_id=7, prompt_tokens=16, stop=20, before=_PLACED,
        after=steps.SequencePlacement(slices=(KvSlice(1, 0, 16),), master=1),
    ),
    "tokens": gang.SampledTokens(
        sequence_ids=(7, 8), indices=(0, 3), tokens=(5, 6), finish_reasons={0: "stop"},
        logprobs={1: gang.Logprobs(logprob=-1.0, top=(gang.TokenLogprob(token=5, logprob=-2.0),))},
    ),
    "prefill_progress": gang.PrefillProgress(rank=0, step_id=3),
    "prefill_done": gang.PrefillDone(
        step_id=3, rank=0, cancelled=False, queue_s=0.1, compute_s=0.2, communication_s=0.3,
        transfer_s=0.4, yielded_s=0.5, bytes_sent=(1, 2),
    ),
    "received": gang.RankKvReceived(sequence_id=7, rank=0, tokens=16, seconds=0.1),
    "link_broken": gang.LinkBroken(epoch="1.1", rank=0, reason="gone"),
    "freed": gang.SlotsFreed(sequence_id=7, rank=0),
    "retained": gang.KvRetained(sequence_id=7, rank=0, tokens=3),
    "failed": gang.RequestFailed(sequence_id=7, rank=0, code="TransferError", message="bad"),
    "stats": gang.RankStats(
        rank=0, kv_slots=9, kv_used=1, requests=1, running=1, waiting=0, iterations=5
    ),
    "moved": steps.SequenceMoved(sequence_id=7, rank=0, tokens=5, sent_bytes=10, seconds=0.1),
}  # fmt: skip
"""An example of each message, by its method."""
KINDS = {name: type(message) for name, message in MESSAGES.items()}
PACKED = {name: pack(message) for name, message in MESSAGES.items()}


def mangled_messages(seed: int, count: int) -> Findings:
    """Unpack messages with mangled contents."""
    mangler, found = Mangler(seed), Findings()
    sampler = encode(MESSAGES["sampling"])  # travels within other messages, as bytes
    for _ in range(count):
        name = mangler.random.choice(list(PACKED))
        if name == "sampling":
            data = mangler.data(sampler)
            found.judge(lambda data=data: decode(gang.SamplerInputs, data), data)  # type: ignore[misc]
            continue
        value = mangler.value(PACKED[name])
        found.judge(lambda name=name, value=value: unpack(KINDS[name], value), (name, value))  # type: ignore[misc]
    return found


class RpcEnds:
    """Connections of which one end is the product's and the other one is not."""

    def __init__(self, seed: int) -> None:
        self._mangler = Mangler(seed)
        self._random = self._mangler.random
        self.found = Findings()
        self._limits = RpcLimits(max_frame_bytes=1 << 20, handshake_s=2 * END_S)
        self.server = RpcServer(
            {"echo": _echo, "slow": _slow, **{name: self._handler(name) for name in KINDS}},
            secret=SECRET,
            limits=self._limits,
        )

    @staticmethod
    def _handler(name: str) -> Callable[[Any, Peer], Any]:
        def handle(payload: Any, peer: Peer) -> Any:
            return pack(unpack(KINDS[name], payload))

        return handle

    async def stranger(self) -> None:
        """Send mangled frames of a handshake to the server."""
        hello = ClientHandshake(SECRET, SCHEMA_VERSION, "fuzz").hello()
        call = [REQUEST, 1, "hello", [hello]]
        sent = self._mangler.frame(call, msgpack.packb)
        if self._random.random() < 0.5:
            second = [REQUEST, 2, "authenticate", [{"proof": bytes(32)}]]
            sent = msgpack.packb(call) + self._mangler.frame(second, msgpack.packb)
        reader, writer = await self._connected()
        await self._ended(reader, writer, sent)

    async def peer(self) -> None:
        """Send a mangled call or notification to the server, after a sound handshake."""
        reader, writer = await self._connected()
        unpacker = msgpack.Unpacker()
        handshake = ClientHandshake(SECRET, SCHEMA_VERSION, "fuzz")
        writer.write(msgpack.packb([REQUEST, 1, "hello", [handshake.hello()]]))
        _, _, _, reply = await _message(reader, unpacker)
        proof = handshake.authenticate(reply)
        writer.write(msgpack.packb([REQUEST, 2, "authenticate", [proof]]))
        _, _, error, _ = await _message(reader, unpacker)
        assert error is None
        name = self._random.choice([*PACKED, "echo", "slow", "$cancel", "$ping", "$closing"])
        params = [PACKED.get(name, 5), {"deadline_ms": 5, "traceparent": "00-1-1-1"}]
        sound = [REQUEST, 3, "slow", [None]]
        call = self._random.choice([[REQUEST, 3, name, params], [NOTIFICATION, name, params[:1]]])
        frame = self._mangler.frame(call, msgpack.packb)
        await self._ended(reader, writer, msgpack.packb(sound) + frame)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Peer(self.server), ours)
        return await asyncio.open_connection(sock=theirs)

    async def _ended(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
    ) -> None:
        """Send bytes and nothing more, and read until the server has ended the connection."""
        before = time.thread_time()
        answers = msgpack.Unpacker(strict_map_key=False)
        try:
            async with asyncio.timeout(END_S):
                with suppress(ConnectionError):
                    writer.write(sent)
                    writer.write_eof()
                    while data := await reader.read(1 << 16):
                        answers.feed(data)
            self.found.note("refused" if _refusals(answers) else "ended")
        except TimeoutError:
            self.found.finds("the connection did not end", sent)
        finally:
            writer.close()
        self.found.slowest_s = max(self.found.slowest_s, time.thread_time() - before)

    async def router(self) -> None:
        """Send mangled answers and notifications to a client."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        heard: list[Any] = []
        client = RpcClient(
            self._limits, lambda method, payload: heard.append(_read(method, payload))
        )
        await loop.create_connection(lambda: client, sock=ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        unpacker, handshake = msgpack.Unpacker(), ServerHandshake(SECRET, SCHEMA_VERSION)
        greeting = asyncio.ensure_future(
            client._authenticate(ClientHandshake(SECRET, SCHEMA_VERSION, "fuzz"), END_S)
        )
        early = self._random.random() < 0.2
        for name in ("hello",) if early else ("hello", "authenticate"):
            _, msgid, method, (payload, *_) = await _message(reader, unpacker)
            assert method == name
            answer = [RESPONSE, msgid, None, handshake.answer(method, payload)]
            mangled = self._mangler.frame(answer, msgpack.packb) if early else msgpack.packb(answer)
            writer.write(mangled)
        call = None
        if not early:
            await greeting
            call = asyncio.ensure_future(client.call("echo", 1, deadline_s=END_S))
            _, msgid, *_ = await _message(reader, unpacker)
            name = self._random.choice([*PACKED, "$closing", "$pong"])
            error = {
                "code": "DeadlineExceeded",
                "message": "m",
                "data": {"name": "n", "seconds": 1},
            }
            frames = [
                [RESPONSE, msgid, error, None],
                [RESPONSE, msgid, None, PACKED["describe"]],
                [NOTIFICATION, name, [PACKED.get(name, error)]],
                [REQUEST, 5, name, []],
            ]
            writer.write(self._mangler.frame(self._random.choice(frames), msgpack.packb))
        with suppress(ConnectionError):
            writer.write_eof()
        await self._client_ended(client, [task for task in (greeting, call) if task], heard)
        writer.close()

    async def _client_ended(
        self, client: RpcClient, tasks: list[asyncio.Future[Any]], heard: list[Any]
    ) -> None:
        try:
            async with asyncio.timeout(END_S):
                await asyncio.shield(client.closed)
                for task in tasks:
                    try:
                        await task
                    except CspsError:
                        pass
                    except Exception as error:
                        self.found.finds(f"a call failed with {error!r}", heard)
            self.found.note("ended")
        except TimeoutError:
            self.found.finds("the client did not end", heard)

    async def check_serving(self) -> None:
        """Check that the server still answers a sound client, and that nothing is left of the
        others."""
        async with asyncio.timeout(END_S):
            while self.server.peers:  # noqa: ASYNC110 (a server has no event for it)
                await asyncio.sleep(0)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Peer(self.server), ours)
        client = RpcClient(self._limits, None)
        await loop.create_connection(lambda: client, sock=theirs)
        await client._authenticate(ClientHandshake(SECRET, SCHEMA_VERSION, "sound"), END_S)
        assert await client.call("echo", "sound", deadline_s=END_S) == "sound"
        await client.close()


def _echo(payload: Any, peer: Peer) -> Any:
    return payload


async def _slow(payload: Any, peer: Peer) -> None:
    await asyncio.sleep(END_S / 2)


def _read(method: str, payload: Any) -> object:
    return unpack(KINDS[method], payload) if method in KINDS else payload


async def _message(reader: asyncio.StreamReader, unpacker: msgpack.Unpacker) -> Any:
    async with asyncio.timeout(END_S):
        while True:
            for message in unpacker:
                return message
            unpacker.feed(await reader.read(1 << 16))


def _refusals(answers: msgpack.Unpacker) -> int:
    return sum(message[0] == NOTIFICATION or message[2] is not None for message in answers)


async def mangled_rpc(seed: int, count: int) -> Findings:
    """Send mangled frames over RPC connections, in both directions."""
    ends, unhandled = RpcEnds(seed), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    for number in range(count):
        await (ends.stranger, ends.peer, ends.peer, ends.router)[number % 4]()
        if number % 1000 == 999 or number == count - 1:
            await ends.check_serving()
            for context in unhandled:
                ends.found.finds("nobody handled", context)
            unhandled.clear()
    return ends.found


# --- a gang's log ------------------------------------------------------------------------------

ENTRIES: list[Any] = [
    log.LogEntry(1, log.Change(0, 1, ((7, 5), (8, None)), (9,), 64, iterated=(((0,), 3),))),
    log.LogEntry(2, log.Iterate(0, 1, 8, group=(0, 1))),
    log.LogEntry(3, log.RunQuantum(3, 5, cancelled=(7,))),
    log.LogEntry(4, log.Abort(3)),
    log.LogEntry(5, log.EndOwner(9)),
    log.LogEntry(6, log.Free(7, (Span(0, 8), Span(9, 17, 2)))),
    log.LogEntry(7, log.PlaceSequence(7, (0, 1), 1)),
    log.LogEntry(8, log.Shutdown()),
]
REPORTS: list[Any] = [
    log.Prepared(1, 3),
    log.RanQuantum(1, 3, 3, 5, 1000),
    log.Iterated(1, 2, 0, 1000, finished=(7,)),
    log.Leaving(),
]


def mangled_log(seed: int, count: int) -> Findings:
    """Send mangled frames over a gang's log, in both directions; the sequencer handles reports."""
    mangler, found = Mangler(seed), Findings()
    while found.frames < count:
        with _log_pair() as (raw, end):
            frames = list(_log_frames(mangler, min(200, count - found.frames)))
            for reports, frame in frames:
                sent = len(frame).to_bytes(4, "big") + frame
                broken = mangler.random.random() < 0.02
                raw.sendall(mangler.data(sent) if broken else sent)
                if broken:  # from here on lengths may be wrong, so that much may be awaited
                    raw.shutdown(socket.SHUT_WR)
                    _read_rest(found, end)
                    break
                found.judge(lambda reports=reports: _handled(end, reports), frame)  # type: ignore[misc]
    return found


def _log_frames(mangler: Mangler, count: int) -> Iterator[tuple[bool, bytes]]:
    for _ in range(count):
        reports = mangler.random.random() < 0.5
        messages = mangler.random.sample(REPORTS if reports else ENTRIES, k=2)
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(messages))
        yield reports, mangler.frame(plain, msgpack.packb)


def _handled(end: LogSocket, reports: bool) -> None:
    frame = end.receive()
    if not reports:
        log.unpack_entries(frame)
        return
    sequencer = Sequencer(2)
    sequencer.open_batch(0, (0, 1), masters=(0, 1))
    for report in log.unpack_reports(frame):
        sequencer.report(report)
        sequencer.take()


def _read_rest(found: Findings, end: LogSocket) -> None:
    def read() -> None:
        while True:
            log.unpack_entries(end.receive())

    found.judge(read, "the rest of a stream")


class _log_pair:
    """A plain socket that is connected to the product's end."""

    def __enter__(self) -> tuple[socket.socket, LogSocket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._raw = socket.create_connection(server.getsockname())
            self._end = LogSocket(server.accept()[0])
        self._end.deadline(END_S)
        return self._raw, self._end

    def __exit__(self, *failure: object) -> None:
        self._raw.close()
        self._end.close()


# --- KV between gangs --------------------------------------------------------------------------

SPANS = (Span(0, 40), Span(41, 99, 2))
HEADS, LAYERS, HEAD_DIM, CREDIT = range(2, 4), 2, 4, 1 << 20


def _reservation() -> Reservation:
    slices = tuple(KvSlice.of(0, span) for span in SPANS)
    request = gang.ReserveKv(
        sequence_id=7, epoch="e", slices=slices, master=0, prompt_tokens=99, output_tokens=4
    )
    return Reservation(request=request, spans=SPANS, heads=HEADS, layers=LAYERS, owner=1)


def mangled_kv_headers(seed: int, count: int) -> Findings:
    """Read mangled headers of KV as a receiver does, up to the memory for what they announce."""
    mangler, found = Mangler(seed), Findings()
    header = KvHeader(
        epoch=name_digest("e"), sequence_id=7, layer=1, span=Span(41, 61, 2), heads=HEADS,
        dtype=torch.float32, kept=3, checksum=99,
    )  # fmt: skip
    sound = header.pack().tolist()
    for _ in range(count):
        words = list(sound)
        for _ in range(mangler.random.choice([1, 1, 2, 3])):
            at = mangler.random.randrange(len(words))
            words[at] = mangler.random.choice(
                [
                    words[at] ^ 1 << mangler.random.randrange(63),
                    words[at] + mangler.random.choice([-1, 1]),
                    mangler.random.choice([n for n in NUMBERS if n < 2**63]),
                ]
            )
        words = [min(max(word, -(2**63)), 2**63 - 1) for word in words]
        found.judge(lambda words=words: _accepted(words), words)  # type: ignore[misc]
    return found


def _accepted(words: Sequence[int]) -> None:
    header = KvHeader.unpack(torch.tensor(words))
    if header.charge(HEAD_DIM) > CREDIT:
        raise TransferError("more than the credit")
    tokens, heads = header.span.length, len(header.heads)
    torch.empty((tokens, heads, HEAD_DIM), dtype=header.dtype)
    if header.sequence_id == 7:
        _reservation().accept(header)
