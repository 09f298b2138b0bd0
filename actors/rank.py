"""One rank of a gang: an RPC server around an engine loop, which does what the gang's log says.

Four kinds of threads: the RPC thread runs an event loop and only files work; the engine thread
computes; on rank 0 the conductor's thread appends to the log; senders and receivers of KV wait for
the network. A Serve replica hosts a rank in production, a test or a script starts one with
`python -m csps.actors.host_rank`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from csps.actors.engine.choice import check_job
from csps.actors.engine.engine import Engine
from csps.actors.engine.in_place import kept_in_place
from csps.actors.engine.log_end import ConductorEnd, MemberEnd
from csps.actors.engine.loop import EngineLoop
from csps.actors.engine.move_run import leader_of, move_parts, ranks_of_move
from csps.actors.engine.open_log import STREAM, open_log
from csps.actors.engine.step_run import parts_of, ranks_of
from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer.link import KvLink
from csps.actors.launch_order import LaunchOrder
from csps.actors.layout import GangLayout
from csps.actors.mesh import (
    GroupMaker,
    HostedStore,
    InstanceGroup,
    Mesh,
    StoreAddress,
    join_store,
)
from csps.actors.model_fingerprint import model_fingerprint
from csps.actors.name_digest import name_digest
from csps.actors.rank_config import RankConfig
from csps.actors.rpc_thread import RpcThread
from csps.models.checkpoint import open_checkpoint
from csps.models.loading import read_network
from csps.protocols import schema
from csps.protocols.balance import balanced
from csps.protocols.conductor import Conductor, StepTask
from csps.protocols.errors import (
    ConfigError,
    ConnectionLost,
    FaultError,
    ProtocolError,
    Superseded,
)
from csps.protocols.fence import Fence
from csps.protocols.messages import (
    Attach,
    CancelRequest,
    ConnectKv,
    JoinBatch,
    Keep,
    RankDescription,
    RankStats,
    Release,
    Reserve,
)
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.row_move import MoveRow
from csps.protocols.rpc_server import Handler, Peer

_log = logging.getLogger(__name__)

CATCH_UP_S = 0.05
"""For reading what a holder has sent that seems silent: it may be this process that stood still."""
LOOP_END_S = 2.0
"""For the loop to end by itself when a rank closes; then its peers are cut off."""
THREADS_END_S = 5.0
"""For all threads to end that have waited for peers."""


class Rank:
    """A rank from `start` to `close`."""

    def __init__(
        self,
        config: RankConfig,
        *,
        secret: bytes,
        store: HostedStore | StoreAddress,
        data_group: GroupMaker | None = None,
    ) -> None:
        """
        Args:
            data_group: see `Mesh`; of the gang and of the instance.
        """
        self.config = config
        self._hosted = store
        self._data_group = data_group
        self._launches = LaunchOrder()
        self._secret = secret
        self._layout = GangLayout(world_size=config.world_size, tp=config.tp)
        self._rpc = RpcThread(self._handlers(), secret=secret, on_disconnect=self._router_gone)
        self._fence = Fence()
        self._router: Peer | None = None
        self._router_id = ""
        self._link: KvLink | None = None
        self._log: ConductorEnd | MemberEnd | None = None
        self._loop: EngineLoop | None = None
        self._groups: list[Mesh | InstanceGroup] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._closing = False

    # --- life ------------------------------------------------------------------------------

    def start(self) -> tuple[str, int]:
        """Load the weights, join the gang and serve; returns the RPC address.

        Blocks until every rank of the gang has arrived.
        """
        config = self.config
        torch.set_num_threads(config.threads)
        hosted = self._hosted
        store = hosted.store if isinstance(hosted, HostedStore) else join_store(hosted)
        instance = InstanceGroup(
            store,
            name=f"{config.gang_id}/instance{self._layout.instance_of(config.rank)}",
            rank=self._layout.tp_rank_of(config.rank),
            size=config.tp,
            device=config.device,
            host=config.host,
            data_group=self._data_group,
            launches=self._launches,
        )
        self._groups.append(instance)
        mesh = Mesh(
            store,
            name=config.gang_id,
            rank=config.rank,
            world_size=config.world_size,
            device=config.device,
            host=config.host,
            data_group=self._data_group,
            launches=self._launches,
        )
        self._groups.append(mesh)
        self.engine = self._build_engine(mesh, instance)
        self._log = open_log(config, store, self._store_address.host, self._secret)
        in_place = config.may_prefill and config.may_decode
        self._loop = EngineLoop(self.engine, self._notify, self._log, in_place=in_place)
        self._link = KvLink(config, self.engine, self._loop, self._notify, self._break)
        if isinstance(self._log, ConductorEnd):
            self._spawn("conductor", self._log.run)
        self._spawn("engine", self._loop.run)
        return self._rpc.start(config.host)

    def _build_engine(self, mesh: Mesh, instance: InstanceGroup) -> Engine:
        config = self.config
        dtype = getattr(torch, config.dtype)
        with open_checkpoint(Path(config.model_dir)) as checkpoint:
            network = read_network(
                checkpoint,
                tp_rank=instance.rank,
                tp_size=config.tp,
                dtype=dtype,
                device=config.device,
                all_reduce=instance.all_reduce if config.tp > 1 else None,
            )
            self._fingerprint = model_fingerprint(
                checkpoint,
                instance,
                dtype=config.dtype,
                device=config.device,
                threads=config.threads,
            )
        spec = network.spec
        pool = KvPool(
            layers=spec.layers,
            slots=config.kv_slots,
            kv_heads=len(network.layers[0].share.kv_heads),
            head_dim=spec.head_dim,
            dtype=dtype,
            device=config.device,
        )
        return Engine(
            network=network,
            pool=pool,
            mesh=mesh,
            layout=self._layout,
            device=torch.device(config.device),
        )

    def check_health(self) -> None:
        """Raise FaultError if a thread of this rank has died, or an iteration does not end."""
        if self._failure is not None:
            raise FaultError(f"rank {self.config.rank} is broken: {self._failure!r}")
        if self._loop is not None:
            self._loop.stream.check_progress()

    def close(self) -> None:
        """Stop serving; the router has drained before, whatever is left is dropped. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._log is not None:
            self._log.leave()
        _join([it for it in self._threads if it.name == "engine"], LOOP_END_S)
        kv_threads = self._link.threads if self._link is not None else []
        self._leave_groups()
        # Who comes back from a wait inside torch when the interpreter has ended brings the process
        # down.
        _join([*self._threads, *kv_threads], THREADS_END_S)
        self._rpc.close()

    def _spawn(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            if name == "engine":
                self._launches.take()
            try:
                body()
            except BaseException as exc:
                self._break(exc)
            else:
                self._end()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _break(self, exc: BaseException) -> None:
        """This rank cannot go on."""
        if self._closing or self._failure is not None:
            return
        known = isinstance(exc, FaultError)
        _log.error("rank %d is broken: %r", self.config.rank, exc, exc_info=None if known else exc)
        self._give_up(exc)

    def _end(self) -> None:
        """The log has ended: another rank is being closed, and this one will be."""
        if self._closing or self._failure is not None:
            return
        _log.info("rank %d ends, as its gang does", self.config.rank)
        self._give_up(FaultError("another rank of the gang was closed"))

    def _give_up(self, failure: BaseException) -> None:
        """Nobody shall wait for this rank, neither its peers nor the router."""
        self._failure = failure
        self._leave_groups()
        self._rpc.soon(self._hang_up)

    def _hang_up(self) -> None:
        if self._router is not None:
            self._router.end(ConnectionLost(f"rank {self.config.rank} cannot go on"))

    def _leave_groups(self) -> None:
        if self._log is not None:
            self._log.close()  # first: it tells the other ranks at once
        if self._link is not None:
            self._link.leave()
        for group in self._groups:
            group.close()

    # --- RPC -------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        return {
            "describe": lambda _payload, _peer: schema.pack(self._describe()),
            "stats": lambda _payload, _peer: schema.pack(self._stats()),
            "may_attach": self._may_attach,
            "attach": self._attach,
            "keep_alive": self._keep_alive,
            "connect_kv": self._connect_kv,
            "prefill": self._submit,
            "reserve": self._reserve,
            "join": self._join,
            "move": self._move,
            "cancel": self._cancel,
            "keep": self._keep,
            "release": self._release,
        }

    @property
    def _store_address(self) -> StoreAddress:
        return self._hosted.address if isinstance(self._hosted, HostedStore) else self._hosted

    @property
    def loop(self) -> EngineLoop:
        """What this rank does, once it was started."""
        assert self._loop is not None, "the rank was started"
        return self._loop

    @property
    def _kv_link(self) -> KvLink:
        assert self._link is not None, "the rank was started"
        return self._link

    @property
    def attached(self) -> bool:
        """A router uses this rank."""
        return self._router is not None

    async def _may_attach(self, payload: Any, peer: Peer) -> None:
        self.check_health()
        await self._check_fence(schema.unpack(Attach, payload).generation)

    async def _attach(self, payload: Any, peer: Peer) -> dict[str, Any]:
        self.check_health()
        message = schema.unpack(Attach, payload)
        await self._check_fence(message.generation)
        # From here on without giving the loop away: another router may be attaching as well.
        self._fence.check(message.generation, time.monotonic())
        if (former := self._router) is not peer:
            self._end_attachment()
            if former is not None:
                former.refuse(Superseded(f"router generation {message.generation} has taken over"))
            self._router, self._router_id = peer, message.router_id
        self._fence.take(message.generation, time.monotonic())
        return schema.pack(self._describe())

    async def _check_fence(self, generation: int) -> None:
        if self._fence.lapsed(time.monotonic()):
            await asyncio.sleep(CATCH_UP_S)
        self._fence.check(generation, time.monotonic())

    def _keep_alive(self, payload: Any, peer: Peer) -> None:
        if peer is self._router:
            self._fence.heard(time.monotonic())

    def _router_gone(self, peer: Peer) -> None:
        if peer is self._router:
            self._end_attachment()

    def _end_attachment(self) -> None:
        """Drop the work of a router that is gone, or that another one has replaced."""
        if self._router is None:
            return
        self._router = None
        self._fence.release()
        owner = self._owner
        self.loop.cancel_all()
        self._conduct(lambda conductor: conductor.end_owner(owner))

    def _require_attached(self, peer: Peer) -> None:
        """Two routers at once would be two sequencers."""
        if peer is not self._router:
            raise ProtocolError(f"{peer.identity} is not, or no longer, attached to this rank")

    def _submit(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        job = schema.unpack(PrefillJob, payload)
        if not self.config.may_prefill:
            raise ProtocolError("a decode rank runs no prefill jobs")
        try:
            check_job(job, self.engine.spec, in_place=self.config.may_decode)
        except ConfigError as error:
            # jobs come as notifications, which have no answer
            self.loop.refuse(job, error)
            raise
        if self.config.may_decode:
            job = kept_in_place(job)
        self.loop.submit(job, self._owner)
        task = StepTask(
            id=job.job_id,
            ranks=tuple(sorted(ranks_of(self._layout, job))),
            urgent=job.urgent,
            parts=parts_of(self.engine, balanced(job)).total,
            sequences=tuple(piece.rid for piece in job.pieces),
            rows=job.bounds[-1],
            owner=self._owner,
        )
        self._conduct(lambda conductor: conductor.submit(task))

    def _reserve(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        self._require_decoding()
        self.loop.reserve(schema.unpack(Reserve, payload), self._owner)

    def _join(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        self._require_decoding()
        row, owner = schema.unpack(JoinBatch, payload), self._owner
        tp = self.config.tp
        ranks = tuple(it * tp + r for it in sorted(set(row.instances)) for r in range(tp))
        self._conduct(
            lambda conductor: conductor.join(
                STREAM, row.rid, row.first_token, owner, budget=row.budget, ranks=ranks
            )
        )

    def _move(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        if self.config.role != "elastic":
            raise ProtocolError("rows are moved where their prompts are computed")
        move = schema.unpack(MoveRow, payload)
        self.loop.move(move, self._owner)
        task = StepTask(
            id=move.job_id,
            ranks=ranks_of_move(move.instances, self._layout),
            urgent=True,
            parts=move_parts(move, self.engine.spec.layers),
            sequences=(move.rid,),
            owner=self._owner,
            led_by=leader_of(move, self._layout),
            places=ranks_of_move(move.after.instances, self._layout),
        )
        self._conduct(lambda conductor: conductor.submit(task))

    def _cancel(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        rid = schema.unpack(CancelRequest, payload).rid
        self.loop.cancel(rid)
        self._conduct(lambda conductor: conductor.cancel(rid))

    def _keep(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        message = schema.unpack(Keep, payload)
        self._conduct(lambda conductor: conductor.keep(message.rid, message.released))

    def _release(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        message = schema.unpack(Release, payload)
        self._conduct(lambda conductor: conductor.release(message.rid, message.spans))

    def _conduct(self, event: Callable[[Conductor], None]) -> None:
        """Tell the conductor, if this rank hosts it."""
        if isinstance(self._log, ConductorEnd):
            self._log.tell(event)

    @property
    def _owner(self) -> int:
        """The present router's attachment, as the log names it."""
        return name_digest(self._router_id)

    def _require_decoding(self) -> None:
        if not self.config.may_decode:
            raise ProtocolError("a prefill rank decodes nothing")

    def _describe(self) -> RankDescription:
        config, spec = self.config, self.engine.spec
        address = self._store_address
        pool = self.engine.pool
        token_bytes = 2 * spec.layers * pool.kv_heads * pool.head_dim * pool.k.element_size()
        return RankDescription(
            gang_id=config.gang_id,
            role=config.role,
            rank=config.rank,
            world_size=config.world_size,
            tp=config.tp,
            location=config.location,
            kv_slots=config.kv_slots,
            kv_bytes_per_token=token_bytes,
            layers=spec.layers,
            model=config.model_dir,
            model_fingerprint=self._fingerprint,
            max_positions=min(config.max_positions or spec.max_positions, spec.max_positions),
            store_host=address.host,
            store_port=address.port,
            pid=os.getpid(),
        )

    def _stats(self) -> RankStats:
        pool, loop = self.engine.pool, self.loop
        return RankStats(
            rank=self.config.rank,
            kv_slots=pool.capacity,
            kv_used=pool.used,
            requests=len(loop.stream.reservations),
            running=loop.stream.running,
            waiting=loop.waiting,
            iterations=loop.stream.iterations,
            iterating_s=loop.stream.iterating_s,
        )

    async def _connect_kv(self, payload: Any, peer: Peer) -> None:
        self._require_attached(peer)
        message = schema.unpack(ConnectKv, payload)
        link = self._kv_link
        link.begin(message.epoch)
        # The group forms in a thread of its own: it blocks until all ranks of both gangs arrive.
        connection = await self._rpc.in_thread("connect-kv", lambda: link.join(message))
        link.use(connection, message.epoch)

    # --- to the router ---------------------------------------------------------------------

    def _notify(self, method: str, message: Any) -> None:
        """From any thread; what nobody listens to is dropped, as its work was cancelled."""
        self._rpc.soon(lambda: self._tell_router(method, message))

    def _tell_router(self, method: str, message: Any) -> None:
        if self._router is not None and not self._router.closed.done():
            self._router.notify(method, schema.pack(message))


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for threads to end, so long for all of them together."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
