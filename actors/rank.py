"""One rank of a gang: an RPC server around a prefill loop, a decode loop, or both.

Three kinds of threads: the RPC thread runs an event loop and only files work; an engine thread
per loop computes; receivers and completers of KV wait for the network. A Serve replica hosts a
rank in production, a test or a script starts one with `python -m csps.actors.rank`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csps.actors.bridge import Bridge
from csps.actors.decode import DecodeLoop
from csps.actors.engine import Engine
from csps.actors.kv_pool import KvPool
from csps.actors.landing import Landing
from csps.actors.layout import GangLayout
from csps.actors.mesh import HostedStore, InstanceGroup, Mesh, StoreAddress, join_store
from csps.actors.prefill import PrefillLoop
from csps.actors.rpc_thread import RpcThread
from csps.models.loading import load_network
from csps.protocols import schema
from csps.protocols.errors import FaultError, ProtocolError
from csps.protocols.messages import (
    Attach,
    CancelRequest,
    ConnectBridge,
    JoinBatch,
    PrefillJob,
    RankDescription,
    RankStats,
    Reserve,
    Role,
)
from csps.protocols.rpc_server import Handler, Peer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What a rank is told at birth."""

    model_dir: str
    role: Role
    rank: int
    world_size: int
    """Ranks of the gang."""
    tp: int = 1
    gang_id: str
    """New for every incarnation of a gang."""
    kv_slots: int
    """Tokens that the rank's KV pool can hold."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    """Torch threads of this process."""
    host: str = "127.0.0.1"
    """Address that peers and the router reach this rank at."""
    location: str = "0-0-0"
    """Rack-Server-GPU id."""
    max_positions: int | None = None
    """Limit of prompt and answer; None takes the checkpoint's."""


class Rank:
    """A rank from `start` to `close`."""

    def __init__(
        self, config: RankConfig, *, secret: bytes, store: HostedStore | StoreAddress
    ) -> None:
        self.config = config
        self._hosted = store
        self._layout = GangLayout(world_size=config.world_size, tp=config.tp)
        self._rpc = RpcThread(self._handlers(), secret=secret, on_disconnect=self._router_gone)
        self._router: Peer | None = None
        self._router_id = ""
        self._bridge: Bridge | None = None
        self._landing: Landing | None = None
        self._prefill: PrefillLoop | None = None
        self._decode: DecodeLoop | None = None
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
        place: dict[str, str] = {"device": config.device, "host": config.host}
        self._instance = InstanceGroup(
            store,
            name=f"{config.gang_id}/instance{self._layout.instance_of(config.rank)}",
            rank=self._layout.tp_rank_of(config.rank),
            size=config.tp,
            **place,
        )
        mesh = Mesh(
            store, name=config.gang_id, rank=config.rank, world_size=config.world_size, **place
        )
        self.engine = self._build_engine(mesh)
        if config.role != "decode":
            self._prefill = PrefillLoop(self.engine, self._notify)
            self._spawn("prefill", self._prefill.run)
        if config.role != "prefill":
            self._decode = DecodeLoop(self.engine, self._notify)
            self._spawn("decode", self._decode.run)
        return self._rpc.start(config.host)

    def _build_engine(self, mesh: Mesh) -> Engine:
        config = self.config
        dtype = getattr(torch, config.dtype)
        network = load_network(
            Path(config.model_dir),
            tp_rank=self._layout.tp_rank_of(config.rank),
            tp_size=config.tp,
            dtype=dtype,
            device=config.device,
            all_reduce=self._instance.all_reduce if config.tp > 1 else None,
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
        """Raise FaultError if a loop of this rank has died."""
        if self._failure is not None:
            raise FaultError(f"rank {self.config.rank} is broken: {self._failure!r}")

    def close(self) -> None:
        """Stop serving; the router has drained before, whatever is left is dropped."""
        self._closing = True
        if self._decode is not None:
            self._decode.close()
        if self._prefill is not None:
            self._prefill.close()
        self._leave_bridge()
        self._rpc.close()

    def _spawn(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as exc:
                if not self._closing:
                    self._failure = exc
                    _log.exception("the %s loop of rank %d died", name, self.config.rank)

        threading.Thread(target=run, name=name, daemon=True).start()

    # --- RPC -------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        return {
            "describe": lambda _payload, _peer: schema.pack(self._describe()),
            "attach": self._attach,
            "connect_bridge": self._connect_bridge,
            "prefill": lambda payload, _: self._prefill_loop.submit(
                schema.unpack(PrefillJob, payload)
            ),
            "reserve": lambda payload, _: self._decode_loop.reserve(
                schema.unpack(Reserve, payload), self._router_id
            ),
            "join": lambda payload, _: self._decode_loop.join(schema.unpack(JoinBatch, payload)),
            "cancel": lambda payload, _: self._cancel(schema.unpack(CancelRequest, payload)),
            "stats": lambda _payload, _peer: schema.pack(self._stats()),
        }

    @property
    def _prefill_loop(self) -> PrefillLoop:
        if self._prefill is None:
            raise ProtocolError(f"a {self.config.role} rank runs no prefill jobs")
        return self._prefill

    @property
    def _decode_loop(self) -> DecodeLoop:
        if self._decode is None:
            raise ProtocolError(f"a {self.config.role} rank decodes nothing")
        return self._decode

    def _attach(self, payload: Any, peer: Peer) -> dict[str, Any]:
        router_id = schema.unpack(Attach, payload).router_id
        if router_id != self._router_id:
            self._drop_work()
            self._router_id = router_id
            if self._decode is not None:
                self._decode.drop_strangers(router_id)
        self._router = peer
        return schema.pack(self._describe())

    def _router_gone(self, peer: Peer) -> None:
        if peer is self._router:
            self._router = None
            self._drop_work()

    def _drop_work(self) -> None:
        if self._prefill is not None:
            self._prefill.cancel_all()
        if self._decode is not None:
            self._decode.cancel_all()

    def _cancel(self, request: CancelRequest) -> None:
        if self._prefill is not None:
            self._prefill.cancel(request.rid)
        if self._decode is not None:
            self._decode.cancel(request.rid)

    def _describe(self) -> RankDescription:
        config, spec = self.config, self.engine.spec
        address = self._hosted.address if isinstance(self._hosted, HostedStore) else self._hosted
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
            model_fingerprint=fingerprint(Path(config.model_dir), config.dtype),
            max_positions=min(config.max_positions or spec.max_positions, spec.max_positions),
            store_host=address.host,
            store_port=address.port,
            pid=os.getpid(),
        )

    def _stats(self) -> RankStats:
        pool = self.engine.pool
        return RankStats(
            rank=self.config.rank,
            kv_slots=pool.capacity,
            kv_used=pool.used,
            requests=self._decode.reserved if self._decode else 0,
            running=self._decode.running if self._decode else 0,
            waiting=self._prefill.waiting if self._prefill else 0,
            iterations=self._decode.iterations if self._decode else 0,
        )

    # --- bridge ----------------------------------------------------------------------------

    async def _connect_bridge(self, payload: Any, _: Peer) -> None:
        connection = schema.unpack(ConnectBridge, payload)
        self._leave_bridge()
        # The group forms in a thread of its own: it blocks until all ranks of both gangs arrive.
        bridge = await self._rpc.in_thread("connect-bridge", lambda: self._join_bridge(connection))
        self._bridge = bridge
        if self._prefill is not None:
            self._prefill.use_bridge(bridge)
        if self._decode is not None:
            self._landing = Landing(
                bridge,
                self.engine.pool,
                rank=self.config.rank,
                find=self._decode.find,
                on_landed=lambda landed: self._notify("landed", landed),
                on_failed=lambda failed: self._notify("failed", failed),
            )

    def _join_bridge(self, connection: ConnectBridge) -> Bridge:
        store = join_store(StoreAddress(connection.store_host, connection.store_port))
        return Bridge(
            store,
            connection,
            rank=self.config.rank,
            is_decode=self.config.role != "prefill",
            device=self.config.device,
            host=self.config.host,
        )

    def _leave_bridge(self) -> None:
        if self._landing is not None:
            self._landing.close()
        elif self._bridge is not None:
            self._bridge.close()
        self._landing = self._bridge = None

    # --- to the router ---------------------------------------------------------------------

    def _notify(self, method: str, message: Any) -> None:
        """From any thread; what nobody listens to is dropped, as its work was cancelled."""
        self._rpc.soon(lambda: self._tell_router(method, message))

    def _tell_router(self, method: str, message: Any) -> None:
        if self._router is not None and not self._router.closed.done():
            self._router.notify(method, schema.pack(message))


def fingerprint(model_dir: Path, dtype: str) -> str:
    """Digest of what two gangs must share to exchange KV."""
    digest = hashlib.blake2b((model_dir / "config.json").read_bytes(), digest_size=8)
    digest.update(dtype.encode())
    return digest.hexdigest()
