"""8-bit KV on real ranks: greedy answers are those of transformers with a cache that rounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arbitrary_layout_policy import AnyLayout
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from real_cell import ELASTIC, PAIR, answer, real_cell
from rounded_reference import rounded, rounded_greedy
from tiny_checkpoints import make_checkpoint, reference_model

from csps.kernels.quantized_kv import INT8
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import EvictKv, Sampling
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy

BLOCK, TOKENS = 16, 6
REUSE = ReuseSettings(enabled=True, block_tokens=BLOCK)


@pytest.mark.parametrize(
    ("policy", "gangs"),
    [
        ("csps", {}),
        ("context_parallel", {"tp": 2}),
        ("chunked_prefill", {"roles": ELASTIC, "instances": 1, "tp": 2}),
        ("loongserve", {"roles": ELASTIC, "instances": 3}),
    ],
)
async def test_answers_and_the_next_turns(
    tiny_llama: Path, policy: str, gangs: dict[str, Any]
) -> None:
    """The second turns read the KV of the first ones, which lies on any instances."""
    async with real_cell(tiny_llama, policy, reuse=REUSE, kv_dtype="int8", **gangs) as cell:
        random = np.random.default_rng(3)
        texts = [random.integers(0, 256, length).tolist() for length in (600, 5, 33, 300, 17)]
        for _ in range(2):
            handles = [cell.submit_tokens(text, TOKENS, BLOCK) for text in texts]
            answers = await asyncio.gather(*map(answer, handles))
            assert answers == [rounded_greedy(tiny_llama, text, TOKENS) for text in texts]
            texts = [
                [*text, *said, *random.integers(0, 256, 20).tolist()]
                for text, said in zip(texts, answers, strict=True)
            ]
        assert any(handle.cached_tokens for handle in handles)


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_pieces_that_ride_in_iterations(tiny_llama: Path, roles: Any) -> None:
    """The end of a prompt whose KV is on the decode gang is computed there."""
    options = {"token_budget": 64, "max_batch": 32, "spread_tokens": 256}
    async with real_cell(
        tiny_llama, make_policy("chunked_prefill", options), roles=roles, kv_dtype="int8"
    ) as cell:
        handles = [cell.submit(length, max_tokens=12, seed=length) for length in (200, 9, 150)]
        for handle, tokens in zip(
            handles, await asyncio.gather(*map(answer, handles)), strict=True
        ):
            assert tokens == rounded_greedy(tiny_llama, handle.spec.prompt.tolist(), 12)
        await cell.settled()


async def test_sequences_move_while_they_decode(tiny_llama: Path) -> None:
    moves, three = AnyLayout(7, moves=True), {"roles": ELASTIC, "instances": 3}
    async with real_cell(tiny_llama, moves, kv_dtype="int8", **three) as cell:  # type: ignore[arg-type]
        handles = [cell.submit(length, max_tokens=40, seed=length) for length in (90, 5, 33)]
        answers = await asyncio.gather(*map(answer, handles))
        for handle, tokens in zip(handles, answers, strict=True):
            assert tokens == rounded_greedy(tiny_llama, handle.spec.prompt.tolist(), 40)
        assert any(event.kind == "migrate" for handle in handles for event in handle.elastic)
        await cell.settled()


async def test_windows(tmp_path: Path) -> None:
    """Rows decode over the keys in their window, and chunks of prompts see those before them."""
    model = make_checkpoint(tmp_path, "gpt_oss", sliding_window=5)
    async with real_cell(model, AnyLayout(3), roles=ELASTIC, kv_dtype="int8") as cell:
        handles = [cell.submit(length, max_tokens=12, seed=length) for length in (90, 5, 33)]
        answers = await asyncio.gather(*map(answer, handles))
        for handle, tokens in zip(handles, answers, strict=True):
            assert tokens == rounded_greedy(model, handle.spec.prompt.tolist(), 12)
        await cell.settled()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
async def test_windows_with_slots_of_their_own(tmp_path: Path, family: str) -> None:
    """The last window is sent as bytes, and positions of an answer take its slots in turns."""
    window, kinds = 7, ["sliding_attention", "full_attention"] * 2
    model = make_checkpoint(
        tmp_path, family, sliding_window=window, num_hidden_layers=4, layer_types=kinds
    )
    near = {"prefill": 2, "decode": 2, "window_slots": window}
    async with thread_cell(model, **near, kv_dtype="int8") as cell:  # type: ignore[arg-type]
        for sequence_id, length in enumerate((40, 5, 23), start=1):
            request = Request(
                sequence_id=sequence_id,
                prompt=prompt_of(length, length),
                slices=even_slices(length, [0, 1]),
                sampling=Sampling(temperature=0, max_tokens=20),
            )
            (tokens,) = await cell.generate(request, group=(0, 1))
            assert tokens == rounded_greedy(model, request.prompt.tolist(), 20)
            await cell.freed(sequence_id)
        for rank in cell.decode_gang.ranks:
            pool = rank.engine.pool
            assert [len(pool.layer(layer)[0]) for layer in range(4)] == [window, 4096] * 2
            assert pool.layer(0)[0].dtype == INT8
        cell.check_idle()


async def test_bytes_pass_between_gangs_as_they_are(tiny_llama: Path) -> None:
    prompt = prompt_of(40, 1)
    request = Request(
        sequence_id=1,
        prompt=prompt,
        slices=even_slices(40, [0]),
        sampling=Sampling(temperature=0, max_tokens=4),
        retain=True,
    )
    async with thread_cell(tiny_llama, prefill=1, decode=1, kv_dtype="int8") as cell:
        await cell.reserve(request)
        await cell.prefilled(cell.submit(prefill_step([request.chunk()], [0]), prompt))
        assert await cell.answer(request) == [rounded_greedy(tiny_llama, prompt.tolist(), 4)]
        one, other = (rank.engine.pool for rank in cell.ranks)
        with torch.inference_mode():
            past = reference_model(tiny_llama)(torch.tensor([prompt.tolist()]), use_cache=True)
        assert one.layer_bytes == 2 * one.kv_heads * (one.head_dim + 4)
        for layer in range(len(one.k)):
            kv, same = one.read(layer, 1, Span(0, 40)), other.read(layer, 1, Span(0, 40))
            assert kv[0].dtype == INT8
            assert all(map(torch.equal, kv, same))
        # The first layer's keys and values depend on no attention.
        first = past.past_key_values.layers[0]
        kv = one.read(0, 1, Span(0, 40))
        for stored, exact in zip(kv, (first.keys, first.values), strict=True):
            expected = rounded(exact[0].transpose(0, 1).contiguous())
            near = (one.numbers(stored) - expected).abs()
            assert (near <= expected.abs().amax(-1, keepdim=True) / 120).all()
            assert (near < 1e-4).float().mean() > 0.99
        for gang in (cell.prefill, cell.decode):
            await cell.retain_or_evict(gang, EvictKv(sequence_id=1))
        await cell.idle()
