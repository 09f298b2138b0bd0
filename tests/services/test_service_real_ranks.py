"""The request service over real ranks, against transformers. A rank to be killed is a process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arbitrary_layout_policy import AnyLayout
from gang_threads import eventually
from paused_ranks import PausedDecodeBatch, PausedSteps
from real_cell import ELASTIC, POLICIES, answer, real_cell, streams
from tiny_checkpoints import make_checkpoint, reference_tokens

from csps.configurator.costs.cost_table import Unmeasured
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.gang.members import GangRole
from csps.services.cluster.attachment import PAIR
from csps.services.requests.request_handle import ElasticEvent
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state import saved_runs
from csps.services.telemetry.observer import NullObserver


@pytest.mark.parametrize(
    ("policy", "gangs"),
    [
        *((policy, {}) for policy in POLICIES if policy not in ("loongserve", "tetris")),
        ("chunked_prefill", {"roles": ELASTIC}),
        ("chunked_prefill", {"roles": ELASTIC, "instances": 1, "tp": 2}),
        ("context_parallel", {"roles": ELASTIC, "instances": 3}),
        ("loongserve", {"roles": ELASTIC, "instances": 3}),
        ("loongserve", {"roles": ELASTIC, "instances": 2, "tp": 2}),
    ],
)
async def test_greedy_tokens_equal_transformers_and_all_slots_come_back(
    tiny_llama: Path, policy: str, gangs: dict[str, Any]
) -> None:
    async with real_cell(tiny_llama, policy, **gangs) as cell:
        lengths = (600, 5, 33, 300, 17, 511)
        requests = [cell.submit(length, seed=seed) for seed, length in enumerate(lengths)]
        cancelled = cell.submit(400, max_tokens=500, seed=9)
        async with cancelled:
            await anext(cancelled)
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_answers_are_right_in_any_layout(tiny_llama: Path, roles: Sequence[GangRole]) -> None:
    """Prompts run in chunks in any layout, are stored in another one, and take turns at
    answering."""
    async with real_cell(tiny_llama, AnyLayout(7), roles=roles) as cell:
        requests = [cell.submit(length, seed=length) for length in (90, 5, 33, 140, 17, 61)]
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize(
    "gangs",
    [
        {"instances": 3},
        pytest.param({"instances": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_sequences_may_move_all_the_time(tiny_llama: Path, gangs: dict[str, Any]) -> None:
    """KV, KV holders and masters change while tokens are sampled; the tokens do not."""
    events: list[ElasticEvent] = []
    observer = NullObserver()
    observer.elastic = events.append  # type: ignore[method-assign]
    policy = AnyLayout(7, moves=True)
    async with real_cell(tiny_llama, policy, roles=ELASTIC, observer=observer, **gangs) as cell:
        requests = [cell.submit(n, max_tokens=40, seed=n) for n in (90, 5, 33)]
        cancelled = cell.submit(100, max_tokens=1500, seed=9)
        async with cancelled:
            await eventually(lambda: cancelled.state == "decoding")
            requests.append(cell.submit(60, max_tokens=40, seed=60))
            await eventually(lambda: any(event.kind == "migrate" for event in cancelled.elastic))
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 40)
        migrated = [event for event in events if event.kind == "migrate"]
        assert len(migrated) > 2
        assert all(event.sent_bytes and event.tokens and event.seconds for event in migrated)
        await cell.settled()


@pytest.mark.slow
async def test_loongserve_moves_sequences_off_a_decoding_instance(tiny_llama: Path) -> None:
    """All instances decode, and a waiting prompt takes longer than the move."""
    events: list[ElasticEvent] = []
    observer = NullObserver()
    observer.elastic = events.append  # type: ignore[method-assign]
    policy = make_policy("loongserve", POLICIES["loongserve"])
    shape: dict[str, Any] = {"roles": ELASTIC, "instances": 2, "latencies": SHIPPED}
    async with real_cell(tiny_llama, policy, observer=observer, **shape) as cell:
        requests = []
        for seed in range(4):
            requests.append(cell.submit(30 + seed, max_tokens=250, seed=seed))
            await eventually(lambda: requests[-1].state in ("decoding", "finished"))
        requests.append(cell.submit(200, max_tokens=10, seed=9))
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt, count = handle.spec.prompt.tolist(), len(tokens)
            assert count == handle.spec.sampling.max_tokens
            assert tokens == reference_tokens(tiny_llama, prompt, count)
        assert any(event.kind == "migrate" for event in events)
        await cell.settled()


async def test_prompts_with_one_token_answers_free_all_slots(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama) as cell:
        requests = [cell.submit(length, max_tokens=1, seed=length) for length in (5, 100, 400)]
        for handle, tokens in zip(
            requests, await asyncio.gather(*map(answer, requests)), strict=True
        ):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 1)
        await cell.settled()


@pytest.mark.parametrize(
    ("policy", "roles"),
    [("csps", PAIR), ("context_parallel", PAIR), ("context_parallel", ELASTIC)],
)
async def test_sparse_attention_that_drops_nothing_answers_the_same(
    tiny_llama: Path, policy: str, roles: Sequence[GangRole]
) -> None:
    """Requests run on one instance and on two, by each strategy, beside exact requests."""
    options = [
        *(
            CsaSettings(strategy=strategy, drop_ratios=((0.0,),))
            for strategy in ("ntp", "tp", "tp_flat")
        ),
        CsaSettings(levels=1, micro_partitions=((1,),), strategy="ntp"),
        None,
    ]
    async with real_cell(tiny_llama, policy, roles=roles) as cell:
        requests = [
            cell.submit(length, seed=length, csa=csa) for csa in options for length in (5, 20, 511)
        ]
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            assert handle.plan is not None
            assert handle.plan.attention == handle.spec.attention
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        lossy = cell.submit(511, seed=511, csa=CsaSettings(drop_ratios=((0.9,),), strategy="ntp"))
        assert len(await answer(lossy)) == 6
        await cell.settled()


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_request_with_a_coverage_learns_what_it_dropped(tmp_path: Path, tp: int) -> None:
    """A prompt on two instances, by SP-NTP and SP-TP, also if decode gets kept tokens only."""
    model = make_checkpoint(tmp_path / "deep", num_hidden_layers=4)
    options = {
        "exact": CsaSettings(coverages=((1.0,),), strategy="ntp"),
        "most": CsaSettings(coverages=((0.9,),), strategy="ntp", importance_layer="same"),
        "some": CsaSettings(coverages=((0.3,),), strategy="ntp", importance_layer="same"),
        "narrowed": CsaSettings(coverages=((0.3,),), strategy="ntp", decode_kept_only=True),
        "sp_tp": CsaSettings(coverages=((0.9,),), strategy="tp", importance_layer="same"),
    }
    dropped: dict[str, list[dict[str, float]]] = {}
    async with real_cell(model, "csps", tp=tp) as cell:
        for name, csa in options.items():
            handle = cell.submit(511, seed=511, csa=csa)
            tokens = await answer(handle)
            await handle.wait_for_dropped_mass()
            dropped[name] = handle.explain()["dropped_mass"]
            if name == "exact":
                assert tokens == reference_tokens(model, handle.spec.prompt.tolist(), 6)
        await cell.settled()
    assert dropped.pop("exact") == []
    for name, layers in dropped.items():
        assert [layer["layer"] for layer in layers] == [1, 2], name
        assert all(0 < layer["mean"] <= layer["worst_head"] < 1 for layer in layers), name
    for most, some in zip(dropped["most"], dropped["some"], strict=True):
        assert most["worst_head"] <= 0.1
        assert most["mean"] < some["mean"]
    # Both strategies select by the same scores, but SP-TP's members, where they share a KV head,
    # each by its own query heads. Only layer 1 has the same input.
    assert dropped["sp_tp"][0] == pytest.approx(dropped["most"][0], rel=1e-3 if tp == 1 else 0.05)


async def test_decoding_continues_while_a_killed_prefill_gang_is_replaced(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama, mortal="prefill") as cell:
        decoding = cell.submit(200, max_tokens=2000, seed=1)
        await anext(decoding)
        await anext(decoding)
        cell.gangs["prefill"].process(1).kill()
        waiting = cell.submit(500, seed=2)
        await eventually(lambda: not cell.service.ready)
        before = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > before + 10)
        decoding.cancel()
        await cell.start_gang("prefill")
        cell.publish()
        prompt = waiting.spec.prompt.tolist()
        assert await answer(waiting) == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize("killed", PAIR)
async def test_streams_continue_with_the_same_tokens_when_a_gang_is_killed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, killed: GangRole
) -> None:
    """Greedy and seeded streams: some decode at that time, one prefills, some wait."""
    async with real_cell(tiny_llama, mortal=killed) as cell:
        wanted = streams(8, first=100, further=60, max_tokens=60)
        undisturbed = await asyncio.gather(*(answer(cell.submit(**options)) for options in wanted))
        requests = [cell.submit(**options) for options in wanted[:4]]
        answers = [asyncio.ensure_future(answer(handle)) for handle in requests]
        await eventually(lambda: sum(handle.timings.tokens > 3 for handle in requests) >= 2)
        steps = PausedSteps(monkeypatch)
        requests += [cell.submit(**options) for options in wanted[4:]]
        answers += [asyncio.ensure_future(answer(handle)) for handle in requests[4:]]
        await steps.begun()
        cell.gangs[killed].process(1).kill()
        steps.go_on.set()
        await cell.start_gang(killed)
        cell.publish()
        assert await asyncio.gather(*answers) == undisturbed
        assert max(handle.timings.attempts for handle in requests) == 2
        await cell.settled()


async def test_the_kv_of_a_killed_prefill_rank_comes_back_from_files(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A request that came while the gang was away finds them, too."""
    block = 32
    text = np.random.default_rng(4).integers(0, 256, 900).tolist()
    first, second, third = text[:600], text[:700], text
    # Files are read faster than these tokens would be computed, however busy the machine is.
    slow = Unmeasured(token_ns=10**8)
    reuse = ReuseSettings(enabled=True, block_tokens=block, files_bytes=1 << 30)
    async with real_cell(
        tiny_llama, mortal="prefill", reuse=reuse, kv_files=tmp_path, latencies=slow
    ) as cell:
        prefix = cell.service._scheduler._prefix
        before = cell.submit_tokens(first, 6, block)
        assert await answer(before) == reference_tokens(tiny_llama, first, 6)
        await eventually(lambda: sum(map(len, prefix.saved.values())) == len(first) // block)
        cell.gangs["prefill"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        waiting = cell.submit_tokens(second, 6, block)
        await cell.start_gang("prefill")
        cell.publish()
        assert await answer(waiting) == reference_tokens(tiny_llama, second, 6)
        assert waiting.cached_tokens == len(first) // block * block
        later = cell.submit_tokens(third, 6, block)
        assert await answer(later) == reference_tokens(tiny_llama, third, 6)
        assert later.cached_tokens == len(second) // block * block
        cell.service.check_integrity()


async def test_a_front_is_computed_while_the_rest_comes_from_files(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is predicted to take as long as computing, so that each does its half."""
    block, token_ns = 32, 10**8
    text = np.random.default_rng(6).integers(0, 256, 1_100).tolist()
    whole = len(text) // block * block
    reuse = ReuseSettings(enabled=True, block_tokens=block, files_bytes=1 << 30)
    monkeypatch.setattr(saved_runs, "RUN_BLOCKS", 2)
    async with real_cell(
        tiny_llama,
        "context_parallel",
        mortal="prefill",
        reuse=reuse,
        kv_files=tmp_path,
        latencies=Unmeasured(token_ns=token_ns),
    ) as cell:
        assert await answer(cell.submit_tokens(text, 6, block)) == reference_tokens(
            tiny_llama, text, 6
        )
        prefix = cell.service._scheduler._prefix
        await eventually(lambda: sum(map(len, prefix.saved.values())) == whole // block)
        cell.gangs["prefill"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        (bytes_of_token,) = {gang.kv_bytes_per_token for gang in prefix._gangs.by_id.values()}
        speed = property(lambda _saved: bytes_of_token * 10**9 // token_ns)
        monkeypatch.setattr(saved_runs.SavedRuns, "bytes_per_s", speed)
        following = [*text, *text[:50]]
        waiting = cell.submit_tokens(following, 6, block, logprobs=0)
        await cell.start_gang("prefill")
        cell.publish()
        tokens = [token async for token in waiting]
        assert [token.token for token in tokens] == reference_tokens(tiny_llama, following, 6)
        computed = cell.submit_tokens(following, 6, block, owner=b"nobody", logprobs=0)
        assert [token.logprob async for token in computed] == pytest.approx(
            [token.logprob for token in tokens], abs=1e-6
        )
        assert (computed.cached_tokens, computed.front_tokens) == (0, 0)
        assert 0.3 * whole < waiting.front_tokens < 0.7 * whole
        assert waiting.cached_tokens == whole - waiting.front_tokens
        again = cell.submit_tokens(following, 6, block)
        assert await answer(again) == reference_tokens(tiny_llama, following, 6)
        assert (again.cached_tokens, again.front_tokens) == (len(following) // block * block, 0)
        cell.service.check_integrity()


PIGGYBACKED = {**POLICIES["csps"], "prefill_tokens_max": 200}


@pytest.mark.parametrize(
    ("killed", "policy", "gangs"),
    [
        ("elastic", "chunked_prefill", {"roles": ELASTIC}),
        ("elastic", "loongserve", {"roles": ELASTIC, "instances": 3}),
        ("elastic", "context_parallel", {"roles": ELASTIC, "tp": 2}),
        ("decode", make_policy("csps", PIGGYBACKED), {}),
    ],
)
async def test_the_kv_of_answers_comes_back_from_files(
    tiny_llama: Path, tmp_path: Path, killed: GangRole, policy: str | Policy, gangs: dict[str, Any]
) -> None:
    block, output = 32, 200
    text = np.random.default_rng(5).integers(0, 256, 400).tolist()
    slow = Unmeasured(token_ns=10**8)
    reuse = ReuseSettings(
        enabled=True, block_tokens=block, files_bytes=1 << 30, decode_rest_tokens=200
    )
    async with real_cell(
        tiny_llama,
        policy,
        mortal=killed,
        reuse=reuse,
        kv_files=tmp_path,
        latencies=slow,
        **gangs,
    ) as cell:
        prefix = cell.service._scheduler._prefix
        said = await answer(cell.submit_tokens(text, output, block))
        assert said == reference_tokens(tiny_llama, text, output)
        whole = (len(text) + output - 1) // block  # the last token has no KV
        await eventually(lambda: max(map(len, prefix.saved.values())) == whole)
        cell.gangs[killed].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        following = [*text, *said, *text[:50]]
        waiting = cell.submit_tokens(following, 6, block)
        await cell.start_gang(killed)
        cell.publish()
        assert await answer(waiting) == reference_tokens(tiny_llama, following, 6)
        assert waiting.cached_tokens == whole * block
        cell.service.check_integrity()


async def test_answers_and_piggybacked_prefills_continue_when_an_elastic_gang_is_killed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some decode at that time, some are piggybacked, some wait."""
    async with real_cell(tiny_llama, "chunked_prefill", roles=ELASTIC, mortal="elastic") as cell:
        wanted = streams(8, first=100, further=150, max_tokens=60)
        undisturbed = await asyncio.gather(*(answer(cell.submit(**options)) for options in wanted))
        stream = cell.gangs["elastic"].ranks[0].loop.decode_batch
        paused = PausedDecodeBatch(
            monkeypatch, stream, after=20
        )  # of some eighty that prompts take
        requests = [cell.submit(**options) for options in wanted]
        answers = [asyncio.ensure_future(answer(handle)) for handle in requests]
        await eventually(lambda: any(handle.timings.tokens > 3 for handle in requests))
        assert any(handle.state == "prefill" for handle in requests)
        cell.gangs["elastic"].process(1).kill()
        paused.go_on.set()
        await eventually(lambda: not cell.service.ready)
        await cell.start_gang("elastic")
        cell.publish()
        assert await asyncio.gather(*answers) == undisturbed
        assert max(handle.timings.attempts for handle in requests) == 2
        await cell.settled()
