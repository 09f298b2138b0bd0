"""Asks paced ranks over RPC, without a router: what a token takes when nothing is in between."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from csps.protocols.gang_client import GangClient
from csps.protocols.gang_members import GangMembers, RankAddress
from csps.protocols.messages import JoinBatch, Reserve
from csps.protocols.placement import KvShare
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.sampling import Sampling
from csps.protocols.schema import pack, unpack
from csps.protocols.span import Span
from csps.protocols.tokens import Tokens
from paced.cell import SECRET

ANSWER_S = 20.0
"""For one whole answer."""


def members(data: dict[str, Any]) -> GangMembers:
    """What `cell` has printed of a gang."""
    return GangMembers(
        gang_id=data["gang_id"], ranks=tuple(RankAddress(**it) for it in data["ranks"])
    )


class Driver:
    """Both gangs, and the times of their tokens."""

    def __init__(self, listing: dict[str, Any]) -> None:
        self._prefill = GangClient("prefill", members(listing["prefill"]), self._notified)
        self._decode = GangClient("decode", members(listing["decode"]), self._notified)
        self._stamps: list[float] = []
        self._heard: Counter[str] = Counter()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Attach to all ranks."""
        for gang in (self._prefill, self._decode):
            await gang.connect(secret=SECRET, router_id="driver")
            await gang.attach(1)

    async def close(self) -> None:
        """Hang up."""
        await self._prefill.close()
        await self._decode.close()

    async def ask(self, rid: int, prompt: int, tokens: int) -> list[float]:
        """`time.monotonic()` of each token of an answer."""
        self._stamps, self._heard = [], Counter()
        shares = (KvShare(instance=0, span=Span(start=0, stop=prompt)),)
        sampling = Sampling(max_tokens=tokens)
        reserve = Reserve(
            rid=rid, epoch="e", shares=shares, master=0, prompt_length=prompt, sampling=sampling
        )
        await self._decode.call_all("reserve", pack(reserve))
        piece = PrefillPiece(
            rid=rid, start=0, length=prompt, destinations=shares, sampling=sampling
        )
        job = PrefillJob(job_id=rid, group=(0,), bounds=(0, prompt), pieces=(piece,))
        self._prefill.notify_all("prefill", pack(job))
        await self._until("tokens", 1)
        await self._until("landed", 1)
        self._decode.notify(0, "join", pack(JoinBatch(rid=rid, first_token=1)))
        # Of every rank, or the last one's would be taken for the next request's.
        await self._until("freed", self._decode.world_size)
        return self._stamps

    def _notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if method == "tokens":
            rows = len(unpack(Tokens, payload).rids)
            self._stamps += [time.monotonic()] * rows
        self._heard[method] += 1
        self._news.set()

    async def _until(self, method: str, count: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            while self._heard[method] < count:
                self._news.clear()
                await self._news.wait()
