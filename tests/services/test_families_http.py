"""Models other than dense Llamas over HTTP on real ranks: greedy answers are transformers' own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gang_threads import eventually
from greedy_reference import greedy_tokens
from http_over_ranks import Served, served
from quantized_checkpoints import fp8_checkpoint
from tiny_checkpoints import make_checkpoint, random_tokens

from csps.models.tokenizers.tokenizer import Tokenizer

TOKENS = 12
LENGTHS = (20, 150, 700)
"""All beyond the context in which transformers takes LongRoPE's short factors."""
FAMILIES = [
    "qwen3_moe",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in (
            *("mixtral", "glm4_moe", "glm", "glm4", "phi3", "internlm2"),
            *("ministral3", "mistral3", "fp8"),
            *("mistral", "qwen2", "gemma3_text", "gemma3", "gpt_oss"),
        )
    ),
]
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 64},
    "gemma3": {"sliding_window": 64},
    "gpt_oss": {"sliding_window": 64},
}
"""Shorter than the parts of prompts that instances compute."""
POLICIES = [
    ("csps", 2),
    ("context_parallel", 1),
    *(pytest.param(policy, 1, marks=pytest.mark.slow) for policy in ("loongserve", "tetris")),
]


async def ask(server: Served, prompt: list[int]) -> dict[str, Any]:
    answer = await server.client.post(
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("policy", "tp"), POLICIES)
async def test_answers_are_those_of_transformers(
    tmp_path: Path, family: str, policy: str, tp: int
) -> None:
    """Prompts run at once, and then again with their next turn behind cached KV."""
    if family == "fp8":
        model = fp8_checkpoint(tmp_path, "qwen3", (16, 32))
    else:
        model = make_checkpoint(tmp_path, family, **WINDOWS.get(family, {}))
    tokenizer = Tokenizer(model)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]

    def check(answer: dict[str, Any], prompt: list[int]) -> None:
        assert answer["choices"][0]["text"] == tokenizer.decode(
            greedy_tokens(model, prompt, TOKENS)
        )

    options = None if policy == "csps" else {}
    async with served(
        model,
        policy=policy,
        options=options,
        prefill_tp=tp,
        kv_slots=4096,
        reuse=True,
        elastic=policy == "loongserve",
    ) as server:
        answers = await asyncio.gather(*(ask(server, prompt) for prompt in prompts))
        for answer, prompt in zip(answers, prompts, strict=True):
            check(answer, prompt)
        await eventually(lambda: not server.service.counts.decode_kv)
        longer = [*prompts[-1], *random_tokens(90, seed=1)]
        answer = await ask(server, longer)
        check(answer, longer)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


async def test_overrides_reach_the_ranks_and_the_limits(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_theta": 10_000.0, **yarn}
    edited = make_checkpoint(
        tmp_path / "edited", "qwen3", rope_parameters=rope, max_position_embeddings=64
    )
    plain = make_checkpoint(tmp_path / "plain", "qwen3", max_position_embeddings=64)
    prompt = random_tokens(200)
    async with served(plain, overrides={"rope_parameters": yarn}) as server:
        answer = await ask(server, prompt)
        text = Tokenizer(edited).decode(greedy_tokens(edited, prompt, TOKENS))
        assert answer["choices"][0]["text"] == text
        card = (await server.client.get("/v1/models")).json()["data"][0]
        assert card["max_model_len"] == 256


IN_STEPS = [
    ("gpt_oss", "csps"),
    *(
        pytest.param(family, policy, marks=pytest.mark.slow)
        for family, policy in (
            *(("mistral", "csps"), ("qwen2", "csps"), ("gemma3_text", "csps")),
            *(("gpt_oss", "context_parallel"), ("gpt_oss", "fixed_sp"), ("gpt_oss", "tetris")),
        )
    ),
]


@pytest.mark.parametrize(("family", "policy"), IN_STEPS)
async def test_answers_are_the_same_where_windows_have_slots_of_their_own(
    tmp_path: Path, family: str, policy: str
) -> None:
    """Of five requests at a time, each instance has room for one in these layers. The next turns
    begin behind cached KV of the other layers."""
    model = make_checkpoint(tmp_path, family, **WINDOWS[family])
    tokenizer = Tokenizer(model)

    def check(answer: dict[str, Any], prompt: list[int]) -> None:
        assert answer["choices"][0]["text"] == tokenizer.decode(
            greedy_tokens(model, prompt, TOKENS)
        )

    async with served(
        model,
        policy=policy,
        options=None if policy == "csps" else {},
        kv_slots=4096,
        window_slots=70,
        reuse=True,
    ) as server:
        prompts = [random_tokens(length, seed=length) for length in (20, 63, 64, 150, 700)]
        asking = asyncio.gather(*(ask(server, prompt) for prompt in prompts))
        await eventually(lambda: server.service.counts.window_kv > 0)
        answers = await asking
        for answer, prompt in zip(answers, prompts, strict=True):
            check(answer, prompt)
        for turn in range(2):
            longer = [*prompts[-1], *random_tokens(40 + turn * 90, seed=turn)]
            answer = await ask(server, longer)
            check(answer, longer)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
            prompts.append(longer)
        instances = server.service._scheduler._gangs.instances.values()
        await eventually(lambda: not any(instance.window_used for instance in instances))
        assert server.service.counts.window_kv == 0
        for rank in server.gangs[1].ranks:
            near = rank.engine.pool.window_slots
            assert near is not None
            near.check_integrity()
            assert near.used == 0
