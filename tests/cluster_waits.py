"""Waiting until a cluster has both gangs and the connection between them."""

from __future__ import annotations

import asyncio

from csps.services.cluster.attachment import Cluster
from csps.services.cluster.kv_links import KvLink

POLL_S = 0.001


async def linked(cluster: Cluster, deadline_s: float) -> KvLink:
    """Return the connection, as soon as it is open."""
    try:
        async with asyncio.timeout(deadline_s):
            while cluster.link is None:  # noqa: ASYNC110 (a cluster has no event for it)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not linked: {cluster.trouble}") from None
    return cluster.link
