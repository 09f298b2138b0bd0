"""A deployment with one elastic gang, whose iterations compute prompts in chunks, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from deployed_server import DEADLINE_S, MODEL, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens

from csps.models.tokenizers.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXACT = {"ignore_eos": True}
PROMPTS = [random_tokens(length, seed=length) for length in (3, 40, 700, 5_000)]
LONG = random_tokens(20_000)
STREAMED = 300
"""Tokens of each answer: enough for a client to see it begin, and for more to come."""


@contextmanager
def elastic_server(model: Path, run_dir: Path, instances: int, tp: int) -> Iterator[Deployed]:
    elastic = {"instances": instances, "tp": tp, "kv_slots": 32_768}
    scheduling = {"policy": "chunked_prefill", "token_budget": 128}
    with deployed(model, run_dir, elastic=elastic, scheduling=scheduling) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", max_position_embeddings=65_536)


async def texts(
    server: Deployed, requests: list[dict[str, Any]], kill: int | None = None
) -> list[str]:
    """Stream all requests at once, and kill the process of this number when a stream has begun."""
    begun = asyncio.Event()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:

        async def read(fields: dict[str, Any]) -> str:
            parts = []
            async for chunk in await client.completions.create(
                model=MODEL, stream=True, extra_body=EXACT, **fields
            ):
                parts.append(chunk.choices[0].text)
                if len(parts) > 3:
                    begun.set()
            return "".join(parts)

        reading = asyncio.gather(*map(read, requests))
        if kill is not None:
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            os.kill(kill, signal.SIGKILL)
        return await reading


def check_answers(server: Deployed, model: Path) -> None:
    """Check for the greedy tokens of transformers, and for idle ranks afterwards."""
    wanted = [{"prompt": prompt, "max_tokens": 6, "temperature": 0} for prompt in PROMPTS]
    tokenizer = Tokenizer(model)
    expected = [tokenizer.decode(reference_tokens(model, prompt, 6)) for prompt in PROMPTS]
    assert asyncio.run(texts(server, wanted)) == expected
    server.assert_only_cache_left()


def test_an_elastic_gang_answers_and_outlives_its_ranks(model: Path, tmp_path: Path) -> None:
    with elastic_server(model, tmp_path, 2, 1) as server:
        assert len(before := server.pids("ElasticGang")) == 2
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.gauge("ready") == 1
        check_answers(server, model)
        check_cancelled_riders(server)
        wanted = [
            {"prompt": prompt, "max_tokens": STREAMED, "temperature": n % 2, "seed": n}
            for n, prompt in enumerate(PROMPTS)
        ]
        undisturbed = asyncio.run(texts(server, wanted))
        assert asyncio.run(texts(server, wanted, kill=max(before))) == undisturbed
        server.wait_gauge("gangs_lost_total", 1)
        assert server.gauge("request_retries_total") > 0
        assert server.gauge("request_failures_total") == 0
        server.wait_ready()
        assert not server.pids("ElasticGang") & before
        server.assert_only_cache_left()
        server.wait_zero("num_requests_running")
        server.wait_zero("kv_cache_usage_perc")


def check_cancelled_riders(server: Deployed) -> None:
    """Cancel a client whose prompt is piggybacked, and one that decodes."""
    started = server.gauge("request_queue_time_seconds_count")
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 5_000, "stream": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
            post = client.post("/v1/completions", json=body)
            request = asyncio.ensure_future(post)
            decoding = {**body, "prompt": PROMPTS[0], "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=decoding) as answer:
                await anext(answer.aiter_lines())
                await asyncio.to_thread(
                    server.wait_gauge, "request_queue_time_seconds_count", started + 2
                )
            request.cancel()

    asyncio.run(leave())
    server.assert_only_cache_left()
    server.wait_zero("num_requests_running")


def test_an_elastic_instance_of_two_ranks_answers(model: Path, tmp_path: Path) -> None:
    with elastic_server(model, tmp_path, 1, 2) as server:
        check_answers(server, model)
