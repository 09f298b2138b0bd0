"""A prefill gang and a decode gang as a test drives them: a stand-in for the router.

It talks to the ranks directly, so that a test names every group, bound and placement itself; the
dispatcher has tests of its own. Gangs come from `gang_threads` or `gang_processes`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from csps.actors.comm.layout import computed_by
from csps.protocols.core.placement import KvSlice, place, striped, zigzag
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import GangMembers, GangRole, RankAddress
from csps.protocols.gang.messages import (
    CancelSequence,
    ConnectKv,
    EvictKv,
    JoinBatch,
    KvRestored,
    KvRetained,
    KvSaved,
    LinkBroken,
    PrefillDone,
    PrefillProgress,
    RankKvReceived,
    RequestFailed,
    ReserveKv,
    RetainKv,
    Role,
    SampledToken,
    SampledTokens,
    SamplerInputs,
    Sampling,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import (
    MoveSequence,
    PrefillChunk,
    PrefillStep,
    SequenceMoved,
    SequencePlacement,
)
from csps.protocols.rpc import schema
from csps.protocols.rpc.schema import encode
from csps.protocols.rpc.tls import TlsFiles

LAYOUTS = ("zigzag", "striped")
"""Besides contiguous parts."""
SECRET = b"only for tests"
START_S = 90.0
"""Time limit for a rank to start and to answer its first calls."""
ANSWER_S = 60.0
"""Time limit for anything that a test waits for."""

Prompt = npt.NDArray[np.int32]
M = TypeVar("M")
T = TypeVar("T")
GREEDY = Sampling(temperature=0, max_tokens=6)

_MESSAGES: dict[str, type[Any]] = {
    "tokens": SampledTokens,
    "prefill_progress": PrefillProgress,
    "prefill_done": PrefillDone,
    "received": RankKvReceived,
    "freed": SlotsFreed,
    "retained": KvRetained,
    "saved": KvSaved,
    "restored": KvRestored,
    "moved": SequenceMoved,
    "failed": RequestFailed,
    "link_broken": LinkBroken,
}
_epochs, _gangs = itertools.count(), itertools.count()
_routers, _generations = itertools.count(), itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class GangPlan:
    """A gang to be started."""

    model_dir: str
    model_overrides: Mapping[str, Any] = field(default_factory=dict)
    role: Role
    instances: int
    tp: int = 1
    kv_slots: int = 4096
    window_slots: int = 0
    kv_in_flight_bytes: int = 2**20
    kv_receiving_backends: int = 16
    kv_checksum: float = 0.0
    quantum_ms: float = 50.0
    kv_dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_files_path: str | None = None
    """Folder of a prefill gang's files."""
    kv_files_bytes: int = 2**30
    gang_id: str = field(default_factory=lambda: f"gang{next(_gangs)}")
    tls: TlsFiles | None = None
    """For gangs whose ranks are all in this process."""

    def rank_fields(self, rank: int) -> dict[str, Any]:
        """Return arguments of the rank's `RankConfig`."""
        return {
            "model_dir": self.model_dir,
            "model_overrides": self.model_overrides,
            "role": self.role,
            "rank": rank,
            "world_size": self.instances * self.tp,
            "tp": self.tp,
            "gang_id": self.gang_id,
            "location": f"0-0-{rank}",
            "kv_slots": self.kv_slots,
            "window_slots": self.window_slots,
            "kv_in_flight_bytes": self.kv_in_flight_bytes,
            "kv_receiving_backends": self.kv_receiving_backends,
            "kv_checksum": self.kv_checksum,
            "quantum_ms": self.quantum_ms,
            "kv_dtype": self.kv_dtype,
            "weight_dtype": self.weight_dtype,
            "kv_files_path": self.kv_files_path,
            "kv_files_bytes": self.kv_files_bytes,
            **({} if self.tls is None else {"tls": self.tls}),
        }


class Cell:
    """A router's state: its gangs and their messages."""

    prefill: GangClient
    decode: GangClient

    def __init__(self) -> None:
        self.received: dict[type[Any], list[Any]] = defaultdict(list)
        self.order: list[Any] = []
        """All notifications in order of arrival, token by token."""
        self.failures_expected = False
        self.generation = next(_generations)
        self.steps: dict[int, PrefillStep] = {}
        self._slots: list[tuple[GangClient, KvRetained | SlotsFreed]] = []
        """Messages of ranks about the slots of ended sequences, with their gangs."""
        self._masters: dict[int, int] = {}
        self._moved: set[int] = set()
        """Rows that may have had several masters."""
        self._news = asyncio.Event()
        self._step_ids = itertools.count(1)

    # --- gangs -----------------------------------------------------------------------------

    async def attach(self, members: GangMembers, role: GangRole) -> GangClient:
        """Take a gang over, under a router name of its own."""
        gang = GangClient(role, members, self._receive, deadline_s=START_S)
        await gang.connect(secret=SECRET, router_id=f"router{next(_routers)}")
        await gang.attach(self.generation)
        return gang

    def _receive(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if method in ("freed", "retained"):
            self._slots.append((gang, schema.unpack(_MESSAGES[method], payload)))
        self.notified(method, payload)

    async def connect(self) -> None:
        """Link the two gangs."""
        self.epoch = f"epoch{next(_epochs)}"
        first = self.decode.descriptions[0]
        message = schema.pack(
            ConnectKv(
                epoch=self.epoch,
                store_host=first.store_host,
                store_port=first.store_port,
                prefill_ranks=self.prefill.world_size,
                decode_ranks=self.decode.world_size,
                prefill_tp=self.prefill.tp,
                decode_tp=self.decode.tp,
            )
        )
        await asyncio.gather(
            self.prefill.call_all("connect_kv", message),
            self.decode.call_all("connect_kv", message),
        )

    async def disconnect(self) -> None:
        """Leave both gangs, as a router that ends does."""
        await self.prefill.close()
        await self.decode.close()

    # --- what ranks say --------------------------------------------------------------------

    def notified(self, method: str, payload: Any) -> None:
        """Take a message of a rank; tests may replace this method."""
        message = schema.unpack(_MESSAGES[method], payload)
        for answer in message.each() if isinstance(message, SampledTokens) else [message]:
            self.received[type(answer)].append(answer)
            self.order.append(answer)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true. Unexpected failures end the wait."""
        async with asyncio.timeout(ANSWER_S):
            while not condition():
                assert self.failures_expected or not self.received[RequestFailed], self.order
                self._news.clear()
                await self._news.wait()

    def about(self, kind: type[M], **fields: Any) -> list[M]:
        """Return messages of a kind whose fields have these values."""
        return [
            message
            for message in self.received[kind]
            if all(getattr(message, name) == value for name, value in fields.items())
        ]

    async def until_received(self, count: int, kind: type[Any], **fields: Any) -> None:
        """Wait for so many messages of a kind whose fields have these values."""
        await self.until(lambda: len(self.about(kind, **fields)) >= count)
        assert len(self.about(kind, **fields)) == count

    def samples(self, sequence_id: int) -> list[SampledToken]:
        """Return a request's tokens so far, which must have come in order and without a gap; of
        several masters, whose connections have no common order, those without a gap before them.
        """
        generated_tokens = self.about(SampledToken, sequence_id=sequence_id)
        if sequence_id in self._moved:
            generated_tokens = sorted(generated_tokens, key=lambda token: token.index)
            generated_tokens = [
                token
                for at, token in enumerate(generated_tokens)
                if token.index == generated_tokens[0].index + at
            ]
        first = generated_tokens[0].index if generated_tokens else 0
        assert [generated_token.index for generated_token in generated_tokens] == list(
            range(first, first + len(generated_tokens))
        )
        return generated_tokens

    def tokens(self, sequence_id: int) -> list[int]:
        """Return ids of the request's tokens so far."""
        return [sample.token for sample in self.samples(sequence_id)]

    def finished(self, sequence_id: int) -> bool:
        """Return whether the last token has come."""
        return any(
            token.finish_reason for token in self.about(SampledToken, sequence_id=sequence_id)
        )

    # --- requests --------------------------------------------------------------------------

    async def reserve(self, request: Request) -> None:
        """Set slots aside on every decode rank."""
        self._masters[request.sequence_id] = request.master
        await self.decode.call_all("reserve", schema.pack(request.reserve(self.epoch)))

    def submit(
        self, step: PrefillStep, tokens: Prompt, *, ranks: Sequence[int] | None = None
    ) -> int:
        """Send a step to all prefill ranks (or some), each with its own tokens; return its id."""
        if step.step_id == 0:
            step = msgspec.structs.replace(step, step_id=next(self._step_ids))
        if self._masters and self.decode.window:  # some cells only prefill
            chunks = (
                msgspec.structs.replace(chunk, near_to=self._masters.get(chunk.sequence_id))
                for chunk in step.chunks
            )
            step = msgspec.structs.replace(step, chunks=tuple(chunks))
        self.steps[step.step_id] = step
        for rank in range(self.prefill.world_size):
            if ranks is None or rank in ranks:
                own_tokens = self._own_tokens(step, tokens, rank // self.prefill.tp)
                own = msgspec.structs.replace(step, tokens=own_tokens)
                self.prefill.notify(rank, "prefill", schema.pack(own))
        return step.step_id

    def _own_tokens(self, step: PrefillStep, tokens: Prompt, instance: int) -> bytes:
        if instance not in step.group:
            return b""
        member = step.group.index(instance)
        starts = itertools.accumulate((chunk.length for chunk in step.chunks), initial=0)
        at = {
            chunk.sequence_id: start - chunk.start
            for chunk, start in zip(step.chunks, starts, strict=False)
        }
        rows = [
            at[kv_slice.chunk.sequence_id] + np.array(kv_slice.span.positions)
            for kv_slice in computed_by(step, member)
        ]
        own = tokens[np.concatenate(rows)] if rows else tokens[:0]
        return own.astype("<i4").tobytes()

    async def prefilled(self, *step_ids: int) -> None:
        """Wait until every rank of the steps' groups is done with them."""
        for step_id in step_ids:
            ranks = len(self.steps[step_id].group) * self.prefill.tp
            await self.until_received(ranks, PrefillDone, step_id=step_id)

    async def join(self, request: Request) -> None:
        """Decode a request as soon as its KV was received, unless its first token was the last."""
        receivers = {kv_slice.instance for kv_slice in request.slices if not kv_slice.source}
        if self.decode.window > 1:
            receivers.add(request.master)
        if request.chunk().decoded:
            await self.until_received(
                len(receivers) * self.decode.tp, RankKvReceived, sequence_id=request.sequence_id
            )
        await self.until(lambda: self.tokens(request.sequence_id))
        if self.finished(request.sequence_id):
            self.decode.notify_all(
                "cancel", schema.pack(CancelSequence(sequence_id=request.sequence_id))
            )
            return
        self.notify_join(request, self.tokens(request.sequence_id)[0])

    def notify_join(self, request: Request, first_token: int | None, budget: int = 0) -> None:
        """Let a request join the decode batch; without a first token its prompt is piggybacked."""
        slices = (*request.slices, *request.answer)
        concerned = {request.master, *(kv_slice.instance for kv_slice in slices)}
        join = JoinBatch(
            sequence_id=request.sequence_id,
            first_token=first_token,
            budget=budget,
            instances=tuple(sorted(concerned)) if self.prefill is self.decode else (),
        )
        self.decode.notify(0, "join", schema.pack(join))

    def move(self, request: Request, before: SequencePlacement, after: SequencePlacement) -> int:
        """Have a row go on elsewhere; returns the move's number."""
        self._moved.add(request.sequence_id)
        number = next(self._step_ids)
        length = len(request.prompt)
        message = MoveSequence(
            step_id=number,
            sequence_id=request.sequence_id,
            prompt_tokens=length,
            stop=length + request.sampling.max_tokens - 1,
            before=before,
            after=after,
            sampler=request.sampler,
        )
        self.decode.notify_all("move", schema.pack(message))
        return number

    def cancel(self, sequence_id: int) -> None:
        """Cancel a request everywhere."""
        for gang in (self.prefill, self.decode):
            gang.notify_all("cancel", schema.pack(CancelSequence(sequence_id=sequence_id)))

    async def retain_or_evict(self, gang: GangClient, message: RetainKv | EvictKv) -> int:
        """Command a gang what to retain of a sequence; return how many tokens its ranks then
        have.
        """
        before = len(self._slot_answers(gang, message.sequence_id))
        method = "retain" if isinstance(message, RetainKv) else "evict"
        gang.notify(0, method, schema.pack(message))
        await self.until(
            lambda: len(self._slot_answers(gang, message.sequence_id)) >= before + gang.world_size
        )
        answers = self._slot_answers(gang, message.sequence_id)[before:]
        assert sorted(answer.rank for answer in answers) == list(range(gang.world_size))
        return sum(answer.tokens for answer in answers if isinstance(answer, KvRetained))

    def _slot_answers(self, gang: GangClient, sequence_id: int) -> list[KvRetained | SlotsFreed]:
        return [
            slots
            for whose, slots in self._slots
            if whose is gang and slots.sequence_id == sequence_id
        ]

    async def answer(self, *requests: Request) -> list[list[int]]:
        """Join requests whose prefill is under way and wait for their last tokens."""
        await asyncio.gather(*map(self.join, requests))
        for request in requests:
            await self.until(partial(self.finished, request.sequence_id))
        return [self.tokens(request.sequence_id) for request in requests]

    async def generate(
        self, *requests: Request, group: Sequence[int], bounds: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Run one prefill step for whole prompts, then decode them to the end."""
        await asyncio.gather(*map(self.reserve, requests))
        tokens = np.concatenate([request.prompt for request in requests])
        chunks = tuple(request.chunk() for request in requests)
        self.submit(prefill_step(chunks, group, bounds), tokens)
        return await self.answer(*requests)

    async def freed(self, *sequence_ids: int) -> None:
        """Wait until every decode rank has freed its slots of the requests."""
        for sequence_id in sequence_ids:
            await self.until(partial(self._freed_everywhere, sequence_id))

    def _freed_everywhere(self, sequence_id: int) -> bool:
        answers = self._slot_answers(self.decode, sequence_id)
        freed = {answer.rank for answer in answers if isinstance(answer, SlotsFreed)}
        return freed == set(range(self.decode.world_size))

    async def used_slots(self) -> set[int]:
        """Return numbers of slots in use on the ranks."""
        stats = await self.prefill.stats() + await self.decode.stats()
        return {stat.kv_used for stat in stats}


def members_of(plan: GangPlan, addresses: Sequence[tuple[str, int]]) -> GangMembers:
    """Return a registry's entry for a gang that has started."""
    ranks = (
        RankAddress(rank=rank, host=host, port=port) for rank, (host, port) in enumerate(addresses)
    )
    return GangMembers(gang_id=plan.gang_id, ranks=tuple(ranks))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request and where its KV is to lie in the decode gang."""

    sequence_id: int
    prompt: Prompt
    slices: tuple[KvSlice, ...]
    master: int = 0
    sampling: Sampling = GREEDY
    kept_only: bool = False
    answer: tuple[KvSlice, ...] = ()
    """Slices of the answer's KV. Empty: its master holds it."""
    generated_tokens: tuple[int, ...] = ()
    """Last tokens of `prompt` that an earlier attempt has sampled."""
    retain: bool = False
    trace: dict[str, str] = field(default_factory=dict)

    def reserve(self, epoch: str) -> ReserveKv:
        """Return the message to every decode rank."""
        return ReserveKv(
            sequence_id=self.sequence_id,
            epoch=epoch,
            slices=self.slices,
            master=self.master,
            prompt_tokens=len(self.prompt),
            output_tokens=self.sampling.max_tokens - len(self.generated_tokens),
            first_index=len(self.generated_tokens),
            sampler=self.sampler,
            answer=self.answer,
            kept_only=self.kept_only,
            retain=self.retain,
            trace=self.trace,
        )

    def chunk(self, start: int = 0, stop: int | None = None, **fields: Any) -> PrefillChunk:
        """Return a chunk of the prompt; the whole prompt by default."""
        stop = len(self.prompt) if stop is None else stop
        return SampledChunk(
            sequence_id=self.sequence_id,
            start=start,
            length=stop - start,
            last=stop == len(self.prompt),
            destinations=self.slices,
            retain=self.retain,
            decoded=self.sampling.max_tokens - len(self.generated_tokens) > 1,
            first_index=len(self.generated_tokens),
            sampler=self.sampler,
            **fields,
        )

    @property
    def sampler(self) -> bytes:
        """Return what ranks need to sample its tokens, packed."""
        asked = self.prompt[: len(self.prompt) - len(self.generated_tokens)]
        return encode(
            SamplerInputs(
                sampling=self.sampling,
                prompt_tokens=asked.astype("<i4").tobytes(),
                generated_tokens=np.array(self.generated_tokens, "<i4").tobytes(),
            )
        )


class SampledChunk(PrefillChunk, frozen=True):
    """A chunk, with what the rank that samples its first token needs."""

    sampler: bytes = b""

    @property
    def plain(self) -> PrefillChunk:
        """Return the chunk as it travels."""
        names = PrefillChunk.__struct_fields__
        return PrefillChunk(**{name: getattr(self, name) for name in names})


async def in_threads(bodies: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions that wait for each other, each in a thread of its own."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(bodies)) as threads:
        running = [loop.run_in_executor(threads, body) for body in bodies]
        return await asyncio.wait_for(asyncio.gather(*running), START_S)


def prefill_step(
    chunks: Sequence[PrefillChunk],
    group: Sequence[int],
    bounds: Sequence[int] | None = None,
    **fields: Any,
) -> PrefillStep:
    """Return a step that the cell will number."""
    total = sum(chunk.length for chunk in chunks)
    if bounds is None:
        bounds = even_bounds(total, len(group))
    if any(chunk.rows for chunk in chunks):
        bounds = bounds_of_rows(chunks, group)
    sampled = [chunk for chunk in chunks if isinstance(chunk, SampledChunk)]
    return PrefillStep(
        step_id=0,
        group=tuple(group),
        bounds=tuple(bounds),
        chunks=tuple(chunk.plain if isinstance(chunk, SampledChunk) else chunk for chunk in chunks),
        samplers={chunk.sequence_id: chunk.sampler for chunk in sampled},
        **fields,
    )


def laid_out(layout: str, start: int, stop: int, instances: Sequence[int]) -> tuple[KvSlice, ...]:
    """Return positions over instances in one of the layouts."""
    cut = {"zigzag": zigzag, "striped": striped}[layout]
    return place(instances, cut(stop - start, len(instances)), start=start)


def bounds_of_rows(chunks: Sequence[PrefillChunk], group: Sequence[int]) -> list[int]:
    """Return the bounds of the members' rows, one after the other."""
    counts = (
        sum(
            kv_slice.tokens
            for chunk in chunks
            for kv_slice in chunk.rows
            if kv_slice.instance == instance
        )
        for instance in group
    )
    return list(itertools.accumulate(counts, initial=0))


def prompt_of(length: int, seed: int = 0) -> Prompt:
    """Return token ids that every tiny vocabulary has."""
    return np.random.default_rng(seed).integers(0, 256, length).astype("<i4")


def even_bounds(total: int, parts: int) -> list[int]:
    """Cut points of parts that differ by one at most."""
    return [index * total // parts for index in range(parts + 1)]


def even_slices(length: int, instances: Sequence[int]) -> tuple[KvSlice, ...]:
    """Return a prompt laid over instances in equal spans."""
    return slices_at(even_bounds(length, len(instances)), instances)


def slices_at(bounds: Sequence[int], instances: Sequence[int]) -> tuple[KvSlice, ...]:
    """Return slices of a prompt over instances, cut at the bounds, without empty ones."""
    return tuple(
        KvSlice(instance, start, stop)
        for instance, (start, stop) in zip(instances, itertools.pairwise(bounds), strict=True)
        if start < stop
    )
