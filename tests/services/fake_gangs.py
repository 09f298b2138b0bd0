"""Gangs that compute nothing: they speak the real RPC over loopback and do as the test says.

Fake ranks keep books of their own of the slots that were asked of them. A request for more than
they have fails the test, and at the end of a test everything must have come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from csps.configurator.shapes import AttentionShape
from csps.protocols.errors import FaultError, Superseded
from csps.protocols.fence import Fence
from csps.protocols.gang_members import GangMembers, GangRole, RankAddress
from csps.protocols.messages import (
    Attach,
    CancelRequest,
    ConnectKv,
    JoinBatch,
    KvLanded,
    PrefillDone,
    RankDescription,
    RequestFailed,
    Reserve,
    SlotsFreed,
)
from csps.protocols.plans import ENGINE_NAMES, StrategyChoice, StrategyChoices, StrategyQuestions
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.row_move import MoveRow
from csps.protocols.rpc_server import Peer, RpcServer
from csps.protocols.sampling import Sampling
from csps.protocols.schema import pack, unpack
from csps.protocols.tokens import TokenDrawn, Tokens
from csps.services.cluster.attachment import Cluster, ClusterDeadlines
from csps.services.cluster.directory import ClusterView, StaticDirectory
from csps.services.cluster.generations import MemoryGenerations
from csps.services.router.cost_book import Configure, CostBook
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.router.service import RequestService
from csps.services.scheduling.cost import CostTable, Unmeasured
from csps.services.scheduling.limits import DeadlineSettings, QueueLimits
from csps.services.scheduling.policies.choice import make_policy
from csps.services.scheduling.scheduler import Scheduler

SECRET = b"only for tests"
PATIENCE_S = 60.0


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop turn until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what to wait for may be of either side
            await asyncio.sleep(0)


async def turns(count: int = 200) -> None:
    """Let the event loop turn so often that whatever could happen has happened."""
    for _ in range(count):
        await asyncio.sleep(0)


class FakeRank:
    """One rank: remembers what it is told, tells what the test wants."""

    def __init__(self, gang: FakeGang, rank: int) -> None:
        self.gang, self.rank = gang, rank
        self.fence = Fence()
        self.router: Peer | None = None
        self.asked = 0
        self.attached: list[str] = []
        self.connections: list[ConnectKv] = []
        self.jobs: list[PrefillJob] = []
        self.reserved: dict[int, Reserve] = {}
        self.all_reserved: list[int] = []
        self.joined: list[JoinBatch] = []
        self.moves: list[MoveRow] = []
        self.cancelled: list[int] = []
        self.heard: list[str] = []
        self.server = RpcServer(
            {
                "describe": lambda _payload, _peer: pack(self.describe()),
                "may_attach": self._may_attach,
                "attach": self._attach,
                "keep_alive": self._keep_alive,
                "connect_kv": self._connect_kv,
                "prefill": self._prefill,
                "reserve": self._reserve,
                "join": lambda payload, _: self._note("join", self.joined, JoinBatch, payload),
                "move": lambda payload, _: self._note("move", self.moves, MoveRow, payload),
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

    def tell(self, method: str, message: Any) -> None:
        if self.router is not None and not self.router.closed.done():
            self.router.notify(method, pack(message))

    def _note(self, method: str, log: list[Any], cls: Any, payload: Any) -> Any:
        message = unpack(cls, payload)
        log.append(message)
        self.heard.append(method)
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
            self.fence.heard(time.monotonic())

    def _disconnected(self, peer: Peer) -> None:
        if peer is self.router:
            self.router = None
            self.fence.release()

    async def _connect_kv(self, payload: Any, _: Peer) -> None:
        self._note("connect_kv", self.connections, ConnectKv, payload)
        await self.gang.may_connect.wait()

    def _prefill(self, payload: Any, _: Peer) -> None:
        job = self._note("prefill", self.jobs, PrefillJob, payload)
        used = sum(self.gang.slots_of(job, self.instance) for job in self.gang.running_jobs(self))
        assert used <= self.gang.kv_slots, "more prompts than slots"
        self.gang.on_job(self, job)

    async def _reserve(self, payload: Any, _: Peer) -> None:
        request = unpack(Reserve, payload)
        self.heard.append("reserve")
        await self.gang.may_reserve.wait()
        if self.gang.refuses is not None:
            raise self.gang.refuses
        self.reserved[request.rid] = request
        self.all_reserved.append(request.rid)
        used = sum(_slots(held, self.instance) for held in self.reserved.values())
        assert used <= self.gang.kv_slots, "more requests than slots"

    def _cancel(self, payload: Any, _: Peer) -> None:
        rid = unpack(CancelRequest, payload).rid
        self.cancelled.append(rid)
        self.heard.append("cancel")
        if self.gang.obeys_cancel:
            self.give_back(rid)

    def give_back(self, rid: int) -> None:
        """What a rank does with a cancelled request."""
        if self.reserved.pop(rid, None) is not None:
            self.tell("freed", SlotsFreed(rid=rid, rank=self.rank))
        for job in self.gang.running_jobs(self):
            if {piece.rid for piece in job.pieces} <= set(self.cancelled):
                self.job_done(job, cancelled=True)

    def job_done(self, job: PrefillJob, *, cancelled: bool = False) -> None:
        """Report a job as done; ranks outside of its group have nothing to report."""
        self.gang.done.add((self.rank, job.job_id))
        if self.instance in job.group:
            self.tell(
                "prefill_done",
                PrefillDone(
                    job_id=job.job_id,
                    rank=self.rank,
                    cancelled=cancelled,
                    queue_s=0.0,
                    compute_s=0.1 * (1 + self.rank),
                    communication_s=0.0,
                    transfer_s=0.0,
                    yielded_s=0.0,
                ),
            )


def _slots(request: Reserve, instance: int) -> int:
    shares = sum(it.span.length for it in request.shares if it.instance == instance)
    if request.answer:
        return shares + sum(it.span.length for it in request.answer if it.instance == instance)
    return shares + (request.sampling.max_tokens if request.master == instance else 0)


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
        self.on_job: Callable[[FakeRank, PrefillJob], None] = lambda rank, job: None
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
        """The rank's process is gone."""
        await self.ranks[rank].server.close(0.0)

    def running_jobs(self, rank: FakeRank) -> list[PrefillJob]:
        return [job for job in rank.jobs if (rank.rank, job.job_id) not in self.done]

    def slots_of(self, job: PrefillJob, instance: int) -> int:
        if instance not in job.group:
            return 0
        member = job.group.index(instance)
        return job.bounds[member + 1] - job.bounds[member]

    # --- what the gang does at the test's word ---

    def finish_job(self, job: PrefillJob) -> None:
        """Every rank of the group has computed and sent its part."""
        for rank in self.ranks:
            rank.job_done(job)

    def draw(self, rid: int, index: int, token: int = 7, finish: Any = None) -> None:
        """A token, from whichever rank; the router does not care which."""
        drawn = TokenDrawn(rid=rid, index=index, token=token, finish_reason=finish)
        self.ranks[-1].tell("tokens", Tokens.of([drawn]))

    def land(self, rid: int) -> None:
        """The prompt's KV is there, on every rank that holds a share."""
        for rank in self.ranks:
            request = rank.reserved.get(rid)  # None: cancelled meanwhile
            for share in request.shares if request is not None else ():
                if share.instance == rank.instance:
                    tokens = share.span.length
                    landed = KvLanded(rid=rid, rank=rank.rank, tokens=tokens, seconds=0.0)
                    rank.tell("landed", landed)

    def free(self, rid: int) -> None:
        """Every rank gives its slots back."""
        for rank in self.ranks:
            rank.reserved.pop(rid, None)
            rank.tell("freed", SlotsFreed(rid=rid, rank=rank.rank))

    def fail(self, rid: int, code: str) -> None:
        failed = RequestFailed(rid=rid, rank=0, code=code, message="as the test says")
        self.ranks[0].tell("failed", failed)

    @property
    def leader(self) -> FakeRank:
        return self.ranks[0]


def _job_of(rank: FakeRank, rid: int) -> PrefillJob | None:
    jobs = (job for job in rank.jobs if any(piece.rid == rid for piece in job.pieces))
    return next(jobs, None)


SHAPE = AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)


async def as_asked(questions: StrategyQuestions) -> StrategyChoices:
    """A configurator that compares nothing."""
    return StrategyChoices(
        chosen=tuple(
            (
                StrategyChoice(
                    strategy="ulysses"
                    if it.csa is None
                    else ENGINE_NAMES[it.csa.strategy or "ntp"],
                    reason="as asked",
                    loss=0.0 if it.csa is None else None,
                ),
            )
            for it in questions.asked
        )
    )


@dataclass
class FakeCell:
    """The router's request service over two fake gangs, or an elastic one that is both."""

    prefill: FakeGang
    decode: FakeGang
    directory: StaticDirectory
    cluster: Cluster
    service: RequestService
    costs: CostBook
    gangs: list[FakeGang] = field(default_factory=list)

    def submit(self, tokens: int = 100, max_tokens: int = 4, **options: Any) -> Running:
        return self.service.submit(generation(tokens, max_tokens, **options))

    async def replace(self, gang: FakeGang) -> None:
        """A new gang has registered in the old one's place."""
        members = await gang.start()
        self.gangs.append(gang)
        _, view = await self.directory.wait_change(-1)
        if gang.role != "decode":
            self.prefill = gang
        if gang.role != "prefill":
            self.decode = gang
        self.directory.publish(replace(view, **{gang.role: members}))

    # --- one request's way, step by step ---

    def rid_of(self, running: Running) -> int:
        """The number of the request's current attempt."""
        assert running.sequence is not None
        return running.sequence

    async def prefilling(self, running: Running) -> PrefillJob:
        """Wait until the request's job has reached every prefill rank."""
        await until(lambda: running.state == "prefill")
        rid = self.rid_of(running)
        await until(lambda: all(_job_of(rank, rid) for rank in self.prefill.ranks))
        job = _job_of(self.prefill.leader, rid)
        assert job is not None
        return job

    async def decoding(self, running: Running) -> int:
        """Take a request to the state decoding; returns its rid."""
        job = await self.prefilling(running)
        rid = self.rid_of(running)
        self.prefill.draw(rid, 0)
        self.decode.land(rid)
        self.prefill.finish_job(job)
        await until(lambda: any(it.rid == rid for it in self.decode.leader.joined))
        return rid

    def finish(self, rid: int, count: int, first: int = 1) -> None:
        """Decode the tokens up to count - 1, the last one with a reason, and free the slots."""
        for index in range(first, count):
            finish = "length" if index == count - 1 else None
            self.decode.draw(rid, index, token=100 + index, finish=finish)
        self.decode.free(rid)

    def runs_by_itself(self) -> None:
        """The gangs do everything that is asked of them at once."""
        prefill, decode = self.prefill, self.decode

        def on_job(rank: FakeRank, job: PrefillJob) -> None:
            if rank.rank == prefill.world_size - 1:  # the last one to hear of it
                asyncio.get_running_loop().call_soon(run, job)

        def run(job: PrefillJob) -> None:
            for piece in job.pieces:
                reserved = piece.rid in decode.leader.reserved or not piece.decoded
                if reserved and piece.rid not in prefill.leader.cancelled:
                    index = len(piece.drawn) // 4
                    last = piece.sampling.max_tokens == index + 1
                    prefill.draw(piece.rid, index, finish="length" if last else None)
                    decode.land(piece.rid)
            prefill.finish_job(job)

        def join(payload: Any, _: Peer) -> None:
            message = unpack(JoinBatch, payload)
            request = decode.leader.reserved.get(message.rid)
            if request is not None:
                first = len(request.drawn) // 4 + (message.first_token is not None)
                self.finish(message.rid, request.sampling.max_tokens, first=first)

        prefill.on_job = on_job
        decode.leader.server._handlers["join"] = join

    async def settled(self) -> None:
        """Wait until nothing is held any more, on either side, and check the books."""
        await until(lambda: not any(rank.reserved for rank in self.decode.ranks))
        await until(lambda: self.service.counts.decode_kv == 0)
        await until(lambda: self.service.counts.prefill_kv == 0)
        self.service.check_integrity()
        self.service.check_health()


def generation(tokens: int = 100, max_tokens: int = 4, **options: Any) -> Generation:
    return Generation(
        request_id="r",
        prompt=np.arange(tokens, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens),
        **options,
    )


SECOND_NS = 1_000_000_000
QUICK = DeadlineSettings(watch_ns=SECOND_NS // 100, retry_pause_ns=0)


@asynccontextmanager
async def fake_cell(
    *,
    prefill: FakeGang | None = None,
    decode: FakeGang | None = None,
    elastic: FakeGang | None = None,
    configure: Configure = as_asked,
    options: dict[str, Any] | None = None,
    limits: QueueLimits | None = None,
    deadlines: DeadlineSettings = QUICK,
    policy: str = "csps",
    table: CostTable | None = None,
    keep: Callable[[CostTable], None] | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    ready: bool = True,
    **service: Any,
) -> AsyncIterator[FakeCell]:
    """A request service and two gangs, linked, or an elastic one; everything is closed at the
    end."""
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
    costs = CostBook(table or CostTable(latencies=Unmeasured()), configure, keep)
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
