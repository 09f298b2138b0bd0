"""The HTTP API over a scripted service: shapes, errors, cancellation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fake_service import FakeService, http_api
from live_server import serving
from starlette.types import Message

from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import GangLost, QueueFull
from csps.services.http import api as api_module
from csps.services.http.api import HEARTBEAT, EventStream, HttpApi
from csps.services.http.request_parser import RequestParser
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import SloBounds
from csps.services.router.key_limits import KeyLimiter
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import AuthSettings, KeyLimits, Settings

ANSWER = "The naïve café 🙂 END of it"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> RequestParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))


@pytest.fixture
async def service(parser: RequestParser) -> FakeService:
    return FakeService(parser.tokenizer, ANSWER)


@pytest.fixture
def api(parser: RequestParser, service: FakeService) -> HttpApi:
    return http_api(parser, service)


@pytest.fixture
async def client(api: HttpApi) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(api.app()) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Say it.", "max_tokens": 100, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """Return the data of a complete event stream."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


# --- answers ---------------------------------------------------------------------------------


async def test_a_completion_has_openais_shape(
    client: httpx.AsyncClient, parser: RequestParser, service: FakeService
) -> None:
    response = await client.post(
        "/v1/completions", json=completion(), headers={"x-request-id": "me-1"}
    )
    body = response.json()
    assert body["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["id"] == "cmpl-me-1"
    prompt = len(parser.tokenizer.encode("Say it."))
    generated = len(service.script) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "csps" not in body


async def test_a_stream_has_the_text_of_the_completion(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await client.post(
        "/v1/completions", json=completion(stream=True, stream_options=options)
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(service.script) + 1 == counted[-1]


async def test_a_chat_has_openais_shape(client: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": 100,
    }
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    assert whole["choices"][0]["message"]["content"] == ANSWER
    streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    chunks = events(streamed.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_work(
    client: httpx.AsyncClient, service: FakeService, parser: RequestParser, stream: bool
) -> None:
    response = await client.post(
        "/v1/completions", json=completion(stop=[" END", "never"], stream=stream)
    )
    shown = ANSWER.partition(" END")[0]
    generated = len(parser.tokenizer.encode(shown + " END", add_special_tokens=False))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.text)]
        assert "".join(choice["text"] for choice in choices) == shown
        assert choices[-1]["finish_reason"] == "stop"
    else:
        body = response.json()
        assert body["choices"][0]["text"] == shown
        assert body["usage"]["completion_tokens"] == generated
    assert service.handles[0].finish_reason == "stop"
    assert service.handles[0].timings.tokens <= generated + 1


async def test_max_tokens_ends_with_length(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/completions", json=completion(max_tokens=3))).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_withheld_text_is_shown_when_the_answer_ends(
    client: httpx.AsyncClient,
) -> None:
    body = (await client.post("/v1/completions", json=completion(stop=["it!"]))).json()
    assert body["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_openais_shape(
    client: httpx.AsyncClient, service: FakeService, stream: bool
) -> None:
    response = await client.post(
        "/v1/completions", json=completion(logprobs=2, max_tokens=4, stream=stream)
    )
    bodies = events(response.text) if stream else [response.json()]
    logprobs = [body["choices"][0]["logprobs"] for body in bodies]
    assert [token for entry in logprobs for token in entry["tokens"]] == list("The ")
    assert [offset for entry in logprobs for offset in entry["text_offset"]] == [0, 1, 2, 3]
    assert logprobs[0]["top_logprobs"][0] == {"T": -0.5, "U": -1.5}


async def test_bytes_of_tokens_joined_are_the_answer(client: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say it."}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    *entries, end = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == ANSWER.encode()
    assert end["token"] == "</s>"
    for entry in choice["logprobs"]["content"]:
        assert len({top["token"] for top in entry["top_logprobs"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_are_positions_in_the_answer(
    client: httpx.AsyncClient, stream: bool
) -> None:
    response = await client.post("/v1/completions", json=completion(logprobs=0, stream=stream))
    bodies = events(response.text) if stream else [response.json()]
    offsets = [
        offset for body in bodies for offset in body["choices"][0]["logprobs"]["text_offset"]
    ]
    starts = [index for index, character in enumerate(ANSWER) for _ in character.encode()]
    assert offsets == [*starts, len(ANSWER)]


async def test_explain_returns_plan_and_timings(client: httpx.AsyncClient) -> None:
    wanted = {"explain": True, "attention": "exact"}
    whole = (await client.post("/v1/completions", json=completion(csps=wanted))).json()
    assert {"plan", "timings", "story"} <= set(whole["csps"])
    streamed = await client.post("/v1/completions", json=completion(csps=wanted, stream=True))
    *others, last = events(streamed.text)
    assert {"plan", "timings"} <= set(last["csps"])
    assert not any("csps" in chunk for chunk in others)


async def test_sampling_options_reach_the_service(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 7, "ignore_eos": True,
        "stop_token_ids": [65], "min_tokens": 2, "logit_bias": {"66": -1},
        "csps": {"max_ttft_ms": 100}, "priority": -3,
    }  # fmt: skip
    headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5", "x-slo-unmet": "refuse"}
    await client.post("/v1/completions", json=completion(**fields), headers=headers)
    spec = service.specs[0]
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.seed, sampling.min_tokens) == (7, 2)
    assert sampling.stop_token_ids == (65,)
    assert sampling.logit_bias == {66: -1.0}
    assert spec.objective.kind == "accuracy"
    assert spec.slo == SloBounds(ttft_ms=250.0, tpot_ms=12.5, refuse=True)
    assert spec.priority == -3


async def test_sparse_attention_by_hand_reaches_the_service(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    wanted = {
        "attention": "csa", "levels": 3, "drop_ratio": [0, [0.5, 0.9]],
        "micro_partitions": [1, [1, 1, 2]], "strategy": "tp", "importance_window": 0,
        "drop_queries": False,
    }  # fmt: skip
    await client.post("/v1/completions", json=completion(csps=wanted))
    spec = service.specs[0]
    assert spec.attention == "csa"
    assert spec.csa == CsaSettings(
        levels=3,
        drop_ratios=((0.0,), (0.5, 0.9)),
        micro_partitions=((1,), (1, 1, 2)),
        strategy="tp",
        importance_window=0,
        drop_queries=False,
    )


@pytest.mark.parametrize(
    ("wanted", "is_open", "csa", "given"),
    [
        ({}, False, None, ()),
        ({"objective": "ttft"}, False, None, ()),
        ({"max_accuracy_loss": 0}, True, None, ()),
        ({"max_ttft_ms": 500}, True, None, ()),
        ({"max_accuracy_loss": 0.1, "attention": "exact"}, False, None, ()),
        ({"max_accuracy_loss": 0.1, "strategy": "ring"}, False, None, ()),
        ({"attention": "csa"}, True, None, ()),
        (
            {"attention": "csa", "tail": 9},
            True,
            CsaSettings(tail=9, importance_layer="same"),
            ("tail",),
        ),
        (
            {"attention": "csa", "drop_ratio": 0.5, "max_accuracy_loss": 0.1},
            False,
            CsaSettings(drop_ratios=((0.5,),), importance_layer="same"),
            (),
        ),
        (
            {"attention": "csa", "decode_kept_only": True},
            False,
            CsaSettings(decode_kept_only=True, importance_layer="same"),
            (),
        ),
    ],
)
async def test_unset_options_are_left_to_the_configurator(
    client: httpx.AsyncClient,
    service: FakeService,
    wanted: dict[str, Any],
    is_open: bool,
    csa: CsaSettings | None,
    given: tuple[str, ...],
) -> None:
    await client.post("/v1/completions", json=completion(csps={"unmet": "refuse", **wanted}))
    spec = service.specs[0]
    assert (spec.open, spec.csa, spec.given) == (is_open, csa, given)
    assert spec.refuse_unmet
    assert (spec.cls.objective is not None) == is_open


async def test_models_lists_the_served_model(
    client: httpx.AsyncClient, parser: RequestParser
) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", parser.max_positions)
    assert (await client.get("/v1/models/tiny")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_health_names_the_reason_if_not_ready(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    assert (await client.get("/health")).status_code == 200
    service.trouble = "waiting for a prefill gang"
    response = await client.get("/health")
    assert response.status_code == 503
    assert "waiting for a prefill gang" in response.text


async def test_metrics_reach_to_half_an_hour(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    assert 'csps:time_to_first_token_seconds_bucket{le="1800.0",model_name="tiny"}' in text


# --- errors ----------------------------------------------------------------------------------

BAD_BODIES: dict[str, tuple[bytes, int, str | None]] = {
    "malformed JSON": (b'{"model": "tiny",', 400, None),
    "no object": (b"[]", 400, None),
    "invalid UTF-8": (b'{"model": "tiny", "prompt": "\xff"}', 400, None),
    "lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, None),
    "empty": (b"", 400, None),
    "no model": (b'{"prompt": "x"}', 400, "model"),
    "unknown model": (b'{"model": "gpt-9", "prompt": "x"}', 404, "model"),
    "empty prompt": (b'{"model": "tiny", "prompt": ""}', 400, "prompt"),
    "prompt of a wrong type": (b'{"model": "tiny", "prompt": {"a": 1}}', 400, "prompt"),
    "token outside": (b'{"model": "tiny", "prompt": [999999]}', 400, "prompt"),
    "negative max_tokens": (
        b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', 400, "max_tokens",
    ),
    "huge max_tokens": (
        b'{"model": "tiny", "prompt": "x", "max_tokens": 99999999999999999999}', 400, None,
    ),
    "NaN": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, None),
    "unknown field": (b'{"model": "tiny", "prompt": "x", "tmperature": 1}', 400, "tmperature"),
    "csa": (
        b'{"model": "tiny", "prompt": "x", "csps": {"attention": "csa", "levels": 9}}',
        400, "csps.levels",
    ),
    "129 prompts": (b'{"model": "tiny", "prompt": [%s"y"]}' % (b'"x",' * 128), 400, "prompt"),
    "max_tokens of 4300 digits": (
        b'{"model": "tiny", "prompt": "x", "max_tokens": %s}' % (b"9" * 4300), 400, "max_tokens",
    ),
    "more digits than JSON may have": (
        b'{"model": "tiny", "prompt": "x", "max_tokens": %s}' % (b"9" * 4301), 400, None,
    ),
    "huge top_k": (b'{"model": "tiny", "prompt": "x", "top_k": 1%s}' % (b"0" * 30), 400, "top_k"),
    "huge min_tokens": (
        b'{"model": "tiny", "prompt": "x", "min_tokens": 1%s}' % (b"0" * 30), 400, "min_tokens",
    ),
    "tiny repetition_penalty": (
        b'{"model": "tiny", "prompt": "x", "repetition_penalty": 1e-300}',
        400, "repetition_penalty",
    ),
    "huge repetition_penalty": (
        b'{"model": "tiny", "prompt": "x", "repetition_penalty": 1e300}',
        400, "repetition_penalty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_bad_bodies_are_refused_in_openai_shape(
    client: httpx.AsyncClient, service: FakeService, case: str
) -> None:
    body, status, param = BAD_BODIES[case]
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == status
    assert_openai_error(response)
    if param is not None:
        assert response.json()["error"]["param"] == param
    assert not service.specs


def assert_openai_error(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "Traceback" not in response.text


@pytest.mark.parametrize("min_tokens", [4097, 2**31 - 1])
async def test_a_least_answer_beyond_the_default_length_raises_it_as_far_as_it_fits(
    client: httpx.AsyncClient, service: FakeService, min_tokens: int
) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "min_tokens": min_tokens,
    }
    response = await client.post("/v1/chat/completions", json=body)
    if min_tokens == 4097:
        assert response.status_code == 200
        assert service.specs[0].sampling.max_tokens == 4097
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    client: httpx.AsyncClient, parser: RequestParser
) -> None:
    response = await client.post("/v1/completions", json=completion(max_tokens=10_000_000))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(parser.max_positions) in error["message"]
    assert "10000000" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405)],
)
async def test_unknown_routes_are_refused_in_openai_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert_openai_error(response)


async def test_a_huge_body_is_not_read(client: httpx.AsyncClient) -> None:
    declared = await client.post("/v1/completions", content=b"x" * 1_000_001)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100_000

    undeclared = await client.post("/v1/completions", content=chunks())
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert_openai_error(response)


@pytest.mark.parametrize(("name", "value"), [("x-slo-ttft-ms", "soon"), ("x-slo-unmet", "drop")])
async def test_a_bad_slo_header_is_refused(
    client: httpx.AsyncClient, name: str, value: str
) -> None:
    response = await client.post("/v1/completions", json=completion(), headers={name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_a_full_queue_answers_with_retry_after(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.refusal = QueueFull("3 requests are waiting", retry_after_s=2.5)
    response = await client.post("/v1/completions", json=completion())
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert_openai_error(response)


async def test_a_limit_of_a_key_answers_as_openai_does(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(requests_per_minute=1)))
    with patch.object(service, "check_room", lambda slo, key, ahead: limiter.check_request(key)):
        assert (await client.post("/v1/completions", json=completion())).status_code == 200
        response = await client.post("/v1/completions", json=completion())
    assert (response.status_code, response.headers["retry-after"]) == (429, "60")
    assert_openai_error(response)
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "requests per minute" in error["message"]


async def test_requests_without_a_known_key_are_refused(api: HttpApi) -> None:
    app = replace(api, keys=ApiKeys(["secret"])).app()
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/models", "/v1/models/tiny"):
            assert (await client.get(path)).status_code == 401
        response = await client.post("/v1/completions", json=completion())
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        header = {"authorization": "Bearer secret"}
        assert (
            await client.post("/v1/completions", json=completion(), headers=header)
        ).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("diagnostics", "key", "explained"),
    [(None, "", True), (None, "one", False), (("alice",), "one", True), (("alice",), "two", False)],
)
async def test_explain_is_for_those_who_may_ask(
    api: HttpApi, diagnostics: Any, key: str, explained: bool
) -> None:
    keys = ApiKeys(["alice one", "bob two"] if key else [])
    app = replace(api, keys=keys, auth=AuthSettings(diagnostics=diagnostics)).app()
    body = completion(csps={"explain": True})
    header = {"authorization": f"Bearer {key}"} if key else {}
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        whole = await client.post("/v1/completions", json=body, headers=header)
        streamed = await client.post(
            "/v1/completions", json={**body, "stream": True}, headers=header
        )
    assert whole.status_code == 200
    assert ("csps" in whole.json()) is explained
    assert any("csps" in event for event in events(streamed.text)) is explained


async def test_a_key_revoked_while_its_request_is_read_is_refused(
    api: HttpApi, service: FakeService, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice secret")
    keys = ApiKeys.load(str(file))
    accepted, half_read = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "tiny", '
        await half_read.wait()
        yield b'"prompt": "Say it."}'

    app = replace(api, keys=keys).app()
    note = patch.object(service, "check_room", lambda slo, key, ahead: accepted.set())
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        header = {"authorization": "Bearer secret"}
        with note:
            reading = asyncio.create_task(
                client.post("/v1/completions", content=body(), headers=header)
            )
            async with asyncio.timeout(DEADLINE_S):
                await accepted.wait()
        file.write_text("alice other")
        watching = asyncio.create_task(keys.watch(lambda digests: half_read.set(), period_s=0.001))
        async with asyncio.timeout(DEADLINE_S):
            response = await reading
        watching.cancel()
    assert response.status_code == 401
    assert "revoked" in response.json()["error"]["message"]
    assert not service.specs


# --- writes ----------------------------------------------------------------------------------


async def written(api: HttpApi, service: FakeService, burst: int, **fields: Any) -> list[bytes]:
    """Return the HTTP chunks of a streamed answer as they are on the wire: a chunk is a write.

    Each item of the script is that many tokens at once; the next ones come when the client has read
    what was written of them.
    """
    service.burst, service.turns = burst, asyncio.Semaphore(1)
    body = json.dumps(completion(stream=True, **fields)).encode()
    async with serving(api.app()) as url, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: 1\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"\r\n\r\n")
        chunks = []
        while size := int(await reader.readline(), 16):
            chunks.append(await reader.readexactly(size))
            await reader.readline()
            service.turns.release()
        writer.close()
    return chunks


@pytest.mark.parametrize("burst", [1, 3, 1000])
@pytest.mark.parametrize("options", [{}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_all_pending_events_leave_in_one_write(
    api: HttpApi, service: FakeService, burst: int, options: dict[str, Any]
) -> None:
    one_by_one = await written(api, service, 1, logprobs=1, stream_options=options)
    chunks = await written(api, service, burst, logprobs=1, stream_options=options)
    generated = len(service.script) + 1
    counts = [chunk.count(b"data: {") for chunk in chunks]
    assert counts == counts_of_bursts(generated, burst, usage=bool(options))
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)
    assert chunks[-1].endswith(b"data: [DONE]\n\n")
    assert without_time(b"".join(chunks)) == without_time(b"".join(one_by_one))


def counts_of_bursts(generated: int, burst: int, *, usage: bool) -> list[int]:
    """Return the events in each write; those that end the stream come with the last token's."""
    counts = [min(burst, generated - start) for start in range(0, generated, burst)]
    counts[-1] += usage
    return counts


def without_time(events: bytes) -> bytes:
    return re.sub(rb'"created": [0-9]+', b"", events)


async def test_a_token_alone_leaves_at_once(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not wait for more tokens."""
    service.burst, service.script = 2, service.script[:3]
    monkeypatch.setattr(service, "_sample", partial(first_token_only, service))
    async with (
        asyncio.timeout(DEADLINE_S),
        client.stream("POST", "/v1/completions", json=completion(stream=True)) as response,
    ):
        first = await anext(response.aiter_lines())
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "T"


async def first_token_only(service: FakeService, handle: RequestHandle) -> None:
    handle.deliver(service._tokens(handle.spec)[0])


async def test_tokens_before_a_cancel_by_the_server_are_shown(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_sample", partial(cancelled_after_two, service))
    response = await client.post("/v1/completions", json=completion(stream=True))
    *chunks, error = events(response.text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["T", "h"]
    assert error["error"]["code"] == "unavailable"


async def cancelled_after_two(service: FakeService, handle: RequestHandle) -> None:
    first, second, third, *_ = service._tokens(handle.spec)
    for token in (first, second, replace(third, finish_reason="cancelled")):
        handle.deliver(token)


# --- faults and cancellation -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_token_has_a_status(
    client: httpx.AsyncClient, service: FakeService, stream: bool
) -> None:
    service.failure = GangLost("rank 1 of gang 0xdead died at 10.1.2.3")
    response = await client.post("/v1/completions", json=completion(stream=stream))
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert "10.1.2.3" not in response.text


async def test_a_fault_within_a_stream_is_its_last_event(
    client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.failure, service.fail_after = RuntimeError("at 0xdeadbeef"), 2
    response = await client.post("/v1/completions", json=completion(stream=True))
    assert response.status_code == 200
    *chunks, error = events(response.text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["T", "h"]
    assert error["error"]["type"] == "server_error"
    assert "0xdeadbeef" not in response.text
    assert "RuntimeError: at 0xdeadbeef" in caplog.text


async def test_an_unexpected_error_leaks_nothing(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.refusal = KeyError("internal-name")
    response = await client.post("/v1/completions", json=completion())
    assert response.status_code == 500
    assert_openai_error(response)
    assert "internal-name" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_stops_the_work(
    client: httpx.AsyncClient, service: FakeService, stream: bool
) -> None:
    service.gate = asyncio.Event()  # never set: the request is in prefill
    request = asyncio.ensure_future(client.post("/v1/completions", json=completion(stream=stream)))
    async with asyncio.timeout(DEADLINE_S):
        await service.submitted.wait()
        request.cancel()
        await service.cancelled.wait()
    assert service.handles[0].finish_reason == "cancelled"


async def test_a_client_that_disconnects_from_a_stream_stops_the_work(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.script *= 100_000
    async with asyncio.timeout(DEADLINE_S):
        async with client.stream(
            "POST", "/v1/completions", json=completion(stream=True, max_tokens=1000)
        ) as response:
            await anext(response.aiter_bytes())
        await service.cancelled.wait()


# --- signs of life ---------------------------------------------------------------------------


async def test_a_stream_sends_heartbeats_during_a_long_prefill(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "FIRST_TOKEN_GRACE_S", 0.01)
    monkeypatch.setattr(EventStream.__init__, "__kwdefaults__", {"heartbeat_s": 0.01})
    service.gate = asyncio.Event()
    async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == HEARTBEAT.decode().strip()
        service.gate.set()
        rest = "\n".join([line async for line in lines if not line.startswith(":")])
    assert "".join(chunk["choices"][0]["text"] for chunk in events(rest.strip())) == ANSWER


async def test_a_heartbeat_that_cannot_be_sent_ends_the_stream() -> None:
    """Its error was reported as never retrieved, and the request went on without heartbeats."""
    closed, left = asyncio.Event(), asyncio.Event()

    async def silent() -> AsyncGenerator[bytes]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            left.set()

    async def close() -> None:
        closed.set()

    async def send(message: Message) -> None:
        if message.get("body") == HEARTBEAT:
            raise OSError("the connection is broken")

    stream = EventStream(silent(), close=close, heartbeat_s=0.001)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(OSError, match="the connection is broken"):
            await stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert closed.is_set()
    assert left.is_set()


async def test_a_fault_after_the_stream_began_without_tokens_is_an_event(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "FIRST_TOKEN_GRACE_S", 0.01)
    service.gate, service.failure = asyncio.Event(), GangLost("gone")
    async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
        service.gate.set()
        await response.aread()
    assert response.status_code == 200
    assert events(response.text)[0]["error"]["code"] == "unavailable"


async def test_a_client_that_disconnects_before_the_first_token_stops_the_work(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "FIRST_TOKEN_GRACE_S", 0.01)
    service.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        async with client.stream("POST", "/v1/completions", json=completion(stream=True)):
            pass
        await service.cancelled.wait()
