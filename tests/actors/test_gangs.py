"""The engine over real gangs of processes, against transformers' greedy tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gang_processes import even_shares, running_cell
from tiny_checkpoints import make_checkpoint, reference_tokens

from csps.protocols.messages import Sampling

GREEDY = Sampling(temperature=0, max_tokens=8)


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype("<i4")


@pytest.mark.parametrize(
    ("prefill", "decode", "prefill_tp", "decode_tp"),
    [(1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)],
)
async def test_greedy_tokens_equal_transformers(
    tmp_path: Path, prefill: int, decode: int, prefill_tp: int, decode_tp: int
) -> None:
    model = make_checkpoint(tmp_path)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((67, 5, 30))]
    expected = [reference_tokens(model, prompt.tolist(), GREEDY.max_tokens) for prompt in prompts]
    async with running_cell(
        model, prefill=prefill, decode=decode, prefill_tp=prefill_tp, decode_tp=decode_tp
    ) as cell:
        answers = await cell.generate(
            [(rid, prompt, GREEDY) for rid, prompt in enumerate(prompts)],
            group=range(prefill),
            decode_shares=[even_shares(len(prompt), range(decode)) for prompt in prompts],
            masters=[rid % decode for rid in range(len(prompts))],
        )
        assert answers == expected
        await cell.until(lambda: len(cell.log["freed"]) == len(prompts) * decode * decode_tp)
        await cell.until(lambda: len(cell.log["prefill_done"]) == prefill * prefill_tp)
        assert set(await cell.used_slots()) == {0}
