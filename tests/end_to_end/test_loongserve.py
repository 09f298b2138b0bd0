"""LoongServe on a real Ray: an elastic gang of four against the policy `csps`, token by token."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from deployed_server import DEADLINE_S, MODEL, POLL_S, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens
from watched_streams import Talk, check_same, client_of

from csps.actors.engine.decode_batch import ANSWER_FROM, ANSWER_TOKENS, PROMPT_TOKENS
from csps.loadgen.workloads.named import workload
from csps.services.launch.trace_command import main as show
from csps.services.telemetry.traces.spans import RecordedSpan, read_spans, span_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONGEST, ANSWER, REQUESTS = 16_000, 24, 12
KV_SLOTS = 16_200
"""KV slots of an instance, for the longest prompt and the beginning of its answer."""
SCALED_UP = KV_SLOTS - LONGEST
"""Tokens of such an answer that lie where its prompt does."""
DECODING = 4, 400, 2_000
"""Requests, their prompts and answers: each is decoded by an instance of its own."""
LATE = 3_000, 10
"""Prompt and answer of who comes then."""
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", max_position_embeddings=65_536)


def mixed() -> list[dict[str, Any]]:
    """Return LoongServe's Mixed workload, its longest prompt scaled to `LONGEST`."""
    mixed = workload("mixed")
    inputs, outputs = mixed.draw(REQUESTS, np.random.default_rng(3))
    lengths = np.maximum(1, inputs * LONGEST // mixed.longest_input)
    return [
        {
            "model": MODEL,
            "prompt": random_tokens(int(length), seed=seed),
            "max_tokens": int(min(output, ANSWER)),
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        for seed, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]


def answers(server: Deployed, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log-probabilities of all answers, sent at once."""

    async def all_of_them() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S * 4) as client:
            posts = (client.post("/v1/completions", json=body) for body in bodies)
            return [response.raise_for_status().json() for response in await asyncio.gather(*posts)]

    return [answer["choices"][0]["logprobs"] for answer in asyncio.run(all_of_them())]


def spans_of(server: Deployed) -> list[RecordedSpan]:
    spans = read_spans(span_files(Path(server.config.settings.telemetry.spans_dir)))
    return [span for span in spans if span.trace_id == TRACE]


async def decoded_by_all(server: Deployed) -> list[Talk]:
    """Return the answers of requests that come one after the other, and of one for which no
    instance is idle then.
    """
    count, length, output_tokens = DECODING
    talks = [
        Talk({"prompt": random_tokens(length + n, seed=n), "max_tokens": output_tokens})
        for n in range(count)
    ]
    talks.append(Talk({"prompt": random_tokens(LATE[0], seed=count), "max_tokens": LATE[1]}))
    async with client_of(server) as client:
        reading = []
        for talk in talks:
            reading.append(asyncio.create_task(talk.read(client)))
            await talk.says(2)
        await asyncio.gather(*reading)
    return talks


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[Talk]]:
    """Return the answers of the policy `csps` to the mixed and the decoding workload."""
    two = {"instances": 2, "kv_slots": 65_536}
    run, scheduling = tmp_path_factory.mktemp("csps"), {"policy": "csps"}
    with deployed(model, run, prefill=two, decode=two, scheduling=scheduling) as server:
        return answers(server, mixed()), asyncio.run(decoded_by_all(server))


@pytest.fixture(scope="module")
def server(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: object
) -> Iterator[Deployed]:
    """Yield an elastic gang, after the other server has stopped."""
    elastic = {"instances": 4, "kv_slots": KV_SLOTS}
    run, scheduling = tmp_path_factory.mktemp("loongserve"), {"policy": "loongserve"}
    with deployed(model, run, elastic=elastic, scheduling=scheduling) as server:
        yield server
        server.assert_only_cache_left()
        # Nothing was evicted, or it would have been tried again.
        assert server.gauge("request_retries_total") == 0
        assert server.gauge("request_failures_total") == 0


def test_the_mixed_workload(
    server: Deployed, expected: tuple[list[dict[str, Any]], list[Talk]]
) -> None:
    bodies = mixed()
    assert max(len(body["prompt"]) for body in bodies) > 2_000
    for ours, theirs in zip(answers(server, bodies), expected[0], strict=True):
        check_same(ours, theirs)
    assert server.gauge("elastic_events_total", event="scale_down") > 0


def test_decoding_sequences_move(
    server: Deployed, expected: tuple[list[dict[str, Any]], list[Talk]]
) -> None:
    """The policy empties an instance for a new request while all instances decode."""
    before = server.gauge("elastic_events_total", event="migrate")
    for ours, theirs in zip(asyncio.run(decoded_by_all(server)), expected[1], strict=True):
        assert ours.tokens == theirs.tokens
        ours.check(theirs)
    assert server.gauge("elastic_events_total", event="migrate") > before
    assert server.gauge("elastic_bytes_total", event="migrate") > 0


def test_a_prompt_of_four_instances_is_decoded_by_one_and_then_by_two(
    server: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace shows that the prompt's KV and that of the first tokens stay on one instance. The
    holder of the later tokens has nothing before.
    """
    body = {
        "model": MODEL,
        "prompt": random_tokens(LONGEST, seed=99),
        "max_tokens": SCALED_UP + 101,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    url = f"{server.url}/v1/completions"
    httpx.post(url, json=body, headers=headers, timeout=4 * DEADLINE_S).raise_for_status()
    # Ranks write their spans when they like.
    events = {"elastic.scale_down": 1, "elastic.scale_up": 1}
    wanted = Counter({"llm_request": 1, "prefill.compute": 4, "decode.rank": 4, **events})
    deadline = time.monotonic() + DEADLINE_S
    while not wanted <= (found := Counter(span.name for span in spans_of(server))):
        assert time.monotonic() < deadline, f"only {found}"
        time.sleep(POLL_S)
    spans = spans_of(server)
    assert {span.rank for span in spans if span.name == "prefill.compute"} == {0, 1, 2, 3}
    (down,) = [span for span in spans if span.name == "elastic.scale_down"]
    assert down.attributes["csps.elastic.tokens"] == LONGEST
    lies = [
        tuple(span.attributes.get(name) for name in (PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_FROM))
        for span in spans
        if span.name == "decode.rank"
    ]
    nothing = (0, 0, None)
    assert Counter(lies) == Counter(
        [(LONGEST, SCALED_UP, 0), (0, 100, SCALED_UP), nothing, nothing]
    )
    show(["show", TRACE, "--traces", str(server.config.settings.telemetry.spans_dir)])
    shown = capsys.readouterr().out
    assert all(shown.count(name) >= 1 for name in wanted)
