"""The real application on a real Ray, driven by the official client.

`csps serve` has put it in the place of the server that test_serve_command.py has left, if that ran.
The tests share it and leave it as they found it: each ends with nothing left but cached KV. The
last one stops it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from deployed_server import MODEL, Deployed, commands_in, replaced, slowdown
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens
from watched_streams import Talk, client_of

from csps.cli import main
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.launch.serve_command import undeploy
from csps.services.telemetry.traces.spans import RecordedSpan, read_spans, span_files

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 120.0
EXACT = {"ignore_eos": True}
POSITIONS = 65_536
FROZEN_S = 15.0
"""Longest pause of a stream whose rank is frozen, on an idle machine (`slowdown`)."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def server(model_dir: Path, folder: Path, port: int) -> Iterator[Deployed]:
    with replaced(model_dir, folder, port) as server:
        yield server


@pytest.fixture
def client(server: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Expected:
    return Expected(model_dir)


class Expected:
    """The greedy answer of transformers, as text."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir, self._tokenizer = model_dir, Tokenizer(model_dir)

    def __call__(self, prompt: list[int], count: int) -> str:
        return self._tokenizer.decode(reference_tokens(self._model_dir, prompt, count))


def ask(client: openai.OpenAI, prompt: list[int], count: int) -> str:
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=count, temperature=0, extra_body=EXACT
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), count)
    return answer.choices[0].text


def stream(client: openai.OpenAI, prompt: list[int], count: int) -> openai.Stream:  # type: ignore[type-arg]
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=EXACT
    )


# --- answers ---------------------------------------------------------------------------------


def test_a_completion_is_what_transformers_says(client: openai.OpenAI, expected: Expected) -> None:
    prompt = random_tokens(300, seed=1)
    assert ask(client, prompt, 12) == expected(prompt, 12)


def test_a_stream_says_the_same(client: openai.OpenAI, expected: Expected) -> None:
    prompt = random_tokens(300, seed=1)
    text = "".join(chunk.choices[0].text for chunk in stream(client, prompt, 12))
    assert text == expected(prompt, 12)


def test_a_16k_prompt_on_several_instances(client: openai.OpenAI, expected: Expected) -> None:
    prompt = random_tokens(16_384, seed=2)
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=2,
        temperature=0,
        extra_body={**EXACT, "csps": {"explain": True}},
    )
    assert answer.choices[0].text == expected(prompt, 2)
    report = answer.model_extra["csps"]  # type: ignore[index]
    assert sorted(report["placement"]["group"]) == [0, 1]
    assert report["plan"]["attention"] == "exact"
    assert report["timings"]["ttft_s"] > 0


def test_sparse_attention_that_drops_nothing_says_the_same(
    server: Deployed, client: openai.OpenAI, expected: Expected
) -> None:
    prompt = random_tokens(6_000, seed=4)
    exchanged_s = server.gauge("prefill_communication_seconds_total")
    csps = {"attention": "csa", "levels": 2, "drop_ratio": 0, "strategy": "ntp", "explain": True}
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=3, temperature=0, extra_body={**EXACT, "csps": csps}
    )
    assert answer.choices[0].text == expected(prompt, 3)
    report = answer.model_extra["csps"]  # type: ignore[index]
    assert report["plan"]["attention"] == report["plan"]["strategy"] == "csa"
    assert report["plan"]["csa"]["locations"] == ["0-0-0", "0-0-1"]
    # Ranks may tell what the prompt has cost when the answer has ended.
    server.wait_gauge("prefill_communication_seconds_total", exchanged_s + 1e-6)


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Say something."}]}]
    request = {"model": MODEL, "messages": messages, "max_completion_tokens": 8, "seed": 3}
    whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
    chunks = client.chat.completions.create(  # type: ignore[call-overload]
        **request, stream=True, stream_options={"include_usage": True}
    )
    parts, usage = [], None
    for chunk in chunks:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage == whole.usage


def test_many_requests_of_mixed_length_at_once(server: Deployed, expected: Expected) -> None:
    prompts = [random_tokens(length, seed=length) for length in (3, 40, 700, 5_000)] * 8

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, extra_body=EXACT
                    )
                    for prompt in prompts
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == [expected(prompt, 6) for prompt in prompts]
    server.assert_only_cache_left()


def test_models_health_and_metrics(server: Deployed, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.gauge("generation_tokens_total") > 0


def test_the_http_front_listens_on_loopback_only(server: Deployed) -> None:
    """HTTP and two pages of counters."""
    addresses = server.listening("haproxy")
    assert len(addresses) == 3
    assert {address.partition(":")[0] for address in addresses} == {"0100007F"}


def test_one_trace_spans_all_processes(server: Deployed) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {
        "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
        "tracestate": "csps=timeline",
        "x-request-id": "traced-1",
    }
    body = {"model": MODEL, "prompt": random_tokens(5_000), "max_tokens": 3}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S
    )
    assert answer.headers.get_list("x-request-id") == ["traced-1"]
    processes = {"csps-router", "csps-prefill", "csps-decode"}
    deadline = time.monotonic() + DEADLINE_S
    while processes - services_of(spans := server_spans(server), trace_id):
        assert time.monotonic() < deadline, f"only {services_of(spans, trace_id)}"
        time.sleep(0.1)
    # The only request that has asked for one.
    assert {span.trace_id for span in spans if span.is_phase} == {trace_id}


def server_spans(server: Deployed) -> list[RecordedSpan]:
    """Return all spans written so far."""
    return list(read_spans(span_files(Path(server.config.settings.telemetry.spans_dir))))


def services_of(spans: list[RecordedSpan], trace_id: str) -> set[str]:
    """Return the services that have written spans of a trace."""
    return {span.service for span in spans if span.trace_id == trace_id}


# --- bad input -------------------------------------------------------------------------------

BAD_BODIES = {
    b'{"model": "tiny", "prompt": "\xff"}': 400,
    b'{"model": "tiny", "prompt": "\\udc00"}': 400,
    b'{"model": "tiny", "prompt": ""}': 400,
    b'{"model": "tiny", "prompt": "x", "max_tokens": -5}': 400,
    b'{"model": "other", "prompt": "x"}': 404,
    b'{"model": "tiny", "prompt": "x", "csps": {"attention": "csa", "levels": 3}}': 400,
    b'{"model": "tiny", "prompt": "x", "csps": {"attention": "csa", "drop_ratio": 1}}': 400,
    b"{": 400,
}


@pytest.mark.parametrize("body", BAD_BODIES)
def test_bad_bodies_get_openai_errors(server: Deployed, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=DEADLINE_S)
    assert answer.status_code == BAD_BODIES[body]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_prompt_that_can_never_fit_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, random_tokens(POSITIONS), 100)
    assert refused.value.code == "context_length_exceeded"
    assert str(POSITIONS) in str(refused.value)
    assert str(POSITIONS + 100) in str(refused.value)


# --- cancellation ----------------------------------------------------------------------------


def test_a_client_that_leaves_while_decoding_frees_everything(
    server: Deployed, client: openai.OpenAI
) -> None:
    chunks = stream(client, random_tokens(10_000), 20_000)
    next(chunks)
    next(chunks)
    chunks.close()
    server.assert_only_cache_left()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_during_prefill_frees_everything(
    server: Deployed, streams: bool
) -> None:
    started = server.gauge("request_queue_time_seconds_count")
    body = {"model": MODEL, "prompt": random_tokens(40_000), "max_tokens": 5, "stream": streams}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            request = asyncio.ensure_future(client.post(f"{server.url}/v1/completions", json=body))
            await asyncio.to_thread(
                server.wait_gauge, "request_queue_time_seconds_count", started + 1
            )
            request.cancel()

    asyncio.run(leave())
    server.assert_only_cache_left()


# --- faults ----------------------------------------------------------------------------------

# Each death under Ray takes seconds: the default suite has one of each kind here, and all of them
# without Ray, in tests/services/test_service_real_ranks.py and tests/actors/test_killed_ranks.py.


def check_recovers(server: Deployed, client: openai.OpenAI, expected: Expected) -> None:
    """Check for a right answer, and for free slots afterwards. Without a router the HTTP front
    answers with an error.
    """
    prompt = random_tokens(300, seed=1)
    assert ask(client.with_options(max_retries=20), prompt, 12) == expected(prompt, 12)
    server.assert_only_cache_left()


@pytest.mark.parametrize(
    ("gang", "rank"),
    [
        pytest.param("DecodeGang", 0, marks=pytest.mark.slow),
        pytest.param("DecodeGang", 1, marks=pytest.mark.slow),
        pytest.param("PrefillGang", 0, marks=pytest.mark.slow),
        pytest.param("PrefillGang", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_idle_is_replaced(
    server: Deployed, client: openai.OpenAI, expected: Expected, gang: str, rank: int
) -> None:
    server.kill_replica(gang, rank)
    check_recovers(server, client, expected)


@pytest.mark.slow
@pytest.mark.parametrize("gang", ["PrefillGang", "DecodeGang"])
def test_a_rank_killed_during_prefill_goes_unnoticed(
    server: Deployed, client: openai.OpenAI, expected: Expected, gang: str
) -> None:
    prompt = random_tokens(16_384, seed=2)
    started = server.gauge("request_queue_time_seconds_count")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(ask(client, prompt, 2)))
    asking.start()
    server.wait_gauge("request_queue_time_seconds_count", started + 1)
    server.kill_replica(gang)
    asking.join(DEADLINE_S)
    assert answers == [expected(prompt, 2)]
    server.assert_only_cache_left()


@pytest.mark.slow
def test_a_frozen_rank_is_replaced_and_a_stream_goes_on(
    server: Deployed, client: openai.OpenAI, expected: Expected
) -> None:
    """Its connections stand and its kernel acknowledges everything. The other processes and faults
    are in test_frozen_processes.py."""
    fields, factor = {"prompt": random_tokens(300, seed=1), "max_tokens": 400}, slowdown()
    pid = server.replicas("DecodeGang")[0]["pid"]

    async def listen() -> tuple[Talk, Talk, float, bool]:
        async with client_of(server) as streaming:
            undisturbed, talk = Talk(fields), Talk(fields)
            await undisturbed.read(streaming)
            reading = asyncio.create_task(talk.read(streaming))
            await talk.says(1)
            os.kill(pid, signal.SIGSTOP)
            watching = asyncio.create_task(becomes_red(server))
            longest_s, last = 0.0, time.monotonic()
            while not talk.over:
                talk.news.clear()
                await talk.news.wait()
                longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
            await reading
            return undisturbed, talk, longest_s, await watching

    undisturbed, talk, longest_s, red = asyncio.run(listen())
    assert talk.tokens == undisturbed.tokens == 400
    talk.check(undisturbed)
    assert longest_s <= FROZEN_S * factor
    assert red, "/health was green all the time"
    check_recovers(server, client, expected)


async def becomes_red(server: Deployed) -> bool:
    """Wait until `/health` is red."""
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        while (await client.get(f"{server.url}/health")).status_code == httpx.codes.OK:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return True


STREAMS = [
    {"prompt": random_tokens(60 + 97 * n, seed=n), "temperature": n % 2, "seed": n}
    for n in range(40)
]
"""20 greedy ones and 20 seeded ones."""
STREAMED = 100


async def all_streams(server: Deployed, on_begun: Callable[[], None] | None = None) -> list[str]:
    """Return the texts of all streams; call `on_begun` when a quarter of them have begun."""
    begun = asyncio.Event()
    said = 0
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:

        async def read(fields: dict[str, Any]) -> str:
            nonlocal said
            texts = []
            async for chunk in await client.completions.create(
                model=MODEL, max_tokens=STREAMED, stream=True, extra_body=EXACT, **fields
            ):
                texts.append(chunk.choices[0].text)
                said += len(texts) == 10
                if said == len(STREAMS) // 4:
                    begun.set()
            return "".join(texts)

        texts = asyncio.gather(*map(read, STREAMS))
        if on_begun is not None:
            async with asyncio.timeout(DEADLINE_S):
                await begun.wait()
            await asyncio.to_thread(on_begun)
        return await texts


@pytest.mark.slow
@pytest.mark.parametrize("gang", ["PrefillGang", "DecodeGang"])
def test_no_stream_sees_a_rank_die(server: Deployed, gang: str) -> None:
    """All streams continue with the tokens of an undisturbed run."""
    undisturbed = asyncio.run(all_streams(server))
    disturbed = asyncio.run(all_streams(server, lambda: server.kill_replica(gang)))
    assert disturbed == undisturbed
    server.wait_ready()
    server.assert_only_cache_left()


@pytest.mark.slow
def test_a_killed_router_is_replaced_and_what_it_had_asked_for_ends(
    server: Deployed, client: openai.OpenAI, expected: Expected
) -> None:
    chunks = stream(client, random_tokens(300, seed=1), 20_000)
    next(chunks)
    server.kill_replica("Router")
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in chunks:
            pass
    check_recovers(server, client, expected)


# --- the end ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopping_lets_running_requests_finish(
    server: Deployed, client: openai.OpenAI, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last in the file: there is no server after it."""
    chunks = stream(client, random_tokens(300), 500)
    next(chunks)
    stopping = threading.Thread(target=undeploy, args=(server.head,))
    stopping.start()
    assert sum(1 for _ in chunks) == 499
    stopping.join(DEADLINE_S)
    with pytest.raises(openai.APIError):
        ask(client, random_tokens(3), 1)

    with commands_in(folder):
        assert main(["stop"]) == 0
    assert "stopped" in capsys.readouterr().out
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert not (folder / "run" / "ray-token").exists()
