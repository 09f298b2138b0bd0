"""One rank of a gang: an RPC server around an engine loop that executes the gang's log.

A rank has four kinds of threads. The RPC thread runs an event loop and only queues work. The engine
thread computes. On rank 0 the sequencer's thread appends to the log. KV senders and receivers wait
for the network. In production a Serve replica hosts a rank; a test or a script starts one with
`python -m csps.actors.host_rank`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.process_group import GroupMaker, InstanceGroup, LaunchOrder
from csps.actors.comm.rendezvous import HostedStore, RendezvousStore, StoreAddress, join_store
from csps.actors.engine.log_end import MemberEnd, SequencerEnd
from csps.actors.engine.loop import EngineLoop
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.worker.kv_link import KvLinkEnd
from csps.actors.worker.rank_commands import RankCommands
from csps.actors.worker.rank_config import RankConfig
from csps.actors.worker.router_connection import RouterAttachment, RpcThread
from csps.actors.worker.saved_kv import SavedKv, open_files
from csps.actors.worker.startup import load_engine, open_log, warm_up
from csps.models.tokenizers.grammar import start_grammar_thread
from csps.protocols.core.errors import FaultError
from csps.protocols.gang.messages import Attach, ConnectKv, Notify, RankDescription, RankStats
from csps.protocols.rpc import schema
from csps.protocols.rpc.server import Handler, Peer
from csps.protocols.rpc.tls import Tls

_log = logging.getLogger(__name__)

LOOP_END_S = 2.0
"""Seconds for the loop to end by itself when a rank closes; then its peers are disconnected."""
THREADS_END_S = 5.0
"""Seconds for threads that waited for peers to end."""


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
        """Args:
        data_group: see `Mesh`; for the gang and for the instance.
        """
        self.config = config
        self._hosted = store
        self._store: RendezvousStore | None = None
        self._data_group = data_group
        self._launches = LaunchOrder()
        self._secret = secret
        self._tls = None if config.tls is None else Tls.load(config.tls)
        self._layout = GangLayout(world_size=config.world_size, tp=config.tp)
        self._attachment = RouterAttachment()
        self._rpc = RpcThread(
            secret=secret, on_disconnect=self._attachment.disconnected, tls=self._tls
        )
        self._notify: Notify = partial(self._rpc.soon, self._attachment.notify)
        self._link: KvLinkEnd | None = None
        self._log: SequencerEnd | MemberEnd | None = None
        self._loop: EngineLoop | None = None
        self._saved: SavedKv | None = None
        self._groups: list[Mesh | InstanceGroup] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._closing = False

    # --- start and close ---------------------------------------------------------------------

    def start(self) -> tuple[str, int]:
        """Load the weights, join the gang and serve; return the RPC address.

        Blocks until every rank of the gang has arrived.
        """
        config = self.config
        torch.set_num_threads(config.threads)
        hosted = self._hosted
        store = self._store = (
            hosted.store
            if isinstance(hosted, HostedStore)
            else join_store(hosted, self._secret, self._tls)
        )
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
        self.engine, self._fingerprint = load_engine(config, mesh, instance)
        files = open_files(config, self.engine, self._fingerprint)
        self._log = open_log(config, store, self._store_address.host, self._secret)
        # After the gang has met, which has a deadline, and before anybody can reach this rank.
        warm_up(self.engine)
        in_place = config.may_prefill and config.may_decode
        self._loop = EngineLoop(self.engine, self._notify, self._log, in_place=in_place)
        join = partial(join_store, secret=self._secret, tls=self._tls)
        self._link = KvLinkEnd(config, join, self.engine, self._loop, self._notify, self._break)
        if isinstance(self._log, SequencerEnd):
            self._spawn("sequencer", self._log.run)
        self._spawn("engine", self._loop.run)
        if files is not None:
            self._saved = SavedKv(files, self.engine, self._loop, self._notify)
        commands = RankCommands(
            config, self.engine, self._loop, self._log, self._attachment, self._saved
        )
        self._attachment.on_end = commands.end
        address = self._rpc.start(config.host, {**self._handlers(), **commands.handlers()})
        _log.info("rank %d of gang %s serves at %s", config.rank, config.gang_id, address)
        return address

    def check_health(self) -> None:
        """Raise FaultError if a thread of this rank has died or an iteration does not end."""
        if self._failure is not None:
            raise FaultError(f"rank {self.config.rank} is broken: {self._failure!r}")
        if self._loop is not None:
            self._loop.decode_batch.check_progress()

    def close(self) -> None:
        """Stop serving; unfinished work is dropped. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._log is not None:
            self._log.leave()
        _join([thread for thread in self._threads if thread.name == "engine"], LOOP_END_S)
        kv_threads = list(self._link.threads) if self._link is not None else []
        if self._saved is not None:
            self._saved.close()
            kv_threads += self._saved.threads
        self._leave_groups()
        # A thread that returns from a wait inside torch after the interpreter has ended crashes the
        # process.
        _join([*self._threads, *kv_threads], THREADS_END_S)
        self._rpc.close()
        if isinstance(self._hosted, HostedStore):
            self._hosted.close()
        elif self._store is not None:
            self._store.close()

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
        if name == "engine":
            start_grammar_thread(thread)
        else:
            thread.start()

    def _break(self, exc: BaseException) -> None:
        """Give up this rank because of an error."""
        if self._closing or self._failure is not None:
            return
        known = isinstance(exc, FaultError)
        _log.error("rank %d is broken: %r", self.config.rank, exc, exc_info=None if known else exc)
        self._give_up(exc)

    def _end(self) -> None:
        """Give up this rank because the log has ended: another rank is being closed, as this one
        will be."""
        if self._closing or self._failure is not None:
            return
        _log.info("rank %d: shutting down with its gang", self.config.rank)
        self._give_up(FaultError("another rank of the gang was closed"))

    def _give_up(self, failure: BaseException) -> None:
        """Disconnect from the peers and the router, so that nothing waits for this rank."""
        self._failure = failure
        self._leave_groups()
        why = f"rank {self.config.rank} cannot go on"
        self._rpc.soon(self._attachment.disconnect, why)

    def _leave_groups(self) -> None:
        if self._log is not None:
            self._log.close()  # first, because the other ranks notice it at once
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
            "keep_alive": lambda _payload, peer: self._attachment.heartbeat(peer),
            "connect_kv": self._connect_kv,
        }

    @property
    def _store_address(self) -> StoreAddress:
        return self._hosted.address if isinstance(self._hosted, HostedStore) else self._hosted

    @property
    def loop(self) -> EngineLoop:
        """Return the engine loop of a started rank."""
        assert self._loop is not None, f"rank {self.config.rank} is used before it was started"
        return self._loop

    @property
    def _kv_link(self) -> KvLinkEnd:
        assert self._link is not None, f"rank {self.config.rank} is used before it was started"
        return self._link

    @property
    def attached(self) -> bool:
        """Return whether a router commands this rank."""
        return self._attachment.attached

    async def _may_attach(self, payload: Any, peer: Peer) -> None:
        self.check_health()
        await self._attachment.may_attach(schema.unpack(Attach, payload).generation)

    async def _attach(self, payload: Any, peer: Peer) -> dict[str, Any]:
        self.check_health()
        await self._attachment.attach(schema.unpack(Attach, payload), peer)
        return schema.pack(self._describe())

    def _describe(self) -> RankDescription:
        config, spec = self.config, self.engine.spec
        address = self._store_address
        pool = self.engine.pool
        return RankDescription(
            gang_id=config.gang_id,
            role=config.role,
            rank=config.rank,
            world_size=config.world_size,
            tp=config.tp,
            location=config.location,
            kv_slots=config.kv_slots,
            window=spec.window or 0 if pool.windowed else 0,
            window_slots=config.window_slots,
            kv_bytes_per_token=spec.layers * pool.layer_bytes,
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
            kv_slots=pool.slots.capacity,
            kv_used=pool.slots.used,
            window_used=0 if pool.window_slots is None else pool.window_slots.used,
            requests=len(loop.decode_batch.reservations),
            running=loop.decode_batch.running,
            waiting=loop.waiting,
            iterations=loop.decode_batch.iterations,
            iterating_s=loop.decode_batch.iterating_s,
            exchange_s=loop.decode_batch.exchanges.under_way_s,
            communication_s=loop.decode_batch.exchanges.waited_s,
        )

    async def _connect_kv(self, payload: Any, peer: Peer) -> None:
        self._attachment.require(peer)
        message = schema.unpack(ConnectKv, payload)
        link = self._kv_link
        link.begin(message.epoch)
        _log.debug("rank %d: joining KV connection %s", self.config.rank, message.epoch)
        # The group forms in a thread of its own: it blocks until all ranks of both gangs arrive.
        connection = await self._rpc.in_thread(
            "connect-kv", lambda: link.join(message), KvConnection.close
        )
        link.use(connection, message.epoch)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for threads to end, for at most this time altogether."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
