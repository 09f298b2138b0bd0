"""Ranks that die, or clients that leave, at each event of an elastic gang under real requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from arbitrary_layout_policy import AnyLayout
from gang_driver import ANSWER_S
from gang_threads import eventually
from paused_ranks import PausedSteps
from real_cell import ELASTIC, Cell, answer, real_cell, streams
from tiny_checkpoints import reference_tokens

from csps.actors.engine.decode_batch import DecodeBatch as Stream
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.deciding.decisions import Policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EVENTS = ("migrate", "preempt and scale down", "scale up")
MAX_TOKENS, KV_SLOTS = 80, 160
WANTED = {event: streams(5, first=50, further=60, max_tokens=MAX_TOKENS) for event in EVENTS}
# The slots of an instance end in the middle of their answers.
WANTED["scale up"] = streams(4, first=115, further=5, max_tokens=MAX_TOKENS)


@dataclass(frozen=True)
class PausedRequests:
    """Requests, some of them in the middle of an event."""

    requests: Sequence[RequestHandle]
    answers: Sequence[asyncio.Future[list[int]]]
    go_on: Callable[[], None]


@asynccontextmanager
async def elastic(model: Path, event: str, **fields: Any) -> AsyncIterator[Cell]:
    """Return an elastic gang of three whose policy causes the event."""
    policy: str | Policy = AnyLayout(7, moves=True) if event == "migrate" else "loongserve"
    if event == "scale up":
        fields["kv_slots"] = KV_SLOTS
    async with real_cell(model, policy, roles=ELASTIC, instances=3, **fields) as cell:
        yield cell


async def come_to(cell: Cell, event: str, patch: pytest.MonkeyPatch) -> PausedRequests:
    """Submit the requests, and wait for the event."""
    wanted = WANTED[event]
    requests = [cell.submit(**options) for options in wanted[:-1]]
    scaled_up = asyncio.Event()
    answers = [asyncio.ensure_future(read(handle, scaled_up)) for handle in requests]
    await eventually(lambda: any(request.state == "decoding" for request in requests))
    steps = PausedSteps(patch) if event == "preempt and scale down" else None
    requests.append(cell.submit(**wanted[-1]))
    answers.append(asyncio.ensure_future(answer(requests[-1])))
    live = cell.service._requests.sequences.values
    if steps is not None:
        await steps.begun()
        return PausedRequests(requests, answers, steps.go_on.set)
    if event == "migrate":
        await eventually(lambda: any(sequence.move is not None for sequence in live()))
    else:
        async with asyncio.timeout(ANSWER_S):
            await scaled_up.wait()
    return PausedRequests(requests, answers, lambda: None)


async def read(handle: RequestHandle, scaled_up: asyncio.Event) -> list[int]:
    """Read all tokens; the event comes with the first one whose KV is where no KV of its
    prompt is."""
    more, tokens = KV_SLOTS - handle.spec.prompt.size + 5, list[int]()
    async with asyncio.timeout(ANSWER_S):
        async for token in handle:
            tokens.append(token.token)
            if len(tokens) > more and any(event.kind == "scale_up" for event in handle.elastic):
                scaled_up.set()
    return tokens


async def undisturbed(cell: Cell, event: str) -> list[list[int]]:
    return await asyncio.gather(*(answer(cell.submit(**options)) for options in WANTED[event]))


@pytest.mark.parametrize("event", EVENTS)
async def test_streams_continue_when_a_rank_is_killed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """No client gets a wrong token, whatever had moved. Requests without a token restart, and every
    slot is freed."""
    async with elastic(tiny_llama, event, mortal="elastic") as cell:
        expected = await undisturbed(cell, event)
        paused = await come_to(cell, event, monkeypatch)
        cell.gangs["elastic"].process(1).kill()
        paused.go_on()
        await eventually(lambda: not cell.service.ready)
        begun = [
            request for request in paused.requests if not request.ended and request.timings.attempts
        ]
        await cell.start_gang("elastic")
        cell.publish()
        assert await asyncio.gather(*paused.answers) == expected
        assert begun
        assert {handle.timings.attempts for handle in begun} == {2}
        await cell.settled()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
async def test_cancelled_requests_free_every_slot(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, event: str, tp: int
) -> None:
    """First every second request is cancelled, among them the one that preempts the others.

    Its neighbors continue with the right tokens. Then all are cancelled.
    """
    async with elastic(tiny_llama, event, tp=tp) as cell:
        expected = await undisturbed(cell, event)
        paused = await come_to(cell, event, monkeypatch)
        for request in paused.requests[::-2]:
            request.cancel()
        paused.go_on()
        answers = await asyncio.gather(*paused.answers)
        assert answers[-2::-2] == expected[-2::-2]
        await cell.settled()
        paused = await come_to(cell, event, monkeypatch)
        for request in paused.requests:
            request.cancel()
        paused.go_on()
        await asyncio.gather(*paused.answers)
        await cell.settled()


@pytest.mark.parametrize("tp", [1, 2])
async def test_no_answer_is_evicted_whatever_the_order(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """All answers reach their limit: prompts of almost all slots between short ones with long
    answers.

    After each iteration every slot has at most one owner.
    """
    iterate, checked = Stream.iterate, Counter[int]()

    def checking(stream: Stream, group: Sequence[int] = ()) -> list[int]:
        finished = iterate(stream, group)
        stream._engine.pool.slots.check_integrity()
        checked[stream._engine.rank] += 1
        return finished

    monkeypatch.setattr(Stream, "iterate", checking)
    shapes = [(10, 150), (430, 40), (150, 10), (3, 200), (300, 90), (159, 2), (60, 100), (470, 10)]
    async with elastic(tiny_llama, "scale up", tp=tp) as cell:
        requests = [cell.submit(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        answers = await asyncio.gather(*map(answer, requests))
        assert [len(tokens) for tokens in answers] == [most for _, most in shapes]
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, len(tokens))
        assert {handle.timings.attempts for handle in requests} == {1}
        await cell.settled()
    assert len(checked) == 3 * tp
