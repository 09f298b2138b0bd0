"""Gangs whose ranks are threads of the test's own process: up in a tenth of a second.

The ranks are the real ones, with gloo between them and RPC over loopback. Those that a test wants
to kill can be processes in the same gang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from gang_driver import ANSWER_S, SECRET, Cell, GangPlan, in_threads, members_of
from gang_processes import RankProcess
from launch_log import LaunchLog
from rank_world import STRICT

from csps.actors.comm.layout import GangLayout
from csps.actors.comm.process_group import GroupMaker
from csps.actors.comm.rendezvous import host_store
from csps.actors.engine.log_end import SequencerEnd
from csps.actors.worker.rank import Rank
from csps.actors.worker.rank_config import RankConfig
from csps.protocols.core.errors import FaultError
from csps.protocols.gang.members import GangMembers
from csps.protocols.rpc.tls import Tls
from csps.protocols.sequencer.sequencer import Sequencer

POLL_S = 0.01


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that no message reports."""
    async with asyncio.timeout(ANSWER_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


class ThreadGang:
    """One gang, hosted here but for the ranks `in_processes`, of which rank 0 is none."""

    members: GangMembers
    """Known once it has started."""

    def __init__(
        self,
        plan: GangPlan,
        in_processes: Sequence[int] = (),
        data_group: GroupMaker | None = STRICT,
        log: LaunchLog | None = None,
    ) -> None:
        self.plan = plan
        # Processes are bound to plain gloo, and so is who works with them.
        self._data_group = None if in_processes else data_group
        self._log = log
        tls = None if plan.tls is None else Tls.load(plan.tls)
        self.hosted = host_store("127.0.0.1", SECRET, tls)
        self.hosts: list[Rank | RankProcess] = [
            RankProcess(plan.rank_fields(rank), self.hosted.address)
            if rank in in_processes
            else self._rank(rank)
            for rank in range(plan.instances * plan.tp)
        ]

    def _rank(self, rank: int) -> Rank:
        store = self.hosted.address if rank else self.hosted
        config, data_group = RankConfig(**self.plan.rank_fields(rank)), self._data_group
        if self._log is not None:
            layout = GangLayout(world_size=config.world_size, tp=config.tp)
            data_group = self._log.groups_of(rank, layout)
        return Rank(config, secret=SECRET, store=store, data_group=data_group)

    @property
    def ranks(self) -> list[Rank]:
        """Return the ranks that are hosted here."""
        return [member for member in self.hosts if isinstance(member, Rank)]

    def conduct(self, event: Callable[[Sequencer], None]) -> None:
        """Call the sequencer, which rank 0 hosts."""
        log = self.ranks[0]._log
        assert isinstance(log, SequencerEnd)
        log.post(event)

    def process(self, rank: int) -> RankProcess:
        """Return a rank that is a process."""
        member = self.hosts[rank]
        assert isinstance(member, RankProcess)
        return member

    async def start(self) -> None:
        """Start all ranks."""
        addresses = await in_threads([member.start for member in self.hosts])
        self.members = members_of(self.plan, addresses)

    async def close(self) -> None:
        """End all ranks."""
        await in_threads([member.close for member in self.hosts])


def open_steps(rank: Rank) -> int:
    """Return the steps that have arrived and are not over: some KV may still have to leave."""
    return rank.loop.waiting + len(rank.loop.outgoing_transfers)


class ThreadCell(Cell):
    """A cell whose ranks a test can look into."""

    prefill_gang: ThreadGang
    decode_gang: ThreadGang

    @property
    def ranks(self) -> list[Rank]:
        """Return the ranks of both gangs."""
        return [*self.prefill_gang.ranks, *self.decode_gang.ranks]

    def check_idle(self) -> None:
        """Assert that no rank is broken, no slot is taken, and the pools are consistent."""
        for rank in self.ranks:
            rank.check_health()
            rank.engine.pool.slots.check_integrity()
            assert rank.engine.pool.slots.used == 0, rank.config
            if (near := rank.engine.pool.window_slots) is not None:
                near.check_integrity()
                assert near.used == 0, rank.config
        for rank in self.prefill_gang.ranks:
            assert not open_steps(rank)
        for rank in self.decode_gang.ranks:
            assert rank.loop.decode_batch.running == len(rank.loop.decode_batch.reservations) == 0
            if (receiver := rank._kv_link._receiver) is not None:
                assert receiver.transfer_slots.idle, "somebody holds a backend"

    async def idle(self) -> None:
        """Wait until the ranks have freed everything; no message reports that a router is gone."""
        await eventually(lambda: not any(rank.engine.pool.slots.used for rank in self.ranks))
        await eventually(lambda: not any(map(open_steps, self.ranks)))
        self.check_idle()


@asynccontextmanager
async def started(*gangs: ThreadGang) -> AsyncIterator[None]:
    """Start all at once, because much of it is waiting; yield, and end them."""
    try:
        await asyncio.gather(*(gang.start() for gang in gangs))
        yield
    finally:
        await asyncio.gather(*(gang.close() for gang in gangs))


@asynccontextmanager
async def thread_gang(
    plan: GangPlan,
    in_processes: Sequence[int] = (),
    data_group: GroupMaker | None = STRICT,
    log: LaunchLog | None = None,
) -> AsyncIterator[ThreadGang]:
    """Yield a gang from start to end, held to NCCL's rules, or with plain gloo (None), to which
    those in processes are bound.
    """
    gang = ThreadGang(plan, in_processes, data_group, log)
    async with started(gang):
        yield gang


@asynccontextmanager
async def thread_cell(
    model_dir: Path,
    *,
    prefill: int,
    decode: int,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    kv_slots: int = 4096,
    window_slots: int = 0,
    kv_in_flight_bytes: int = 2**20,
    kv_receiving_backends: int = 16,
    quantum_ms: float = 50.0,
    kv_dtype: str = "auto",
    kv_files: Path | None = None,
    prefill_processes: Sequence[int] = (),
    decode_processes: Sequence[int] = (),
    data_group: GroupMaker | None = STRICT,
    logs: tuple[LaunchLog | None, LaunchLog | None] = (None, None),
) -> AsyncIterator[ThreadCell]:
    """Yield two gangs of so many instances, attached and connected; some ranks may be processes.
    What each gang's ranks begin is noted in its log. The prefill gang's KV survives in `kv_files`.
    Of the decode gang, layers with a window have `window_slots`, if these are not 0.
    """
    plan = partial(
        GangPlan,
        model_dir=str(model_dir),
        kv_slots=kv_slots,
        kv_in_flight_bytes=kv_in_flight_bytes,
        kv_receiving_backends=kv_receiving_backends,
        quantum_ms=quantum_ms,
        kv_dtype=kv_dtype,
    )
    files_path = None if kv_files is None else str(kv_files)
    prefill_plan = plan(role="prefill", instances=prefill, tp=prefill_tp, kv_files_path=files_path)
    decode_plan = plan(role="decode", instances=decode, tp=decode_tp, window_slots=window_slots)
    one = ThreadGang(prefill_plan, prefill_processes, data_group, logs[0])
    other = ThreadGang(decode_plan, decode_processes, data_group, logs[1])
    cell = ThreadCell()
    async with started(one, other):
        cell.prefill_gang, cell.decode_gang = one, other
        cell.prefill = await cell.attach(one.members, "prefill")
        cell.decode = await cell.attach(other.members, "decode")
        await cell.connect()
        yield cell
        await cell.disconnect()


@asynccontextmanager
async def elastic_cell(
    model_dir: Path,
    instances: int,
    *,
    tp: int = 1,
    kv_slots: int = 4096,
    quantum_ms: float = 50.0,
    kv_dtype: str = "auto",
    data_group: GroupMaker | None = STRICT,
) -> AsyncIterator[ThreadCell]:
    """Yield one gang that prefills and decodes, attached."""
    plan = GangPlan(
        model_dir=str(model_dir),
        role="elastic",
        instances=instances,
        tp=tp,
        kv_slots=kv_slots,
        quantum_ms=quantum_ms,
        kv_dtype=kv_dtype,
    )
    cell = ThreadCell()
    async with thread_gang(plan, data_group=data_group) as gang:
        cell.prefill_gang = cell.decode_gang = gang
        cell.prefill = cell.decode = await cell.attach(gang.members, "elastic")
        cell.epoch = "in place"
        yield cell
        await cell.disconnect()


def is_broken(rank: Rank) -> bool:
    """Return whether Serve would replace the rank's gang."""
    try:
        rank.check_health()
    except FaultError:
        return True
    return False
