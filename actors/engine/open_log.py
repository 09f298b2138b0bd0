"""How a rank comes to its end of the gang's log."""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from csps.actors.engine.log_end import ConductorEnd, MemberEnd
from csps.actors.rank_config import RankConfig
from csps.actors.rendezvous import JOIN_DEADLINE
from csps.protocols.conductor import Conductor
from csps.protocols.log_connection import join_log
from csps.protocols.log_listener import LogListener

STREAM = 0
"""The one stream of a gang that may decode."""


def open_log(
    config: RankConfig, store: Store, store_host: str, secret: bytes
) -> ConductorEnd | MemberEnd:
    """Rank 0 hosts the conductor; the others learn from the gang's store where.

    Args:
        store_host: of rank 0, which serves the store as well.
    """
    key, deadline_s = f"{config.gang_id}/log", JOIN_DEADLINE.total_seconds()
    if config.rank:
        port = int(store.get(key))
        return MemberEnd(
            join_log(store_host, port, rank=config.rank, secret=secret, deadline_s=deadline_s)
        )
    conductor = Conductor(config.world_size, int(config.quantum_ms * 1e6))
    if config.may_decode:
        ranks = range(config.world_size)
        conductor.open_stream(STREAM, tuple(ranks), masters=tuple(ranks[:: config.tp]))
    listener = LogListener(config.host)
    try:
        store.set(key, str(listener.port))
        others = range(1, config.world_size)
        members = listener.accept(others, secret=secret, deadline_s=deadline_s)
    finally:
        listener.close()
    return ConductorEnd(conductor, members)
