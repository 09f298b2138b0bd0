"""Rings that requests ask for, with prompts that are computed in chunks, on real ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from real_cell import answer, real_cell
from tiny_checkpoints import reference_tokens

from csps.protocols.attention.plan import ASKED_RINGS
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_spec import RequestSpec
from csps.services.scheduling.policies.registry import make_policy

TOKENS = 6


async def test_every_chunk_keeps_the_ring_that_was_asked_for(tiny_llama: Path) -> None:
    """The prompts run side by side, so later ones begin on fewer instances than they end on."""
    policy = make_policy("tetris", {"improvement_rate": 0.0, "min_chunk": 32})
    async with real_cell(tiny_llama, policy) as cell:
        handles = [
            cell.service.submit(
                RequestSpec(
                    client_request_id=f"r{seed}",
                    prompt=np.random.default_rng(seed).integers(0, 256, 200 + 90 * seed, np.int32),
                    sampling=Sampling(temperature=0.0, max_tokens=TOKENS),
                    strategy=ring,
                )
            )
            for seed, ring in enumerate(2 * ASKED_RINGS)
        ]
        answers = await asyncio.gather(*map(answer, handles))
        for handle, tokens in zip(handles, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, TOKENS)
            assert handle.plan is not None
            asked = handle.spec.strategy
            assert handle.plan.strategy == ("ring_kv" if asked == "ring" else asked)
        await cell.settled()
