"""One client, with everything that has ever held the server up, and others who notice nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn.config
from fake_service import FakeService, http_api
from live_server import serving
from loop_watch import watched_loop

from csps.protocols.openai.csps_options import MAX_RATIOS
from csps.services.http import header_deadline
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import SMALL_BODY_BYTES, ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

DEADLINE_S = 100
ANSWER = "Nothing is wrong here."


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "Say it.", "max_tokens": 100, **fields}).encode()


def chat_of(messages: bytes) -> bytes:
    return b'{"model": "tiny", "max_tokens": 100, "messages": %s}' % messages


def hostile(size: int) -> dict[str, tuple[str, bytes, int]]:
    """Return requests by name, with bodies of about `size` bytes: path, body and status."""
    one = b'{"role": "user", "content": "a"}'
    chat, plain = "/v1/chat/completions", "/v1/completions"
    return {
        "objects": (chat, chat_of(b"[%s{}]" % (b"{}," * (size // 3))), 400),
        "brackets": (chat, chat_of(b"[" * size), 400),
        "messages": (chat, chat_of(b"[%s]" % b",".join([one] * (size // len(one)))), 400),
        "ids": (plain, completion(prompt=[7] * (size // 3)), 400),
        "ids outside": (plain, completion(prompt=[999999] * (size // 8)), 400),
        "text": (plain, completion(prompt="the quick brown fox " * (size // 20)), 400),
        "one word": (plain, completion(prompt="a" * size), 400),
        "spaces": (plain, completion(prompt=" " * size), 400),
        "ignored": (plain, completion(user="u" * size), 200),
        "an unknown field": (plain, completion(**{"x" * size: 1}), 400),
        "many unknown fields": (
            plain, completion(**{f"x{index}": 1 for index in range(size // 12)}), 400,
        ),
        "a digit too many": (plain, b'{"model": "tiny", "seed": %s}' % (b"9" * size), 400),
        "biases": (plain, completion(logit_bias={str(n): 1 for n in range(size // 10)}), 400),
        "stop tokens": (plain, completion(stop_token_ids=list(range(size // 8))), 400),
        "stop strings": (plain, completion(stop=["a" * (size // 16)] * 16), 400),
        "drop ratios": (
            plain,
            completion(csps={"attention": "csa", "drop_ratio": [[0.5] * 1000] * (size // 5000)}),
            400 if size // 5 > MAX_RATIOS else 200,
        ),
        "a salt": (plain, completion(cache_salt="s" * size), 200),
        "a model": (plain, completion(model="m" * size), 404),
    }  # fmt: skip


@pytest.fixture
async def api(tiny_llama: Path) -> AsyncIterator[HttpApi]:
    parser = RequestParser(
        Settings(model=str(tiny_llama), served_model_name="tiny", max_positions=10_000)
    )
    pool = ParserPool(parser.body_parser)
    await pool.start()
    yield http_api(
        parser, FakeService(parser.tokenizer, ANSWER), parser_pool=pool, max_body_bytes=32 * 2**20
    )
    await pool.close()


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES - 200, 2 * 2**20])
async def test_hostile_requests_delay_nobody(
    api: HttpApi, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get their answers, one by one, and honest streams go on meanwhile."""
    requests = hostile(size)
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    header_deadline.install()
    async with (
        serving(api.app()) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        assert await honest(client) == ANSWER
        with watched_loop():
            sent = {
                name: asyncio.ensure_future(client.post(path, content=body))
                for name, (path, body, _) in requests.items()
            }
            for _ in range(10):
                assert await honest(client) == ANSWER
            answers = {name: await answer for name, answer in sent.items()}
    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == {name: status for name, (_, _, status) in requests.items()}
    assert not api.being_read.count
    assert not api.being_read.bytes


async def honest(client: httpx.AsyncClient) -> str:
    """Return the text of a short stream."""
    response = await client.post("/v1/completions", content=completion(stream=True))
    *events, done = [event for event in response.text.split("\n\n") if event]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)
