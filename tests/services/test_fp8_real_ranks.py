"""Feed-forward layers in FP8 on real ranks: greedy answers are those of the definition."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fp8_reference import fp8_greedy
from greedy_reference import greedy_tokens
from real_cell import ELASTIC, answer, real_cell

TOKENS = 8
PROMPTS = {300: 196, 9: 51, 60: 26}
"""Seeds by length: prompts whose answers do not depend on the order of sums. The first one's answer
is another one without FP8."""


@pytest.mark.parametrize(
    ("policy", "gangs"),
    [
        ("csps", {}),
        ("context_parallel", {"tp": 2}),
        ("loongserve", {"roles": ELASTIC, "instances": 2}),
    ],
)
async def test_answers(tiny_llama: Path, policy: str, gangs: dict[str, Any]) -> None:
    async with real_cell(tiny_llama, policy, weight_dtype="fp8", **gangs) as cell:
        handles = [
            cell.submit(length, max_tokens=TOKENS, seed=seed) for length, seed in PROMPTS.items()
        ]
        answers = await asyncio.gather(*map(answer, handles))
        prompts = [handle.spec.prompt.tolist() for handle in handles]
        tp = gangs.get("tp", 1)
        assert answers == [fp8_greedy(tiny_llama, prompt, TOKENS, tp) for prompt in prompts]
        assert answers != [greedy_tokens(tiny_llama, prompt, TOKENS) for prompt in prompts]
        await cell.settled()
