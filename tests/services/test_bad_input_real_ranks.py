"""Input that clients must not send, through the HTTP API to real ranks: refused, and nothing
breaks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_over_ranks import Served, served
from tiny_checkpoints import VOCAB, make_checkpoint

from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

BEYOND = "<|im_end|>"
"""Token that the checkpoint's tokenizer knows and its embedding does not."""


@pytest.fixture(scope="module")
def narrow_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that embeds 259 of the tokenizer's 260 tokens."""
    return make_checkpoint(tmp_path_factory.mktemp("narrow"), "llama", vocab_size=259)


@pytest.fixture
async def narrow(narrow_llama: Path) -> AsyncIterator[Served]:
    async with served(narrow_llama) as server:
        yield server


@pytest.fixture
async def tiny(tiny_llama: Path) -> AsyncIterator[Served]:
    async with served(tiny_llama) as server:
        yield server


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Say it.", "max_tokens": 4, "temperature": 0, **fields}


async def check_still_serves(server: Served) -> None:
    answer = await server.client.post("/v1/completions", json=completion())
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    await server.settled()


async def test_tokens_without_an_embedding_are_refused(narrow: Served) -> None:
    """The token would crash the ranks, attempt after attempt. The chat template ends each message
    with it."""
    for prompt in (BEYOND, f"text, {BEYOND} and text", [1, 259], [10**9]):
        answer = await narrow.client.post("/v1/completions", json=completion(prompt=prompt))
        assert answer.status_code == 400, prompt
        assert "outside of the vocabulary of 259" in answer.json()["error"]["message"]
        await check_still_serves(narrow)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    answer = await narrow.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    await check_still_serves(narrow)


def test_tokens_without_an_embedding_cause_a_warning(
    narrow_llama: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RequestParser(Settings(model=str(tiny_llama)))
    assert not caplog.records
    RequestParser(Settings(model=str(narrow_llama)))
    assert "token ids up to 259, the model embeds only 259 tokens" in caplog.text


async def test_forbidding_every_token_is_refused_at_the_first_attempt(tiny: Served) -> None:
    every = list(range(VOCAB))
    for temperature, min_tokens, stream in itertools.product((0, 1), (1, 3), (False, True)):
        fields = {"min_tokens": min_tokens, "stop_token_ids": every, "temperature": temperature}
        answer = await tiny.client.post("/v1/completions", json=completion(stream=stream, **fields))
        assert answer.status_code == 400, (fields, stream)
        error = answer.json()["error"]
        assert "every token is forbidden" in error["message"]
        assert error["param"] == "stop_token_ids"
        await check_still_serves(tiny)


EXTREMES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2**31 - 1},
    "low repetition_penalty": {"repetition_penalty": 0.01},
    "high repetition_penalty": {"repetition_penalty": 100},
    "penalties": {"presence_penalty": -2, "frequency_penalty": 2},
    "temperature": {"temperature": 1e-300},
    "top_p": {"top_p": 1e-300},
    "min_p": {"min_p": 1},
    "seed": {"seed": -(2**63)},
    "max_ttft_ms": {"csps": {"max_ttft_ms": 1e308}},
    "logit_bias": {"logit_bias": {str(token): -100 for token in range(VOCAB)}},
    "min_tokens": {"min_tokens": 4, "ignore_eos": True},
}


@pytest.mark.parametrize("temperature", [0, 1])
async def test_extreme_values_within_the_bounds_are_served(
    tiny: Served, temperature: float
) -> None:
    for name, fields in EXTREMES.items():
        body = {**completion(temperature=temperature, ignore_eos=True), **fields}
        answer = await tiny.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, (name, answer.text)
    await tiny.settled()
