"""Long answers: what they cost the event loop, and what slow clients may leave unread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService, http_api
from loop_watch import watched_loop

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.gang.messages import SampledToken, TokenLogprob
from csps.services.http import body as body_budget
from csps.services.http.api import HttpApi
from csps.services.http.body import ByteBudget
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.requests.request_handle import RequestHandle
from csps.services.settings.settings import Settings

DEADLINE_S = 60
TOKENS = 4096
ALTERNATIVES = 20


class BurstService(FakeService):
    """Delivers many tokens at once, as after a pause of the loop."""

    tokens: Sequence[SampledToken] = ()

    async def _sample(self, handle: RequestHandle) -> None:
        *tokens, last = self.tokens[: handle.spec.sampling.max_tokens]
        for token in [*tokens, replace(last, finish_reason="length")]:
            handle.deliver(token)
        handle.finish("length")


def tokens_of(text: str, alternatives: int, tokenizer: Tokenizer) -> list[SampledToken]:
    """Return the tokens of a text, each with this many alternatives."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [
        SampledToken(
            sequence_id=1,
            index=index,
            token=token,
            logprob=-1.0 if alternatives else None,
            top_logprobs=tuple(
                TokenLogprob(token=(token + shift) % 256, logprob=-2.0)
                for shift in range(alternatives)
            ),
        )
        for index, token in enumerate(ids)
    ]


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> RequestParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))


@pytest.fixture
def service(parser: RequestParser) -> BurstService:
    return BurstService(parser.tokenizer, "")


@pytest.fixture
async def api(parser: RequestParser, service: BurstService) -> AsyncIterator[HttpApi]:
    pool = ParserPool(parser.body_parser)
    yield http_api(parser, service, parser_pool=pool)
    await pool.close()


async def answered(
    api: HttpApi,
    path: str,
    body: dict[str, Any],
    *,
    gate: asyncio.Event | None = None,
    begun: asyncio.Event | None = None,
) -> tuple[int, bytes]:
    """Return status and body of an answer, without sockets.

    Args:
        gate: the client reads nothing but the status before it is set.
        begun: set when the client has read the status.
    """
    sent: list[Any] = []
    parts = iter([json.dumps(body).encode()])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if gate is not None and message["type"] == "http.response.body":
            await gate.wait()
        sent.append(message)
        if begun is not None:
            begun.set()

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
        "root_path": "", "client": ("1", 2), "server": ("1", 2), "scheme": "http",
    }  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        await api.app()(scope, receive, send)  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hi", "logprobs": 5}),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        },
    ),
}


def shown_in(body: bytes, *, stream: bool) -> tuple[str, int]:
    """Return the text of an answer, and the number of its log-probabilities."""
    bodies = body.split(b"\n\n")[:-2] if stream else [body]
    choices = [json.loads(part.removeprefix(b"data: "))["choices"][0] for part in bodies]
    text, entries = "", 0
    for choice in choices:
        holder = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        text += holder.get("content") or ""
        logprobs = choice["logprobs"] or {}
        entries += len(logprobs.get("content") or logprobs.get("tokens") or ())
    return text, entries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_long_answer_with_logprobs_does_not_hold_the_loop_up(
    api: HttpApi, service: BurstService, endpoint: str, stream: bool
) -> None:
    """4,096 tokens with 20 alternatives took 1.6 s of the loop at once."""
    text = "The quick brown fox. " * (TOKENS // 21)
    service.tokens = tokens_of(text, ALTERNATIVES, api.parser.tokenizer)
    path, fields = ENDPOINTS[endpoint]
    body = {"model": "tiny", "max_tokens": TOKENS, "stream": stream, **fields}
    await answered(api, path, {**body, "max_tokens": 1})  # what is made once
    with watched_loop():
        status, answer = await answered(api, path, body)
    assert status == 200
    assert shown_in(answer, stream=stream) == (text, len(text))
    assert not api.answers.in_use


async def test_whole_answers_that_wait_to_be_read_are_bounded(
    api: HttpApi, service: BurstService, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = replace(api, answers=ByteBudget("long answers wait to be read", exempt=2_000))
    service.tokens = tokens_of("x" * 500, 5, api.parser.tokenizer)
    path, fields = ENDPOINTS["completion"]
    body = {"model": "tiny", "max_tokens": 500, **fields}
    gate, begun = asyncio.Event(), asyncio.Event()
    unread = asyncio.ensure_future(answered(bounded, path, body, gate=gate, begun=begun))
    await begun.wait()
    size = bounded.answers.in_use
    monkeypatch.setattr(body_budget, "MAX_BYTES", size + 5_000)
    status, error = await answered(bounded, path, body)
    assert (status, json.loads(error)["error"]["code"]) == (429, "queue_full")
    assert bounded.answers.in_use == size
    short, _ = await answered(bounded, path, {**body, "max_tokens": 20})
    assert short == 200
    gate.set()
    assert (await unread)[0] == 200
    assert not bounded.answers.in_use
