"""A client hears of a long prompt's progress while ranks wait for a slow link."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gang_driver import GangPlan, in_threads, members_of
from gang_processes import RankProcess
from http_over_ranks import OPTIONS, PlacedGang, served_by
from testbed import iproute
from testbed.link import Link
from testbed.network import Server, Testbed, two_servers

from csps.protocols.gang.members import GangMembers
from csps.services.scheduling.policies.registry import make_policy
from csps.services.settings.settings import Settings

pytestmark = [pytest.mark.testbed, pytest.mark.slow]

TOKENS = 32_000
LINK = Link.parse("16mbit")
"""A layer of the prompt takes seconds to cross it."""
EVENT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class BedGang:
    """A gang whose ranks are processes on the servers of a bed."""

    plan: GangPlan
    members: GangMembers
    ranks: Sequence[Any] = ()


@asynccontextmanager
async def bed_gang(plan: PlacedGang, servers: Sequence[Server]) -> AsyncIterator[BedGang]:
    """Yield a gang with a rank on each server."""
    ranks: list[RankProcess] = []
    try:
        store = None
        for number, server in enumerate(servers):
            with iproute.entered(server.namespace):
                fields = {**plan.rank_fields(number), "host": server.address}
                ranks.append(RankProcess(fields, store))
            if store is None:
                [store] = await in_threads([ranks[0].store])
        addresses = await in_threads([rank.start for rank in ranks])
        yield BedGang(plan=plan, members=members_of(plan, addresses))
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.timeout(300)
async def test_progress_comes_every_second_and_ends_before_the_first_token(
    tiny_llama: Path,
) -> None:
    with two_servers(LINK) as bed:
        stamped = await streamed(bed, tiny_llama)
    events = [event for _, event in stamped]
    reports = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    first_text = next(number for number, event in enumerate(events) if event.get("choices"))
    assert len(reports) == first_text, "a report after the first token"
    for field in ("cache", "processed", "time_ms"):
        values = [report[field] for report in reports]
        assert values == sorted(values), field
    processed = [report["processed"] for report in reports]
    assert {report["total"] for report in reports} == {TOKENS}
    assert processed[0] < processed[len(processed) // 2] < processed[-1] == TOKENS
    times = [at for at, _ in stamped[: first_text + 1]]
    assert times[-1] - times[0] > 3 * EVENT_S, "the link is not slow"
    assert max(later - earlier for earlier, later in pairwise(times)) <= EVENT_S


async def streamed(bed: Testbed, model: Path) -> list[tuple[float, dict[str, Any]]]:
    """Ask for a streamed answer to a long prompt; return its events and when each came, after the
    time of the request itself."""
    near, far = bed.servers
    plan = {"model_dir": str(model), "kv_slots": TOKENS + 64}
    settings = Settings(model=str(model), served_model_name="tiny")
    body = {
        "model": "tiny",
        "prompt": [3 + number % 200 for number in range(TOKENS)],
        "max_tokens": 3,
        "stream": True,
        "return_progress": True,
    }
    async with AsyncExitStack() as stack:
        # This process is on the near server: its router, its client, and what they start.
        stack.enter_context(iproute.entered(near.namespace))
        prefill = PlacedGang(role="prefill", instances=2, servers=2, **plan)
        decode = PlacedGang(role="decode", instances=1, **plan)
        gangs = [
            await stack.enter_async_context(bed_gang(prefill, [near, far])),
            await stack.enter_async_context(bed_gang(decode, [near])),
        ]
        server = await stack.enter_async_context(
            served_by(gangs, settings, policy=make_policy("csps", OPTIONS))
        )
        before = bed.traffic()
        stamped: list[tuple[float, dict[str, Any]]] = []
        async with server.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    stamped.append((time.monotonic(), json.loads(line[6:])))
        crossed = (bed.traffic() - before).between_bytes
    # Keys and values alone of half the prompt.
    assert crossed > TOKENS // 2 * 4 * 2 * 2 * 16, "one server computed the prompt"
    return stamped
