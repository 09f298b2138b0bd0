"""Conversations over HTTP on real ranks: which KV is reused, for whom, and how it is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from gang_threads import eventually
from http_over_ranks import Served, served

from csps.services.scheduling.events.limits import BLOCK_TOKENS

KEYS = ("one-key", "another-key")


@pytest.fixture
async def server(tiny_llama: Path) -> AsyncIterator[Served]:
    async with served(tiny_llama, reuse=True, keys=KEYS) as made:
        yield made


async def complete(
    server: Served, prompt: list[int], *, key: str = KEYS[0], **more: Any
) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    answer = await server.client.post(
        "/v1/completions",
        json={"ignore_eos": True, **body},
        headers={"authorization": f"Bearer {key}"},
    )
    assert answer.status_code == 200, answer.text
    await eventually(lambda: not server.service.counts.prefill_kv)
    await eventually(lambda: not server.service.counts.decode_kv)
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(tokens, int)
    return tokens


async def test_five_turns_answer_like_fresh_prompts(server: Served) -> None:
    random = np.random.default_rng(2)
    text: list[int] = random.integers(0, 256, 150).tolist()
    before = 0
    for turn in range(5):
        answer = await complete(server, text)
        fresh = await complete(server, text, cache_salt=f"turn {turn}")
        assert answer["choices"] == fresh["choices"]
        assert cached(fresh) == 0
        assert cached(answer) == before // BLOCK_TOKENS * BLOCK_TOKENS
        before = len(text)
        text = [*text, *random.integers(0, 256, 70).tolist()]
    metrics = (await server.client.get("/metrics")).text
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("csps:prefix_cache") and "_total" in line
    }
    lengths = [150 + 70 * turn for turn in range(5)]
    assert values["csps:prefix_cache_queries_total"] == 2 * sum(lengths)
    hits = sum(length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths[:-1])
    assert values["csps:prefix_cache_hits_total"] == hits


async def test_the_openai_client_continues_a_conversation(server: Served) -> None:
    """Each turn contains the server's own last answer, as clients send it."""
    base = str(server.client.base_url.join("/v1"))
    async with openai.AsyncOpenAI(base_url=base, api_key=KEYS[0], max_retries=0) as client:
        said: list[Any] = []
        for turn in range(5):
            question = "what comes then? " * (1 if turn else 20)
            said.append({"role": "user", "content": f"Turn {turn}: {question}"})
            ask = partial(
                client.chat.completions.create,
                model="tiny",
                messages=said,
                max_tokens=8,
                temperature=0,
            )
            answer, fresh = await ask(), await ask(extra_body={"cache_salt": f"turn {turn}"})
            assert answer.choices[0].message == fresh.choices[0].message
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            reused = answer.usage.prompt_tokens_details.cached_tokens
            assert turn == 0 or (reused or 0) >= BLOCK_TOKENS
            said.append({"role": "assistant", "content": answer.choices[0].message.content})


async def test_kv_is_shared_within_one_key_and_one_salt(server: Served) -> None:
    text = np.random.default_rng(3).integers(0, 256, 150).tolist()
    those: list[dict[str, Any]] = [{}, {"key": KEYS[1]}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    for more in those:
        answers = [await complete(server, text, **more) for _ in range(2)]
        assert [cached(answer) for answer in answers] == [0, 128], more


async def test_an_empty_salt_is_refused(server: Served) -> None:
    answer = await server.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": [1, 2], "cache_salt": ""},
        headers={"authorization": f"Bearer {KEYS[0]}"},
    )
    assert answer.status_code == 400
    assert "cache_salt" in answer.json()["error"]["message"]


def metrics_of(text: str, *names: str) -> list[float]:
    """Return values of series without labels but the model's."""
    series = [line for line in text.splitlines() if line.startswith("csps:")]
    values = {line.split("{")[0]: float(line.split()[-1]) for line in series}
    return [values[f"csps:{name}"] for name in names]


async def test_a_conversation_goes_on_from_files_after_a_redeployment(
    tiny_llama: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    text: list[int] = random.integers(0, 256, 600).tolist()
    whole = len(text) // BLOCK_TOKENS * BLOCK_TOKENS
    after = [*text, *random.integers(0, 256, 70).tolist()]

    # On however busy a machine, files are read faster than these tokens would be computed.
    server_of = partial(
        served, tiny_llama, reuse=True, keys=KEYS, kv_files=tmp_path, token_ns=10**8
    )

    async with server_of() as server:
        assert cached(await complete(server, text)) == 0

        def saved() -> bool:
            return metrics_of(server.metrics.render().decode(), "kv_saved_tokens_total") == [whole]

        await eventually(saved)
    async with server_of() as server:
        prefix = server.service._scheduler._prefix
        await eventually(lambda: any(map(len, prefix.saved.values())))
        other = await complete(server, after, key=KEYS[1])
        assert cached(other) == 0
        answer = await complete(server, after)
        assert answer["choices"] == other["choices"]
        assert cached(answer) == whole
        found = metrics_of(server.metrics.render().decode(), "kv_restored_tokens_total")
        assert found == [whole]
        again = await complete(server, after)
        assert answer["choices"] == again["choices"]
        server.service.check_integrity()
