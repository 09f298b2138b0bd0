"""Log-probabilities of prompts over HTTP on real ranks: transformers' own, however many instances
compute the prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from http_over_ranks import Served, served
from tiny_checkpoints import make_checkpoint, random_tokens, reference_logits
from torch import Tensor

from csps.actors.attention import step_points
from csps.models.tokenizers.tokenizer import Tokenizer

LENGTHS = (1, 2, 37, 300, 700)
LAYOUTS = [
    ("csps", 1, {}),
    ("csps", 2, {}),
    ("context_parallel", 1, {}),
    pytest.param("context_parallel", 1, {"strategy": "ring_q"}, marks=pytest.mark.slow),
    pytest.param("context_parallel", 2, {"strategy": "ring_kv"}, marks=pytest.mark.slow),
    ("loongserve", 1, {}),
    ("tetris", 1, {}),
]
TOLERANCE = 3e-5


def policy_options(policy: str) -> dict[str, Any] | None:
    return None if policy == "csps" else {}


async def complete(server: Served, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def expected(model: Path, prompt: list[int]) -> Tensor:
    """Return transformers' log-probabilities (tokens - 1, vocab) behind every token but the
    last."""
    return reference_logits(model, prompt)[: len(prompt) - 1].float().log_softmax(-1)


def check_listed(listed: list[Any], model: Path, prompt: list[int], count: int) -> None:
    """Check vLLM's field."""
    assert len(listed) == len(prompt)
    assert listed[0] is None
    if len(prompt) == 1:
        return
    logprobs_tv = expected(model, prompt)
    tokenizer = Tokenizer(model)
    for row, (entry, token) in enumerate(zip(listed[1:], prompt[1:], strict=True)):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(logprobs_tv[row, token].item(), abs=TOLERANCE)
        at_least = logprobs_tv[row] >= logprobs_tv[row, token] - TOLERANCE
        more = logprobs_tv[row] > logprobs_tv[row, token] + TOLERANCE
        assert int(more.sum()) < own["rank"] <= int(at_least.sum())
        assert own["decoded_token"] == tokenizer.token_bytes(token).decode(
            errors="backslashreplace"
        )
        ranked = sorted(entry.values(), key=lambda each: each["rank"])
        best = logprobs_tv[row].topk(count).values
        shown = torch.tensor([each["logprob"] for each in ranked[:count]])
        assert torch.allclose(shown, best, atol=TOLERANCE)
        assert len(entry) in (count, count + 1)


@pytest.mark.parametrize(("policy", "tp", "csps"), LAYOUTS)
async def test_prompt_logprobs_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tp: int, csps: dict[str, Any]
) -> None:
    """Beside a request without, in blocks of few rows."""
    model = make_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(step_points, "LOGITS_BYTES", 64 * 4 * 300)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    async with served(
        model,
        policy=policy,
        options=policy_options(policy),
        prefill_tp=tp,
        kv_slots=4096,
        reuse=True,
        elastic=policy == "loongserve",
    ) as server:
        plain = await complete(server, prompt=prompts[-1], max_tokens=8, csps=csps)
        answers = await asyncio.gather(
            complete(server, prompt=prompts[-1], max_tokens=8, csps=csps),
            *(
                complete(server, prompt=prompt, prompt_logprobs=number % 3, csps=csps)
                for number, prompt in enumerate(prompts)
            ),
        )
        assert answers[0]["choices"] == plain["choices"]
        for number, (answer, prompt) in enumerate(zip(answers[1:], prompts, strict=True)):
            check_listed(answer["choices"][0]["prompt_logprobs"], model, prompt, number % 3)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        server.service.check_integrity()


async def test_echo_with_logprobs_begins_with_those_of_the_prompt(tmp_path: Path) -> None:
    """As lm-eval asks for the likelihood of the end of a text."""
    model = make_checkpoint(tmp_path, "llama")
    tokenizer = Tokenizer(model)
    prompts = [random_tokens(length, seed=length) for length in (40, 400)]
    async with served(model) as server:
        answer = await complete(server, prompt=prompts, echo=True, logprobs=1, max_tokens=2)
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            shown, logprobs_tv = choice["logprobs"], expected(model, prompt)
            assert {len(values) for values in shown.values()} == {len(prompt) + 2}
            assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
            own = logprobs_tv.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert shown["token_logprobs"][1 : len(prompt)] == pytest.approx(
                own.tolist(), abs=TOLERANCE
            )
            for row, top in enumerate(shown["top_logprobs"][1 : len(prompt)]):
                assert max(top.values()) == pytest.approx(
                    logprobs_tv[row].max().item(), abs=TOLERANCE
                )
            assert shown["text_offset"][0] == 0
            assert shown["text_offset"] == sorted(shown["text_offset"])
            spelled = [tokenizer.token_bytes(token) for token in prompt]
            assert shown["tokens"][: len(prompt)] == [
                token.decode(errors="backslashreplace") for token in spelled
            ]
            assert shown["text_offset"][len(prompt)] == len(tokenizer.decode(prompt))
            assert choice["text"].startswith(tokenizer.decode(prompt))
        await server.settled()


async def test_several_answers_show_the_prompt_alike(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    prompt = random_tokens(60, seed=3)
    async with served(model) as server:
        fields = {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "seed": 5, "temperature": 1}
        answer = await complete(server, prompt=prompt, n=3, max_tokens=4, **fields)
        alone = await complete(server, prompt=prompt, max_tokens=4, **fields)
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        listed = [choice["prompt_logprobs"] for choice in answer["choices"]]
        assert listed[0] == listed[1] == listed[2]
        check_listed(listed[0], model, prompt, 1)
        texts = {choice["text"] for choice in answer["choices"]}
        assert len(texts) == 3
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["tokens"]) == len(prompt) + 4


async def test_a_policy_that_computes_prompts_beside_decoding_refuses(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    async with served(model, policy="chunked_prefill", options={}) as server:
        body = {"model": "tiny", "prompt": random_tokens(20), "prompt_logprobs": 0}
        answer = await server.client.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt_logprobs"
        await server.settled()
