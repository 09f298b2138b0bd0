"""Large bodies in processes of their own: the same results, and no way to keep the router busy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_gangs import until
from hypothesis import given
from hypothesis import strategies as st
from loop_watch import watched_loop
from paused_parsers import paused

from csps.models.network.checkpoint_json import InvalidTextError
from csps.protocols.core.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, RequestError
from csps.protocols.rpc.schema import pack, unpack
from csps.services.http import parser_pool
from csps.services.http.body_parser import BodyParser, Endpoint, ParsedBody
from csps.services.http.errors import PayloadTooLarge
from csps.services.http.parser_pool import (
    HUGE_BODY_BYTES,
    PROCESSES,
    SMALL_BODY_BYTES,
    ParserPool,
)
from csps.services.http.parser_process import LENGTHS, frame, message_of
from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

DEADLINE_S = 60
LARGE_BYTES = 32 * 2**20
PADDING = {"user": "u" * SMALL_BODY_BYTES}
"""Makes a body large; the field is ignored."""


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> BodyParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny")).body_parser


@pytest.fixture
async def pool(parser: BodyParser) -> AsyncIterator[ParserPool]:
    pool = ParserPool(parser)
    yield pool
    await pool.close()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "Say it.", "seed": 1, **fields}).encode()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "tiny", "messages": messages, "seed": 1, **fields}).encode()


BODIES: list[tuple[Endpoint, bytes]] = [
    ("completion", completion(**PADDING)),
    ("completion", completion(prompt=[7] * 30_000, **PADDING)),
    ("completion", completion(prompt="naïve 🙂 " * 3000, stop=["é", "b"], **PADDING)),
    (
        "completion",
        completion(
            logit_bias={"1": 0.5}, stop_token_ids=[3], logprobs=5, max_tokens=9, min_tokens=2,
            stream=True, stream_options={"include_usage": True}, cache_salt="s", **PADDING,
        ),
    ),
    ("completion", completion(csps={"max_ttft_ms": 5, "unmet": "refuse"}, **PADDING)),
    (
        "completion",
        completion(csps={"attention": "csa", "drop_ratio": [0, [0.5, 0.25]]}, **PADDING),
    ),
    ("chat", chat(logprobs=True, top_logprobs=3, csps={"strategy": "ring_q"}, **PADDING)),
    ("chat", chat(messages=[{"role": "user", "content": "x" * 100}] * 500, **PADDING)),
]  # fmt: skip


async def test_a_process_parses_as_the_router_does(parser: BodyParser, pool: ParserPool) -> None:
    for endpoint, body in BODIES:
        assert len(body) > SMALL_BODY_BYTES
        expected = parser.parse(endpoint, body, b"owner")
        assert await pool.parse(endpoint, body, b"owner") == expected


REFUSED: list[tuple[Endpoint, bytes, type[RequestError]]] = [
    ("completion", completion(temperature=9, **PADDING), InvalidRequest),
    ("completion", completion(prompt="\ud800", **PADDING), InvalidRequest),
    ("completion", completion(model="other", **PADDING), ModelNotFound),
    ("completion", completion(prompt=[999], **PADDING), InvalidRequest),
    ("chat", b"{" * (SMALL_BODY_BYTES + 1), InvalidRequest),
]


async def test_a_process_refuses_as_the_router_does(parser: BodyParser, pool: ParserPool) -> None:
    await pool.start()
    pids = pool.pids
    for endpoint, body, error in REFUSED:
        with pytest.raises(error) as expected:
            parser.parse(endpoint, body, b"")
        with pytest.raises(error) as refused:
            await pool.parse(endpoint, body, b"")
        assert str(refused.value) == str(expected.value)
        assert refused.value.param == expected.value.param
    assert pool.pids == pids, "a refusal ended a process"


async def check_parses(pool: ParserPool) -> None:
    """A process that takes the next body is there for each place in the pool."""
    async with asyncio.timeout(DEADLINE_S):
        bodies = (pool.parse("completion", completion(**PADDING), b"") for _ in range(PROCESSES))
        assert all(body.prompts[0].tokens for body in await asyncio.gather(*bodies))


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                while process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 (no event)
                    await asyncio.sleep(0.01)


# --- clients that leave, bodies that take long, processes that die ----------------------------


async def test_a_body_whose_client_has_gone_ends_with_its_process(
    pool: ParserPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_pool, "CANCELLED_PARSE_S", 0.01)
    async with paused(pool) as pids:
        parsing = [
            asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
            for _ in range(PROCESSES)
        ]
        waiting = asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
        await asyncio.sleep(0)
        for task in parsing:
            task.cancel()
        await until_gone(pids)
        async with asyncio.timeout(DEADLINE_S):
            assert (await waiting).prompts[0].tokens, "who waits in line gets a new process"
    await check_parses(pool)


async def test_a_body_that_is_parsed_soon_does_not_cost_a_process(pool: ParserPool) -> None:
    await pool.start()
    pids = pool.pids
    for _ in range(3):
        leaving = asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
        await asyncio.sleep(0)
        leaving.cancel()
    await check_parses(pool)
    assert pool.pids == pids


async def test_who_leaves_the_line_is_not_parsed(pool: ParserPool) -> None:
    async with paused(pool):
        tasks = [
            asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
            for _ in range(PROCESSES + 2)
        ]
        await asyncio.sleep(0)
        tasks.pop().cancel()
    async with asyncio.timeout(DEADLINE_S):
        assert len(await asyncio.gather(*tasks)) == PROCESSES + 1


async def test_parsing_has_a_deadline(pool: ParserPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with paused(pool) as pids:
        monkeypatch.setattr(parser_pool, "PARSE_DEADLINE_S", 0.01)
        with pytest.raises(DeadlineExceeded, match="parsing a request body"):
            await pool.parse("completion", completion(**PADDING), b"")
        await until_gone([pid for pid in pids if pid not in pool.pids])
        monkeypatch.undo()
    await check_parses(pool)


async def test_a_body_that_takes_too_much_memory_is_refused(parser: BodyParser) -> None:
    """`{},` in a field that is not ignored takes 24 times its bytes."""
    pool = ParserPool(parser, memory_bytes=64 * 2**20)
    try:
        body = b'{"model": "tiny", "messages": [%s{}]}' % (b"{}," * 3_000_000)
        with pytest.raises(PayloadTooLarge, match="takes too much memory"):
            await pool.parse("chat", body, b"")
        await check_parses(pool)
    finally:
        await pool.close()


async def test_huge_bodies_are_parsed_one_at_a_time(pool: ParserPool) -> None:
    """Regression: two took twice the memory, and all other large bodies waited behind them."""
    huge = completion(user="u" * (HUGE_BODY_BYTES + 1))
    async with paused(pool) as (first, second):
        tasks = [asyncio.ensure_future(pool.parse("completion", huge, b"")) for _ in range(2)]
        await until(lambda: pool._processes[1]._in_call)
        large = asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
        await until(lambda: pool._processes[0]._in_call)
        os.kill(first, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            assert (await large).prompts[0].tokens
        assert not any(task.done() for task in tasks)
        assert pool._idle == [pool._processes[0]], "the other huge body waits"
        tasks.pop().cancel()
        os.kill(second, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            assert (await tasks[0]).prompts[0].tokens
    await check_parses(pool)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_body_of_a_process_that_dies_is_parsed_by_another(
    pool: ParserPool, number: signal.Signals
) -> None:
    """Regression: its client got a 500; after SIGKILL, a 413 for a body of any size."""
    async with paused(pool) as pids:
        parsing = asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
        await until(lambda: any(process._in_call for process in pool._processes))
        for pid in pids:
            os.kill(pid, number)
    async with asyncio.timeout(DEADLINE_S):
        assert (await parsing).prompts[0].tokens
    await until_gone(pids)
    await check_parses(pool)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, RuntimeError),
        (signal.SIGKILL, PayloadTooLarge),
        (signal.SIGSEGV, InvalidRequest),
    ],
)
async def test_a_body_that_ends_two_processes_is_refused(
    pool: ParserPool, number: signal.Signals, error: type[Exception]
) -> None:
    """The kernel kills what takes the machine's last memory, and what overflows its stack."""
    parsing = asyncio.ensure_future(pool.parse("completion", completion(**PADDING), b""))
    killed: set[int | None] = {None}

    async def kill_all() -> None:
        while not parsing.done():
            for process in pool._processes:
                if process._in_call and process.usable is False and process.pid not in killed:
                    killed.add(process.pid)
                    os.kill(process.pid, number)
            await asyncio.sleep(0)

    async with asyncio.timeout(DEADLINE_S):
        await kill_all()
    with pytest.raises(error):
        await parsing
    await check_parses(pool)


@pytest.mark.slow
async def test_a_grammar_of_thousands_of_nested_rules_is_refused(pool: ParserPool) -> None:
    """It overflows the stack of whoever compiles it."""
    rules = "\n".join(f'r{at}: "x{at}" r{(at + 1) % 4000}?' for at in range(4000))
    start = "start: " + " | ".join(f"r{at}" for at in range(4000))
    body = completion(structured_outputs={"grammar": f"{start}\n{rules}"})
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(InvalidRequest, match="nests too deeply"):
            await pool.parse("completion", body, b"")
    await check_parses(pool)


async def test_a_process_that_stands_still_is_replaced(
    pool: ParserPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a body waited half a minute for a stopped process, and was refused then."""
    monkeypatch.setattr(parser_pool, "STUCK_S", 0.1)
    async with paused(pool) as pids:
        async with asyncio.timeout(DEADLINE_S):
            body = completion(**PADDING)
            assert (await pool.parse("completion", body, b"")).prompts[0].tokens
        assert set(pids) != set(pool.pids)


async def test_processes_end_with_the_pool(parser: BodyParser) -> None:
    pool = ParserPool(parser)
    await pool.start()
    pids = pool.pids
    assert len(pids) == PROCESSES
    await pool.close()
    await until_gone(pids)


# --- what large bodies cost the router -------------------------------------------------------

PATTERNS: dict[str, tuple[Endpoint, bytes]] = {
    # Each held the interpreter for a time, on whichever thread: 1.8 s, 0.4 s, 0.5 s.
    "objects": ("chat", b'{"model": "tiny", "messages": [%s{}]}' % (b"{}," * (LARGE_BYTES // 3))),
    "ids": (
        "completion", b'{"model": "tiny", "prompt": [%s7]}' % (b"7," * (LARGE_BYTES // 2)),
    ),
    "messages": (
        "chat",
        b'{"model": "tiny", "messages": [%s]}'
        % b",".join([b'{"role":"user","content":"a"}'] * 500_000),
    ),
    "brackets": ("chat", b'{"model": "tiny", "messages": %s' % (b"[" * LARGE_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PATTERNS)
async def test_large_bodies_do_not_hold_the_router_up(pool: ParserPool, kind: str) -> None:
    await pool.start()
    endpoint, body = PATTERNS[kind]
    with watched_loop():
        try:
            parsed = await pool.parse(endpoint, body, b"")
        except (InvalidRequest, PayloadTooLarge):
            return
    assert parsed.prompts[0].tokens > 10**6
    assert not parsed.prompts[0].ids, "ids that fit no model were sent to the router"


async def test_the_watchdog_notices_such_a_body_on_a_thread(parser: BodyParser) -> None:
    async def on_a_thread() -> None:
        with watched_loop(), suppress(InvalidRequest):
            await asyncio.to_thread(parser.parse, *PATTERNS["objects"], b"")

    with pytest.raises(AssertionError, match="a thread held the interpreter"):
        await on_a_thread()


async def test_the_watchdog_notices_a_slow_callback() -> None:
    over_s = time.thread_time() + 0.1

    def slow() -> None:
        while time.thread_time() < over_s:
            pass

    async def on_the_loop() -> None:
        with watched_loop():
            asyncio.get_running_loop().call_soon(slow)
            await asyncio.sleep(0.001)

    with pytest.raises(AssertionError, match="slow"):
        await on_the_loop()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.floats(0, 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(["prompt", "stop", "stop_token_ids", "logprobs", "max_tokens", "top_p"]),
        json_values,
        max_size=3,
    )
)
def test_messages_between_router_and_process_lose_nothing(
    parser: BodyParser, fields: dict[str, Any]
) -> None:
    try:
        parsed = parser.parse("completion", completion(**{**fields, "seed": 1}), b"owner")
    except (RequestError, InvalidTextError):
        return
    message = message_of(frame(pack(parsed))[LENGTHS.size :])
    assert unpack(ParsedBody, message) == parsed
