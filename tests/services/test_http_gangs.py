"""The HTTP API over the real request service: what clients learn of gangs, queues and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fake_gangs import FakeCell, FakeGang, fake_cell, until
from fake_service import http_api
from live_server import serving
from paused_parsers import paused

from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.services.http import body as body_budget
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import SMALL_BODY_BYTES, ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.settings.settings import HttpSettings, Settings

DEADLINE_S = 60
ONE_AT_A_TIME = QueueLimits(max_waiting=1)


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> RequestParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))


@dataclass
class Server:
    cell: FakeCell
    client: httpx.AsyncClient
    api: HttpApi

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "Say it.", "max_tokens": 2, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def half_a_request(self) -> bytes:
        """Announce a body of 1000 bytes, send 10, and return the answer, which must come then."""
        async with self.sending(1000, b"0123456789") as reader, asyncio.timeout(DEADLINE_S):
            return await reader.readuntil(b"\r\n\r\n")

    @asynccontextmanager
    async def sending(self, announced: int, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """Send a request with only this part of its body."""
        url = self.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n"
        try:
            writer.write(head.encode() + sent)
            yield reader
        finally:
            writer.close()


@asynccontextmanager
async def served(parser: RequestParser, **options: Any) -> AsyncIterator[Server]:
    async with fake_cell(**options) as cell:
        pool = ParserPool(parser.body_parser)
        api = http_api(parser, cell.service, parser_pool=pool, max_body_bytes=4_000_000)
        try:
            async with (
                serving(api.app()) as url,
                httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
            ):
                yield Server(cell, client, api)
        finally:
            await pool.close()


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


# --- nothing of our inside -------------------------------------------------------------------


async def test_health_names_no_address(parser: RequestParser) -> None:
    async with served(parser) as server:
        await server.cell.prefill.kill(0)
        await until(lambda: "cannot connect to 127.0.0.1" in server.cell.cluster.trouble)
        response = await server.client.get("/health")
        assert response.status_code == 503
        assert response.json()["reason"] == "waiting for a prefill gang"


async def test_explain_names_no_address_of_the_configurator(parser: RequestParser) -> None:
    async def fails(questions: StrategyQuestions) -> StrategyChoices:
        raise ConnectionError("cannot connect to 10.0.0.3:41235")

    async with served(parser, configure=fails) as server:
        server.cell.run_by_itself()
        response = await server.complete(csps={"explain": True})
        assert "nothing was compared yet" in response.json()["csps"]["plan"]["reason"]
        assert "10.0.0.3" not in response.text


# --- faults that are worth another try -------------------------------------------------------


async def test_a_request_cut_off_by_a_shutdown_may_be_retried(parser: RequestParser) -> None:
    async with served(parser) as server:
        request = asyncio.ensure_future(server.complete())
        await until(lambda: server.cell.prefill.leader.steps)
        await server.cell.service.close(0.0)
        check_error(await request, 503, "unavailable")


async def failed_by_a_rank(server: Server, code: str) -> httpx.Response:
    request = asyncio.ensure_future(server.complete())
    await until(lambda: server.cell.prefill.leader.steps)
    server.cell.prefill.fail(server.cell.prefill.leader.steps[0].chunks[0].sequence_id, code)
    return await request


@pytest.mark.parametrize("code", ["TransferError", "ConnectionLost"])
async def test_a_temporary_fault_may_be_retried(parser: RequestParser, code: str) -> None:
    async with served(parser, limits=QueueLimits(max_attempts=1)) as server:
        check_error(await failed_by_a_rank(server, code), 503, "unavailable")


@pytest.mark.parametrize("code", ["ProtocolError", "BadLogits", "KeyError"])
async def test_a_ranks_mistake_is_an_internal_error(
    parser: RequestParser, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(parser, limits=QueueLimits(max_attempts=1)) as server:
        check_error(await failed_by_a_rank(server, code), 500, "internal_error")
    assert (
        len(
            [record for record in caplog.records if record.levelname == "ERROR" and record.exc_info]
        )
        == 1
    )
    assert code in caplog.text


# --- how much a request may have -------------------------------------------------------------


async def test_the_model_card_has_the_longest_length_that_fits_the_gangs(
    parser: RequestParser,
) -> None:
    prefill = FakeGang("prefill", "p1", kv_slots=2000)
    async with served(parser, prefill=prefill) as server:
        server.cell.run_by_itself()
        card = (await server.client.get("/v1/models/tiny")).json()
        promised = card["max_model_len"]
        assert promised == 4000 < parser.max_positions
        fits = await server.complete(prompt=[1] * (promised - 2), max_tokens=2)
        assert fits.status_code == 200
        too_long = await server.complete(prompt=[1] * (promised + 1), max_tokens=2)
        check_error(too_long, 400, "context_length_exceeded")
        # Nor for the model: what is said is what would fit here.
        longer = await server.complete(prompt=[1] * (parser.max_positions + 1), max_tokens=2)
        assert f"context length is {promised} tokens" in longer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("instances", "kv_slots", "words"),
    [(2, 500, 1), (2, 500, 30), (2, 2_000_000, 1), (1, 1000, 1), (3, 500, 1), (5, 500, 1)],
)
async def test_four_answers_without_max_tokens_run_side_by_side(
    parser: RequestParser, instances: int, kv_slots: int, words: int
) -> None:
    """Each takes a quarter of the decode gang with its prompt, but not more than its part of an
    instance; of a long one half as much, and of a large gang 4,096."""
    decode = FakeGang("decode", "d1", instances=instances, kv_slots=kv_slots)
    async with served(parser, decode=decode) as server:
        server.cell.run_by_itself()
        ends: list[Callable[[], None]] = []
        finish = server.cell.finish

        def held(*arguments: Any, **named: Any) -> None:
            ends.append(partial(finish, *arguments, **named))

        async def chat() -> dict[str, Any]:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * words}]}
            answer = await server.client.post("/v1/chat/completions", json=body)
            found: dict[str, Any] = answer.json()
            return found

        with patch.object(server.cell, "finish", held):
            asked = [asyncio.ensure_future(chat()) for _ in range(4)]
            fits = words == 1
            await until(lambda: len(ends) == 4 if fits else server.cell.service.counts.waiting)
            if fits:
                assert server.cell.service.counts[:2] == (4, 0)
        for end in ends:
            end()
        for answer in await asyncio.gather(*asked):
            on_an_instance = {1: 4, 2: 2, 3: 2, 5: 1}[instances]
            quarter, prompt = kv_slots // on_an_instance, answer["usage"]["prompt_tokens"]
            assert (prompt < quarter // 2) == fits
            limit = min(4096, max(quarter - prompt, quarter // 2))
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_least_answer_longer_than_the_default_is_as_long(parser: RequestParser) -> None:
    decode = FakeGang("decode", "d1", kv_slots=500)
    async with served(parser, decode=decode) as server:
        server.cell.run_by_itself()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        url = "/v1/chat/completions"
        answer = await server.client.post(url, json={**body, "min_tokens": 300})
        assert answer.json()["usage"]["completion_tokens"] == 300
        too_long = await server.client.post(url, json={**body, "min_tokens": 501})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "min_tokens")


# --- before admission ------------------------------------------------------------------------


async def test_a_full_queue_refuses_before_reading_the_body(parser: RequestParser) -> None:
    closed = FakeGang("prefill", "p1")
    closed.may_connect.clear()
    async with served(parser, limits=ONE_AT_A_TIME, prefill=closed, ready=False) as server:
        waiting = server.cell.submit()
        await until(lambda: server.cell.service.counts.waiting == 1)
        head = await server.half_a_request()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after" in head
        waiting.cancel()


async def test_requests_being_read_count_as_waiting(parser: RequestParser) -> None:
    """41 of 41 bodies of 250 KB passed a queue of one, and were read and tokenized first."""
    closed = FakeGang("prefill", "p1")
    closed.may_connect.clear()
    limits = QueueLimits(max_waiting=2)
    async with served(parser, limits=limits, prefill=closed, ready=False) as server:
        async with server.sending(1000, b"0123456789") as reader:
            await until(lambda: server.api.being_read.bytes == 10)
            async with server.sending(1000, b""):
                await until(lambda: server.api.being_read.count == 2)
                many = (server.complete(prompt="x" * 250_000) for _ in range(40))
                for answer in await asyncio.gather(*many):
                    check_error(answer, 429, "queue_full")
                assert server.api.being_read.count == 2
                assert not server.api.parser_pool.pids, "a body was parsed"
            await until(lambda: server.api.being_read.count == 1)
            # One leaves while its body is read; another takes its place, and keeps it in the queue.
            waiting = asyncio.ensure_future(server.complete())
            await until(lambda: server.cell.service.counts.waiting == 1)
            assert server.api.being_read.count == 1
            check_error(await server.complete(), 429, "queue_full")
            assert not reader.at_eof()
            waiting.cancel()
        await until(lambda: not server.api.being_read.count)
        assert not server.api.being_read.bytes


@pytest.mark.parametrize("deadline", ["body_deadline_s", "body_silence_s"])
async def test_a_body_has_a_deadline(tiny_llama: Path, deadline: str) -> None:
    http = HttpSettings(**{deadline: 0.01})
    parser = RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny", http=http))
    async with served(parser) as server:
        assert (await server.half_a_request()).startswith(b"HTTP/1.1 408 ")


LARGE_BYTES = 2 * SMALL_BODY_BYTES


async def test_short_requests_do_not_wait_for_large_bodies(parser: RequestParser) -> None:
    async with served(parser) as server:
        server.cell.run_by_itself()
        async with paused(server.api.parser_pool):
            prompt = "x" * LARGE_BYTES
            large = [asyncio.ensure_future(server.complete(prompt=prompt)) for _ in range(40)]
            await until(lambda: server.api.being_read.bytes > 40 * LARGE_BYTES)
            assert (await server.complete()).status_code == 200
            assert not any(answer.done() for answer in large)
        answers = await asyncio.gather(*large)
        assert {answer.status_code for answer in answers} == {400}  # too long for the gangs


async def test_a_client_that_leaves_while_its_body_is_parsed_gives_its_place_back(
    parser: RequestParser,
) -> None:
    async with served(parser) as server, paused(server.api.parser_pool):
        leaving = asyncio.ensure_future(server.complete(prompt="x" * LARGE_BYTES))
        await until(lambda: server.api.being_read.bytes > LARGE_BYTES)
        leaving.cancel()
        await until(lambda: not server.api.being_read.count)
        assert not server.api.being_read.bytes


async def test_bodies_that_arrive_are_limited(
    parser: RequestParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = LARGE_BYTES
    monkeypatch.setattr(body_budget, "MAX_BYTES", 2 * size)
    async with served(parser) as server:
        server.cell.run_by_itself()
        prompt = "x" * size
        async with server.sending(10 * size, bytes(size)):
            await until(lambda: server.api.being_read.bytes == size)
            check_error(await server.complete(prompt=prompt), 429, "queue_full")
            assert (await server.complete()).status_code == 200
        await until(lambda: not server.api.being_read.bytes)
        # Read, and too long for the gangs.
        check_error(await server.complete(prompt=prompt), 400, "context_length_exceeded")
