"""Gangs that answer RPC like ranks, in the times of a model.

All ranks of a gang share one event loop. Every rank receives every message, like real ones. The
gang acts on the messages of its first rank, whose connection keeps the router's order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel, GangModel
from csps.protocols.gang.members import GangMembers, GangRole, RankAddress
from csps.protocols.gang.messages import RankDescription
from csps.protocols.rpc.schema import pack
from csps.protocols.rpc.server import Handler, Peer, RpcServer
from paced.clock import PacedTimeline

FINGERPRINT = "paced"


class PacedRank:
    """One rank's server, and its connection to the router."""

    def __init__(
        self, description: RankDescription, handlers: Mapping[str, Handler], secret: bytes
    ) -> None:
        self._description = description
        self._router: Peer | None = None
        self.server = RpcServer(
            {
                "describe": lambda _payload, _peer: pack(description),
                "may_attach": lambda _payload, _peer: None,
                "attach": self._attach,
                "keep_alive": lambda _payload, _peer: None,
                "connect_kv": lambda _payload, _peer: None,
                **handlers,
            },
            secret=secret,
        )

    def _attach(self, payload: Any, peer: Peer) -> Any:
        self._router = peer
        return pack(self._description)

    def notify(self, method: str, message: Any) -> None:
        """Notify the router, if it is connected."""
        if self._router is not None and not self._router.closed.done():
            self._router.notify(method, pack(message))


class PacedRanks:
    """The servers of a gang.

    Args:
        role: role of the gang.
        cluster: the model, with instances, locations and slots.
        handlers: handlers of the first rank; the others ignore the same messages.
        secret: secret of the cluster.
    """

    def __init__(
        self,
        role: GangRole,
        cluster: ClusterModel,
        handlers: Mapping[str, Handler],
        secret: bytes,
    ) -> None:
        model = cluster.gang(role)
        assert model.tp == 1, "paced instances have one rank each"
        deaf: dict[str, Handler] = dict.fromkeys(handlers, lambda _payload, _peer: None)
        self._gang_id = f"paced-{role}"
        self.ranks = [
            PacedRank(
                _description(role, self._gang_id, rank, model, cluster),
                handlers if rank == 0 else deaf,
                secret,
            )
            for rank in range(len(model.instances))
        ]

    async def start(self) -> GangMembers:
        """Listen on free ports of loopback."""
        addresses = [await rank.server.start("127.0.0.1") for rank in self.ranks]
        return GangMembers(
            gang_id=self._gang_id,
            ranks=tuple(
                RankAddress(rank=rank, host=host, port=port)
                for rank, (host, port) in enumerate(addresses)
            ),
        )

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(rank.server.close(0.0) for rank in self.ranks))


def _description(
    role: GangRole, gang_id: str, rank: int, model: GangModel, cluster: ClusterModel
) -> RankDescription:
    return RankDescription(
        gang_id=gang_id,
        role=role,
        rank=rank,
        world_size=len(model.instances),
        tp=1,
        location=model.instances[rank].location,
        kv_slots=model.instances[rank].kv_slots,
        kv_bytes_per_token=cluster.kv_bytes_per_token,
        layers=cluster.layers,
        model=cluster.name,
        model_fingerprint=FINGERPRINT,
        max_positions=cluster.max_positions,
        store_host="127.0.0.1",
        store_port=1,
        pid=os.getpid(),
    )


class Words:
    """Answers of paced ranks: tokens of the vocabulary in sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def token(self, index: int) -> int:
        """Return the answer's token at a position."""
        return self._tokens[index % len(self._tokens)]


def timeline() -> PacedTimeline:
    """Return the timeline of all gangs of this process, on the running loop."""
    return PacedTimeline()
