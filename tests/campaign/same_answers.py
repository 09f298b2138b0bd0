"""The same requests with the same seeds under other policies, placements, batches and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gang_driver import ANSWER_S
from gang_threads import eventually
from real_cell import ELASTIC, PAIR, Cell, real_cell

from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import SampledToken, Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import PrefixKey, RequestSpec
from csps.services.scheduling.events.limits import ReuseSettings

TOLERANCE = 1e-4
"""Difference of the log-probabilities of one token between two runs, in fp32 on CPUs."""
TOKENS, ALTERNATIVES = 24, 3
LENGTHS = (5, 33, 90, 300, 600)
REUSE = ReuseSettings(enabled=True, max_share=1.0, block_tokens=16)

WAYS: dict[str, dict[str, Any]] = {
    "csps": {"roles": PAIR},
    "csps, one rank": {"roles": PAIR, "instances": 1},
    "csps, three instances": {"roles": PAIR, "instances": 3},
    "csps, two ranks an instance": {"roles": PAIR, "tp": 2},
    "csps, cached": {"roles": PAIR, "reuse": REUSE},
    "fixed_sp": {"roles": PAIR},
    "tetris": {"roles": PAIR},
    "context_parallel": {"roles": PAIR},
    "context_parallel, elastic": {"roles": ELASTIC, "instances": 3},
    "chunked_prefill": {"roles": ELASTIC},
    "chunked_prefill, two ranks": {"roles": ELASTIC, "instances": 1, "tp": 2},
    "loongserve": {"roles": ELASTIC, "instances": 3},
}
"""Policies and shapes of gangs; the policy comes before the comma."""
KILLED: dict[str, GangRole] = {"csps": "prefill", "tetris": "decode", "chunked_prefill": "elastic"}
"""Roles of the gangs that are killed under some policies, so that requests are tried again."""


@dataclass
class Compared:
    """Answers that were held against the first ones."""

    answers: int = 0
    retried: int = 0
    largest: float = 0.0
    """Largest difference of a log-probability."""
    different: list[str] = field(default_factory=list)
    """Answers with other tokens, or log-probabilities that differ by more than the tolerance."""


Answer = list[SampledToken]


def asked(number: int) -> RequestSpec:
    """Return a request: greedy, seeded, or seeded with every parameter of sampling."""
    length = LENGTHS[number % len(LENGTHS)]
    prompt = np.random.default_rng(number).integers(0, 256, length).astype(np.int32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.001, "frequency_penalty": 0.5,
         "presence_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
    ]  # fmt: skip
    sampling = Sampling(
        max_tokens=TOKENS, seed=number, logprobs=ALTERNATIVES, **kinds[number % len(kinds)]
    )
    prefix = PrefixKey(b"owner", REUSE.block_tokens)
    return RequestSpec(
        client_request_id=f"r{number}",
        prompt=prompt,
        sampling=sampling,
        prefix=prefix,
        hashes=prefix.hashes(prompt),
    )


async def compare_ways(
    model: Path, ways: Sequence[str], *, requests: int, killed: bool = False
) -> Compared:
    """Answer requests in each way, one at a time and all at once, and compare with the first.

    Args:
        killed: gangs are killed in the middle of it, where `KILLED` names one.
    """
    found, first = Compared(), list[Answer]()
    for way in ways:
        async with _cell(model, way, killed=killed) as (cell, role):
            alone = [await _answer(cell.service.submit(asked(n))) for n in range(requests)]
            first = first or alone
            _compare(f"{way}, alone", first, alone, found)
            together = [cell.service.submit(asked(n)) for n in range(requests)]
            answers = [asyncio.ensure_future(_answer(handle)) for handle in together]
            if role is not None:
                await _kill(cell, role, together)
            _compare(f"{way}, together", first, await asyncio.gather(*answers), found)
            found.retried += sum(handle.timings.attempts > 1 for handle in together)
    return found


async def _kill(cell: Cell, role: GangRole, handles: Sequence[RequestHandle]) -> None:
    """Kill a gang as soon as two requests have some tokens, and start another one."""
    await eventually(lambda: sum(handle.timings.tokens > 2 for handle in handles) >= 2)
    cell.gangs[role].process(1).kill()
    await cell.start_gang(role)
    cell.publish()


@asynccontextmanager
async def _cell(
    model: Path, way: str, *, killed: bool
) -> AsyncIterator[tuple[Cell, GangRole | None]]:
    policy = way.partition(",")[0]
    role = KILLED.get(way) if killed else None
    async with real_cell(model, policy, mortal=role, **WAYS[way]) as cell:  # type: ignore[arg-type]
        yield cell, role
        if "reuse" not in WAYS[way]:
            await cell.settled()


async def _answer(handle: RequestHandle) -> Answer:
    async with asyncio.timeout(ANSWER_S), handle:
        return [token async for token in handle]


def _compare(way: str, first: Sequence[Answer], answers: Sequence[Answer], found: Compared) -> None:
    for number, (expected, got) in enumerate(zip(first, answers, strict=True)):
        found.answers += 1
        apart = _apart(expected, got)
        if apart is None or apart > TOLERANCE:
            ours, theirs = ([token.token for token in answer] for answer in (got, expected))
            found.different.append(f"{way}, request {number}: {ours}, not {theirs} ({apart})")
        else:
            found.largest = max(found.largest, apart)


def _apart(expected: Answer, got: Answer) -> float | None:
    """Return the largest difference of a log-probability; None if tokens differ."""
    if [token.token for token in expected] != [token.token for token in got]:
        return None
    apart = 0.0
    for one, other in zip(expected, got, strict=True):
        theirs = {entry.token: entry.logprob for entry in other.top_logprobs}
        pairs = [(entry.logprob, theirs.get(entry.token)) for entry in one.top_logprobs]
        # The last of the likeliest may be another one, where two are equally likely.
        known = [(ours, others) for ours, others in pairs if others is not None]
        assert len(known) >= ALTERNATIVES - 1
        assert one.logprob is not None
        assert other.logprob is not None
        apart = max(apart, abs(one.logprob - other.logprob), *(abs(a - b) for a, b in known))
    return apart
