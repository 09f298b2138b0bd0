"""Every scheduling policy on a deployed server: long and short prompts get transformers' tokens,
and what is cached of them gives way to a prompt that needs every slot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from deployed_server import DEADLINE_S, MODEL, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.scheduling.events.limits import BLOCK_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [random_tokens(length, seed=length) for length in (2_000, 150, 900)]
PROMPTS += [[*PROMPTS[0], *random_tokens(length, seed=length)] for length in (300, 70)]
"""The last two begin like the first."""
TOKENS = 5
PAIR: dict[str, Any] = {
    "prefill": {"instances": 2, "kv_slots": 4_096},
    "decode": {"instances": 2, "kv_slots": 4_096},
}
ELASTIC: dict[str, Any] = {"elastic": {"instances": 2, "kv_slots": 4_096}}
GANGS = {
    "csps": PAIR,
    "fixed_sp": PAIR,
    "context_parallel": PAIR,
    "tetris": PAIR,
    "chunked_prefill": ELASTIC,
    "loongserve": ELASTIC,
}


async def generated(server: Deployed, *prompts: list[int]) -> list[str]:
    """Ask prompts at once; return the answers."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=TOKENS,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for prompt in prompts
            )
        )
    return [answer.choices[0].text for answer in answers]


OPTIONS: dict[str, dict[str, Any]] = {"fixed_sp": {"sp": 2}}
"""By default its groups are smaller than the gang, and so are its longest prompts."""


@pytest.mark.parametrize("policy", GANGS)
def test_policy_serves_the_tokens_of_transformers(policy: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=65_536)
    tokenizer = Tokenizer(model)
    expected = [tokenizer.decode(reference_tokens(model, prompt, TOKENS)) for prompt in PROMPTS]
    scheduling = {"policy": policy, **OPTIONS.get(policy, {})}
    with deployed(model, tmp_path, scheduling=scheduling, **GANGS[policy]) as server:
        first = asyncio.run(generated(server, *PROMPTS[:3]))
        assert first + asyncio.run(generated(server, *PROMPTS[3:])) == expected
        server.assert_only_cache_left()
        assert all(server.slots_taken())
        (slots,) = set(server.slots())
        asyncio.run(generated(server, random_tokens(slots - TOKENS, seed=9)))
        server.assert_only_cache_left()
        assert set(server.slots_taken()) == {(slots - TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS}
