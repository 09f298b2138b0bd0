"""Every scheduling policy on a deployed server: long and short prompts get transformers' tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from deployed_server import DEADLINE_S, MODEL, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens

from csps.models.tokenizers.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [random_tokens(length, seed=length) for length in (2_000, 150, 900)]
TOKENS = 5
PAIR: dict[str, Any] = {
    "prefill": {"instances": 2, "kv_slots": 8_192},
    "decode": {"instances": 2, "kv_slots": 8_192},
}
ELASTIC: dict[str, Any] = {"elastic": {"instances": 2, "kv_slots": 8_192}}
GANGS = {
    "csps": PAIR,
    "fixed_sp": PAIR,
    "context_parallel": PAIR,
    "tetris": PAIR,
    "chunked_prefill": ELASTIC,
    "loongserve": ELASTIC,
}


async def generated(server: Deployed) -> list[str]:
    """Ask all prompts at once; return the answers."""
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
                for prompt in PROMPTS
            )
        )
    return [answer.choices[0].text for answer in answers]


@pytest.mark.parametrize("policy", GANGS)
def test_policy_serves_the_tokens_of_transformers(policy: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=65_536)
    tokenizer = Tokenizer(model)
    expected = [tokenizer.decode(reference_tokens(model, prompt, TOKENS)) for prompt in PROMPTS]
    with deployed(model, tmp_path, scheduling={"policy": policy}, **GANGS[policy]) as server:
        assert asyncio.run(generated(server)) == expected
        server.assert_all_slots_free()
