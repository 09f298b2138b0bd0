"""A driver of paced ranks over RPC without a router, to measure what a token takes by itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.protocols.gang.messages import JoinBatch, ReserveKv, SampledTokens
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import pack, unpack
from paced.cell import SECRET

ANSWER_S = 20.0
"""Time limit of a whole answer."""


def members(data: dict[str, Any]) -> GangMembers:
    """Return the ranks that `cell` has printed of a gang."""
    return GangMembers(
        gang_id=data["gang_id"], ranks=tuple(RankAddress(**rank) for rank in data["ranks"])
    )


class Driver:
    """Driver of both gangs that records the times of their tokens."""

    def __init__(self, listing: dict[str, Any]) -> None:
        self._prefill = GangClient("prefill", members(listing["prefill"]), self._notified)
        self._decode = GangClient("decode", members(listing["decode"]), self._notified)
        self._stamps: list[float] = []
        self._counts: Counter[str] = Counter()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Attach to all ranks."""
        for gang in (self._prefill, self._decode):
            await gang.connect(secret=SECRET, router_id="driver")
            await gang.attach(1)

    async def close(self) -> None:
        """Close the connections."""
        await self._prefill.close()
        await self._decode.close()

    async def ask(self, sequence_id: int, prompt: int, tokens: int) -> list[float]:
        """Return `time.monotonic()` of each token of an answer."""
        self._stamps, self._counts = [], Counter()
        slices = (KvSlice(0, 0, prompt),)
        reserve = ReserveKv(
            sequence_id=sequence_id,
            epoch="e",
            slices=slices,
            master=0,
            prompt_tokens=prompt,
            output_tokens=tokens,
        )
        await self._decode.call_all("reserve", pack(reserve))
        chunk = PrefillChunk(sequence_id, 0, prompt, destinations=slices, decoded=tokens > 1)
        job = PrefillStep(step_id=sequence_id, group=(0,), bounds=(0, prompt), chunks=(chunk,))
        self._prefill.notify_all("prefill", pack(job))
        await self._until("tokens", 1)
        await self._until("received", 1)
        self._decode.notify(0, "join", pack(JoinBatch(sequence_id=sequence_id, first_token=1)))
        # Of every rank, or the last one's would be taken for the next request's.
        await self._until("freed", self._decode.world_size)
        return self._stamps

    def _notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if method == "tokens":
            rows = len(unpack(SampledTokens, payload).sequence_ids)
            self._stamps += [time.monotonic()] * rows
        self._counts[method] += 1
        self._news.set()

    async def _until(self, method: str, count: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            while self._counts[method] < count:
                self._news.clear()
                await self._news.wait()
