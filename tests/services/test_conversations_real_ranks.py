"""Conversations whose KV is retained on real ranks, against transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arbitrary_layout_policy import AnyLayout
from gang_threads import eventually
from rank_kv import headers_sent, positions_of
from real_cell import ELASTIC, PAIR, POLICIES, Cell, answer, real_cell
from tiny_checkpoints import reference_tokens

from csps.configurator.costs.cost_table import Unmeasured
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import PrefixKey, RequestSpec
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy

BLOCK = 16
REUSE = ReuseSettings(enabled=True, block_tokens=BLOCK)
KEY = PrefixKey.of(owner=b"", salt=None, block=BLOCK)
TOKENS = 6
slow = pytest.mark.slow


def ask(
    cell: Cell, prompt: list[int], key: PrefixKey = KEY, *, max_tokens: int = TOKENS
) -> RequestHandle:
    ids = np.asarray(prompt, np.int32)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return cell.service.submit(
        RequestSpec(
            client_request_id="c", prompt=ids, sampling=sampling, prefix=key, hashes=key.hashes(ids)
        )
    )


async def talk(cell: Cell, model: Path, seed: int, turns: int = 4) -> list[int]:
    """Hold a conversation whose answers must be transformers'; return the cached tokens per
    turn."""
    random = np.random.default_rng(seed)
    text: list[int] = random.integers(0, 256, 70).tolist()
    cached = []
    for _ in range(turns):
        handle = ask(cell, text)
        said = await answer(handle)
        assert said == reference_tokens(model, text, TOKENS)
        cached.append(handle.cached_tokens)
        text = [*text, *said, *random.integers(0, 256, 20).tolist()]
        await at_rest(cell)
    return cached


@pytest.mark.parametrize(
    "policy",
    [
        "csps",
        *(
            pytest.param(policy, marks=slow)
            for policy in ("context_parallel", "fixed_sp", "tetris")
        ),
    ],
)
async def test_a_turn_transfers_what_the_decode_gang_lacks(tiny_llama: Path, policy: str) -> None:
    """The decode gang retains the last answer as well; its last token has no KV."""
    async with real_cell(tiny_llama, policy, reuse=REUSE) as cell:
        random = np.random.default_rng(2)
        text: list[int] = random.integers(0, 256, 70).tolist()
        there = 0
        for _ in range(3):
            with headers_sent() as sent:
                said = await answer(ask(cell, text))
                await at_rest(cell)
            assert said == reference_tokens(tiny_llama, text, TOKENS)
            for layer in (0, 1):
                assert positions_of(sent, layer) == list(range(there, len(text)))
            there = (len(text) + TOKENS - 1) // BLOCK * BLOCK
            text = [*text, *said, *random.integers(0, 256, 20).tolist()]


async def at_rest(cell: Cell) -> None:
    """Wait until all KV of ended requests is retained or freed."""
    await eventually(lambda: not cell.service.counts.prefill_kv)
    await eventually(lambda: not cell.service.counts.decode_kv)
    cell.service.check_integrity()
    cell.service.check_health()


CELLS: list[tuple[str, tuple[GangRole, ...]]] = [
    ("context_parallel", PAIR),
    ("context_parallel", ELASTIC),
    ("csps", PAIR),
    ("fixed_sp", PAIR),
    ("loongserve", ELASTIC),
    ("tetris", PAIR),
    ("chunked_prefill", ELASTIC),
    ("chunked_prefill", PAIR),
]


@pytest.mark.parametrize(("policy", "roles"), CELLS)
async def test_a_turn_computes_the_new_tokens_and_answers_the_same(
    tiny_llama: Path, policy: str, roles: tuple[GangRole, ...]
) -> None:
    async with real_cell(tiny_llama, policy, roles=roles, reuse=REUSE) as cell:
        first, *later = await talk(cell, tiny_llama, seed=1)
        assert first == 0
        # Of a prompt of 96 tokens 70 were the one before, and of the next one 96, and so on; where
        # it is decoded the answer stays as well.
        in_place = roles == ELASTIC or policy == "chunked_prefill"
        before = [75, 101, 127] if in_place else [70, 96, 122]
        assert later == [tokens // BLOCK * BLOCK for tokens in before]


async def test_a_short_end_is_computed_by_all_kv_holders_within_a_long_step(
    tiny_llama: Path,
) -> None:
    options = {**POLICIES["csps"], "short_tokens": 40, "jobs_per_instance": 1}
    async with real_cell(tiny_llama, make_policy("csps", options), reuse=REUSE) as cell:
        random = np.random.default_rng(4)
        text, other = (random.integers(0, 256, length).tolist() for length in (300, 1200))
        await answer(ask(cell, text))
        await at_rest(cell)
        long, end = ask(cell, other), ask(cell, [*text, *range(20)])
        said = await asyncio.gather(answer(long), answer(end))
        prompts = (other, [*text, *range(20)])
        assert list(said) == [reference_tokens(tiny_llama, prompt, TOKENS) for prompt in prompts]
        assert end.cached_tokens == 288
        assert end.placement is not None
        assert end.placement.group == (0, 1), "both have kept some"
        await at_rest(cell)


@pytest.mark.parametrize(
    ("policy", "instances"), [pytest.param("context_parallel", 1, marks=slow), ("csps", 2)]
)
async def test_a_short_turn_is_computed_where_it_is_decoded(
    tiny_llama: Path, policy: str, instances: int
) -> None:
    """The decode gang retains the answer as well, which completes a block.

    It therefore lacks less of the second turn, and of all later ones, and nothing of them is
    transferred. Two instances around a ring would finish sooner.
    """
    options = {**POLICIES[policy], "prefill_tokens_max": 20 + BLOCK}
    made, by_tokens = make_policy(policy, options), Unmeasured(token_ns=10**9)
    shape: dict[str, Any] = {"instances": instances, "latencies": by_tokens}
    async with real_cell(tiny_llama, made, reuse=REUSE, **shape) as cell:
        random = np.random.default_rng(1)
        text: list[int] = random.integers(0, 256, 76).tolist()
        cached = []
        for _ in range(4):
            with headers_sent() as sent:
                handle = ask(cell, text)
                said = await answer(handle)
                await at_rest(cell)
            assert said == reference_tokens(tiny_llama, text, TOKENS)
            assert bool(sent) == (not cached)
            cached.append(handle.cached_tokens)
            text = [*text, *said, *random.integers(0, 256, 20).tolist()]
        assert cached == [0, 80, 96, 128]


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_concurrent_conversations_work_in_any_layout(
    tiny_llama: Path, roles: tuple[GangRole, ...]
) -> None:
    policy: Any = AnyLayout(3, block=BLOCK)
    async with real_cell(tiny_llama, policy, roles=roles, reuse=REUSE) as cell:
        text = np.random.default_rng(5).integers(0, 256, 100).tolist()
        await answer(ask(cell, text))
        await at_rest(cell)
        prompts = [[*text[:cut], *range(cut % 7, 40)] for cut in (100, 90, 64, 50, 33, 17)]
        handle = [ask(cell, prompt) for prompt in prompts]
        for prompt, said in zip(prompts, await asyncio.gather(*map(answer, handle)), strict=True):
            assert said == reference_tokens(tiny_llama, prompt, TOKENS)
        assert any(turn.cached_tokens for turn in handle)
        await at_rest(cell)


async def cancelled_after(cell: Cell, text: list[int], tokens: int) -> list[int]:
    """Return the tokens that an answer had when its reader left, of which so many were read."""
    handle = ask(cell, text, max_tokens=500)
    async with handle:
        async for _token in handle:
            if handle.timings.tokens >= tokens:
                break
    await at_rest(cell)
    said: list[int] = handle.generated_tokens.tolist()
    return said


async def test_a_cancelled_requests_prompt_is_retained(tiny_llama: Path) -> None:
    """Both gangs retain it once it was received."""
    async with real_cell(tiny_llama, reuse=REUSE) as cell:
        text = np.random.default_rng(5).integers(0, 256, 100).tolist()
        await cancelled_after(cell, text, 3)
        with headers_sent() as sent:
            again = ask(cell, text)
            assert await answer(again) == reference_tokens(tiny_llama, text, TOKENS)
            await at_rest(cell)
        assert again.cached_tokens == 96
        assert positions_of(sent, 0) == [96, 97, 98, 99]


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_an_answer_is_retained_up_to_where_its_reader_left(
    tiny_llama: Path, roles: tuple[GangRole, ...]
) -> None:
    """The ranks have sampled more by then."""
    policy = "context_parallel" if roles == ELASTIC else "csps"
    async with real_cell(tiny_llama, policy, roles=roles, reuse=REUSE) as cell:
        text = np.random.default_rng(5).integers(0, 256, 100).tolist()
        said = await cancelled_after(cell, text, 40)
        there = (len(text) + len(said) - 1) // BLOCK * BLOCK
        text = [*text, *said, *range(20)]
        with headers_sent() as sent:
            handle = ask(cell, text)
            assert await answer(handle) == reference_tokens(tiny_llama, text, TOKENS)
            await at_rest(cell)
        if roles == ELASTIC:
            assert handle.cached_tokens == there
        else:
            assert positions_of(sent, 0) == list(range(there, len(text)))


async def test_kv_is_not_shared_with_another_key_or_salt(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama, reuse=REUSE) as cell:
        text = np.random.default_rng(5).integers(0, 256, 100).tolist()
        await answer(ask(cell, text))
        await at_rest(cell)
        for owner, salt in ((b"other", None), (b"", "salt"), (b"", ""), (b"sal", "t")):
            key = PrefixKey.of(owner=owner, salt=salt, block=BLOCK)
            handle = ask(cell, text, key)
            await answer(handle)
            assert handle.cached_tokens == 0
            await at_rest(cell)
        handle = ask(cell, text)
        await answer(handle)
        assert handle.cached_tokens == 96
        await at_rest(cell)


@pytest.mark.parametrize(
    ("dies", "cached"), [("prefill", 0), pytest.param("decode", 96, marks=slow)]
)
async def test_a_dead_gangs_cached_kv_is_lost(
    tiny_llama: Path, dies: GangRole, cached: int
) -> None:
    """The other gang's cached KV stays."""
    async with real_cell(tiny_llama, mortal=dies, reuse=REUSE) as cell:
        text = np.random.default_rng(5).integers(0, 256, 100).tolist()
        await answer(ask(cell, text))
        await at_rest(cell)
        cell.gangs[dies].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        again = ask(cell, text)
        await cell.start_gang(dies)
        cell.publish()
        assert await answer(again) == reference_tokens(tiny_llama, text, TOKENS)
        assert again.cached_tokens == cached
        await at_rest(cell)
