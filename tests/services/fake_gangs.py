"""Gangs that compute nothing: they speak the real RPC over loopback and do as a test says.

Fake ranks count the slots that were asked of them. A request for more slots than a rank has fails
the test, and at the end of a test all slots must be free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from csps.configurator.costs.cost_table import CostTable, Unmeasured
from csps.configurator.model.attention_shape import AttentionShape
from csps.protocols.attention.plan import (
    ENGINE_NAMES,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestions,
)
from csps.protocols.core.errors import FaultError, Superseded
from csps.protocols.gang.members import Fence, GangMembers, GangRole, RankAddress
from csps.protocols.gang.messages import (
    Attach,
    CancelSequence,
    ConnectKv,
    FirstTokenSampler,
    JoinBatch,
    PrefillDone,
    RankDescription,
    RankKvReceived,
    RequestFailed,
    ReserveKv,
    SampledToken,
    SampledTokens,
    Sampling,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.protocols.rpc.schema import pack, unpack
from csps.protocols.rpc.server import Peer, RpcServer
from csps.services.cluster.attachment import Cluster, ClusterDeadlines
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import ClusterView, StaticDirectory
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.cost_table_service import Configure, CostTableService
from csps.services.router.service import RequestService
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines
from csps.services.scheduling.policies.registry import make_policy

SECRET = b"only for tests"
PATIENCE_S = 60.0


async def until(condition: Callable[[], Any]) -> None:
    """Run the event loop until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what to wait for may be of either side
            await asyncio.sleep(0)


async def loop_iterations(count: int = 200) -> None:
    """Run the event loop until whatever could happen has happened."""
    for _ in range(count):
        await asyncio.sleep(0)


class FakeRank:
    """One rank: it remembers the messages it gets, and sends what a test wants."""

    def __init__(self, gang: FakeGang, rank: int) -> None:
        self.gang, self.rank = gang, rank
        self.fence = Fence()
        self.router: Peer | None = None
        self.asked = 0
        self.attached: list[str] = []
        self.connections: list[ConnectKv] = []
        self.steps: list[PrefillStep] = []
        self.samplers: dict[int, bytes] = {}
        """Packed `SamplerInputs` by sequence."""
        self.reserved: dict[int, ReserveKv] = {}
        self.all_reserved: list[int] = []
        self.joined: list[JoinBatch] = []
        self.moves: list[MoveSequence] = []
        self.cancelled: list[int] = []
        self.methods: list[str] = []
        self.server = RpcServer(
            {
                "describe": lambda _payload, _peer: pack(self.describe()),
                "may_attach": self._may_attach,
                "attach": self._attach,
                "keep_alive": self._keep_alive,
                "connect_kv": self._connect_kv,
                "sampler": self._sampler,
                "prefill": self._prefill,
                "reserve": self._reserve,
                "join": lambda payload, _: self._note("join", self.joined, JoinBatch, payload),
                "move": lambda payload, _: self._note("move", self.moves, MoveSequence, payload),
                "cancel": self._cancel,
            },
            secret=SECRET,
            on_disconnect=self._disconnected,
        )

    @property
    def instance(self) -> int:
        return self.rank // self.gang.tp

    def describe(self) -> RankDescription:
        gang = self.gang
        return RankDescription(
            gang_id=gang.gang_id,
            role=gang.role,
            rank=self.rank,
            world_size=gang.world_size,
            tp=gang.tp,
            location=gang.locations[self.rank],
            kv_slots=gang.kv_slots,
            kv_bytes_per_token=8,
            layers=2,
            model="fake",
            model_fingerprint=gang.fingerprint,
            max_positions=1 << 20,
            store_host="127.0.0.1",
            store_port=1,
            pid=0,
        )

    def notify(self, method: str, message: Any) -> None:
        if self.router is not None and not self.router.closed.done():
            self.router.notify(method, pack(message))

    def _note(self, method: str, log: list[Any], cls: Any, payload: Any) -> Any:
        message = unpack(cls, payload)
        log.append(message)
        self.methods.append(method)
        return message

    def _may_attach(self, payload: Any, _: Peer) -> None:
        self.asked += 1
        self.fence.check(unpack(Attach, payload).generation, time.monotonic())

    def _attach(self, payload: Any, peer: Peer) -> Any:
        message = unpack(Attach, payload)
        self.fence.take(message.generation, time.monotonic())
        if self.router is not None and self.router is not peer:
            self.router.refuse(Superseded("another router has taken over"))
        self.attached.append(message.router_id)
        self.router = peer
        self.reserved.clear()
        return pack(self.describe())

    def _keep_alive(self, _: Any, peer: Peer) -> None:
        if peer is self.router:
            self.fence.heartbeat(time.monotonic())

    def _disconnected(self, peer: Peer) -> None:
        if peer is self.router:
            self.router = None
            self.fence.release()

    async def _connect_kv(self, payload: Any, _: Peer) -> None:
        self._note("connect_kv", self.connections, ConnectKv, payload)
        await self.gang.may_connect.wait()

    def _sampler(self, payload: Any, _: Peer) -> None:
        message = unpack(FirstTokenSampler, payload)
        self.samplers[message.sequence_id] = message.inputs

    def _prefill(self, payload: Any, _: Peer) -> None:
        step = self._note("prefill", self.steps, PrefillStep, payload)
        used = sum(
            self.gang.slots_of(step, self.instance) for step in self.gang.running_steps(self)
        )
        assert used <= self.gang.kv_slots, f"prompts use {used} of {self.gang.kv_slots} slots"
        self.gang.on_step(self, step)

    async def _reserve(self, payload: Any, _: Peer) -> None:
        request = unpack(ReserveKv, payload)
        self.methods.append("reserve")
        await self.gang.may_reserve.wait()
        if self.gang.refuses is not None:
            raise self.gang.refuses
        self.reserved[request.sequence_id] = request
        self.all_reserved.append(request.sequence_id)
        used = sum(_slots(reserved, self.instance) for reserved in self.reserved.values())
        assert used <= self.gang.kv_slots, f"requests use {used} of {self.gang.kv_slots} slots"

    def _cancel(self, payload: Any, _: Peer) -> None:
        sequence_id = unpack(CancelSequence, payload).sequence_id
        self.cancelled.append(sequence_id)
        self.methods.append("cancel")
        if self.gang.obeys_cancel:
            self.free_cancelled(sequence_id)

    def free_cancelled(self, sequence_id: int) -> None:
        """Do what a rank does with a cancelled request."""
        if self.reserved.pop(sequence_id, None) is not None:
            self.notify("freed", SlotsFreed(sequence_id=sequence_id, rank=self.rank))
        for step in self.gang.running_steps(self):
            if {chunk.sequence_id for chunk in step.chunks} <= set(self.cancelled):
                self.report_step_done(step, cancelled=True)

    def report_step_done(self, step: PrefillStep, *, cancelled: bool = False) -> None:
        """Report a step as done; ranks outside of its group report nothing."""
        self.gang.done.add((self.rank, step.step_id))
        if self.instance in step.group:
            self.notify(
                "prefill_done",
                PrefillDone(
                    step_id=step.step_id,
                    rank=self.rank,
                    cancelled=cancelled,
                    queue_s=0.0,
                    compute_s=0.1 * (1 + self.rank),
                    communication_s=0.0,
                    transfer_s=0.0,
                    yielded_s=0.0,
                ),
            )


def _slots(request: ReserveKv, instance: int) -> int:
    slices = sum(
        kv_slice.span.length for kv_slice in request.slices if kv_slice.instance == instance
    )
    if request.answer:
        return slices + sum(
            kv_slice.span.length for kv_slice in request.answer if kv_slice.instance == instance
        )
    return slices + (request.output_tokens if request.master == instance else 0)


class FakeGang:
    """All ranks of a gang, in this process."""

    def __init__(
        self,
        role: GangRole,
        gang_id: str,
        *,
        instances: int = 2,
        tp: int = 1,
        kv_slots: int = 10_000,
        fingerprint: str = "same",
    ) -> None:
        self.role, self.gang_id, self.tp = role, gang_id, tp
        self.kv_slots, self.fingerprint = kv_slots, fingerprint
        self.world_size = instances * tp
        self.locations = [f"0-0-{rank}" for rank in range(self.world_size)]
        self.may_connect, self.may_reserve = asyncio.Event(), asyncio.Event()
        self.may_connect.set()
        self.may_reserve.set()
        self.refuses: FaultError | None = None
        self.obeys_cancel = True
        self.done: set[tuple[int, int]] = set()
        self.on_step: Callable[[FakeRank, PrefillStep], None] = lambda rank, step: None
        self.ranks = [FakeRank(self, rank) for rank in range(self.world_size)]
        self.addresses: list[RankAddress] = []

    async def start(self) -> GangMembers:
        for rank in self.ranks:
            host, port = await rank.server.start("127.0.0.1")
            self.addresses.append(RankAddress(rank=rank.rank, host=host, port=port))
        return self.members

    @property
    def members(self) -> GangMembers:
        return GangMembers(gang_id=self.gang_id, ranks=tuple(self.addresses))

    async def close(self) -> None:
        await asyncio.gather(*(rank.server.close(0.0) for rank in self.ranks))

    async def kill(self, rank: int) -> None:
        """End a rank's server, as if its process were gone."""
        await self.ranks[rank].server.close(0.0)

    def running_steps(self, rank: FakeRank) -> list[PrefillStep]:
        return [step for step in rank.steps if (rank.rank, step.step_id) not in self.done]

    def slots_of(self, step: PrefillStep, instance: int) -> int:
        if instance not in step.group:
            return 0
        member = step.group.index(instance)
        return step.bounds[member + 1] - step.bounds[member]

    # --- what the gang does when a test says so ---

    def finish_step(self, step: PrefillStep) -> None:
        """Report the step as done by every rank of its group."""
        for rank in self.ranks:
            rank.report_step_done(step)

    def sample(self, sequence_id: int, index: int, token: int = 7, finish: Any = None) -> None:
        """Send a token from the last rank; the router does not care which rank sends it."""
        sampled = SampledToken(
            sequence_id=sequence_id, index=index, token=token, finish_reason=finish
        )
        self.ranks[-1].notify("tokens", SampledTokens.of([sampled]))

    def receive_kv(self, sequence_id: int) -> None:
        """Report the prompt's KV as received by every rank that stores a slice."""
        for rank in self.ranks:
            request = rank.reserved.get(sequence_id)  # None: cancelled meanwhile
            for kv_slice in request.slices if request is not None else ():
                if kv_slice.instance == rank.instance:
                    tokens = kv_slice.span.length
                    received = RankKvReceived(
                        sequence_id=sequence_id, rank=rank.rank, tokens=tokens, seconds=0.0
                    )
                    rank.notify("received", received)

    def free(self, sequence_id: int) -> None:
        """Free the sequence's slots on every rank."""
        for rank in self.ranks:
            rank.reserved.pop(sequence_id, None)
            rank.notify("freed", SlotsFreed(sequence_id=sequence_id, rank=rank.rank))

    def fail(self, sequence_id: int, code: str) -> None:
        failed = RequestFailed(
            sequence_id=sequence_id, rank=0, code=code, message="as the test says"
        )
        self.ranks[0].notify("failed", failed)

    def has_joined(self, sequence_id: int) -> bool:
        """Return whether the gang was told to decode the sequence."""
        return any(message.sequence_id == sequence_id for message in self.leader.joined)

    @property
    def leader(self) -> FakeRank:
        return self.ranks[0]


def _step_of(rank: FakeRank, sequence_id: int) -> PrefillStep | None:
    steps = (
        step
        for step in rank.steps
        if any(chunk.sequence_id == sequence_id for chunk in step.chunks)
    )
    return next(steps, None)


SHAPE = AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)


async def without_comparison(questions: StrategyQuestions) -> StrategyChoices:
    """Answer as a configurator that compares nothing."""
    return StrategyChoices(
        chosen=tuple(
            (
                StrategyChoice(
                    strategy="ulysses"
                    if question.csa is None
                    else ENGINE_NAMES[question.csa.strategy or "ntp"],
                    reason="as asked",
                    loss=0.0 if question.csa is None else None,
                ),
            )
            for question in questions.asked
        )
    )


@dataclass
class FakeCell:
    """The router's request service over two fake gangs, or one elastic gang."""

    prefill: FakeGang
    decode: FakeGang
    directory: StaticDirectory
    cluster: Cluster
    service: RequestService
    costs: CostTableService
    gangs: list[FakeGang] = field(default_factory=list)

    def submit(self, tokens: int = 100, max_tokens: int = 4, **options: Any) -> RequestHandle:
        return self.service.submit(request_spec(tokens, max_tokens, **options))

    async def replace(self, gang: FakeGang) -> None:
        """Register a new gang in the old one's place."""
        members = await gang.start()
        self.gangs.append(gang)
        _, view = await self.directory.wait_change(-1)
        if gang.role != "decode":
            self.prefill = gang
        if gang.role != "prefill":
            self.decode = gang
        self.directory.publish(replace(view, **{gang.role: members}))

    # --- one request, step by step ---

    def sequence_id_of(self, handle: RequestHandle) -> int:
        """Return the sequence_id of the request's current attempt."""
        assert handle.sequence_id is not None
        return handle.sequence_id

    async def prefilling(self, handle: RequestHandle) -> PrefillStep:
        """Wait until the request's step has reached every prefill rank."""
        await until(lambda: handle.state == "prefill")
        sequence_id = self.sequence_id_of(handle)
        await until(lambda: all(_step_of(rank, sequence_id) for rank in self.prefill.ranks))
        step = _step_of(self.prefill.leader, sequence_id)
        assert step is not None
        return step

    async def decoding(self, handle: RequestHandle) -> int:
        """Bring a request to the state decoding; return its sequence_id."""
        step = await self.prefilling(handle)
        sequence_id = self.sequence_id_of(handle)
        self.prefill.sample(sequence_id, 0)
        self.decode.receive_kv(sequence_id)
        self.prefill.finish_step(step)
        await until(lambda: self.decode.has_joined(sequence_id))
        return sequence_id

    def finish(self, sequence_id: int, count: int, first: int = 1) -> None:
        """Sample tokens `first` to `count` - 1, the last one with a reason, and free the slots."""
        for index in range(first, count):
            finish = "length" if index == count - 1 else None
            self.decode.sample(sequence_id, index, token=100 + index, finish=finish)
        self.decode.free(sequence_id)

    def run_by_itself(self) -> None:
        """Let the gangs do at once whatever they are asked to."""
        prefill, decode = self.prefill, self.decode

        def on_step(rank: FakeRank, step: PrefillStep) -> None:
            if rank.rank == prefill.world_size - 1:  # the last one to receive it
                asyncio.get_running_loop().call_soon(run, step)

        def run(step: PrefillStep) -> None:
            for chunk in step.chunks:
                reserved = chunk.sequence_id in decode.leader.reserved or not chunk.decoded
                if reserved and chunk.sequence_id not in prefill.leader.cancelled:
                    finish = None if chunk.decoded else "length"
                    prefill.sample(chunk.sequence_id, chunk.first_index, finish=finish)
                    decode.receive_kv(chunk.sequence_id)
            prefill.finish_step(step)

        def join(payload: Any, _: Peer) -> None:
            message = unpack(JoinBatch, payload)
            request = decode.leader.reserved.get(message.sequence_id)
            if request is not None:
                first = request.first_index + (message.first_token is not None)
                count = request.first_index + request.output_tokens
                self.finish(message.sequence_id, count, first=first)

        prefill.on_step = on_step
        decode.leader.server._handlers["join"] = join

    async def wait_until_free(self) -> None:
        """Wait until router and ranks hold no slots, and check the invariants."""
        await until(lambda: not any(rank.reserved for rank in self.decode.ranks))
        await until(lambda: self.service.counts.decode_kv == 0)
        await until(lambda: self.service.counts.prefill_kv == 0)
        self.service.check_integrity()
        self.service.check_health()


def request_spec(tokens: int = 100, max_tokens: int = 4, **options: Any) -> RequestSpec:
    return RequestSpec(
        client_request_id=options.pop("client_request_id", "r"),
        prompt=np.arange(tokens, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens),
        **options,
    )


SECOND_NS = 1_000_000_000
QUICK = SchedulerDeadlines(liveness_check_ns=SECOND_NS // 100, retry_pause_ns=0)


@asynccontextmanager
async def fake_cell(
    *,
    prefill: FakeGang | None = None,
    decode: FakeGang | None = None,
    elastic: FakeGang | None = None,
    configure: Configure = without_comparison,
    options: dict[str, Any] | None = None,
    limits: QueueLimits | None = None,
    deadlines: SchedulerDeadlines = QUICK,
    policy: str = "csps",
    table: CostTable | None = None,
    store_table: Callable[[CostTable], None] | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    ready: bool = True,
    **service: Any,
) -> AsyncIterator[FakeCell]:
    """Yield a request service over linked fake gangs; close everything at the end."""
    pair = [prefill or FakeGang("prefill", "p1"), decode or FakeGang("decode", "d1")]
    gangs = pair if elastic is None else [elastic]
    members = {gang.role: await gang.start() for gang in gangs}
    directory = StaticDirectory(ClusterView(**members))
    cluster = Cluster(
        directory,
        secret=SECRET,
        router_id="test",
        generations=MemoryGenerations(),
        deadlines=ClusterDeadlines(retry_s=0.01),
        roles=tuple(members),
    )
    costs = CostTableService(table or CostTable(latencies=Unmeasured()), configure, store_table)
    chosen = {"spt_tokens": 1000, "short_tokens": 200} if policy == "csps" else {}
    scheduler = make_scheduler(
        make_policy(policy, {**chosen, **(options or {})}),
        costs.costs,
        limits=limits,
        deadlines=deadlines,
    )
    made = RequestService(cluster=cluster, scheduler=scheduler, costs=costs, shape=SHAPE, **service)
    cell = FakeCell(gangs[0], gangs[-1], directory, cluster, made, costs, gangs)
    await made.start()
    try:
        if ready:
            await until(lambda: made.ready)
        yield cell
    finally:
        await made.close(0.0)
        await asyncio.gather(*(gang.close() for gang in cell.gangs))
