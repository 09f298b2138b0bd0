"""Models with sliding windows and attention sinks, under every strategy, against dense passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from gang_driver import Request, prompt_of
from gang_threads import elastic_cell, thread_cell
from greedy_reference import greedy_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from rank_kv import headers_sent, positions_of
from small_blocks import blocks_of
from strategy_ranks import LAYERS, Gangs, StrategyRanks, step_of
from test_conversations import PLANS, Plan, hold
from test_history import on_gangs, steps
from test_yield_points import run
from tiny_checkpoints import make_checkpoint
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.choice import strategy_of
from csps.actors.engine import decode_batch
from csps.actors.engine.iteration import IterationBatch, batch_of
from csps.actors.engine.reservations import BatchSequence
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import Sampling
from csps.protocols.gang.step_messages import PrefillStep

several = settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
    ("strategy", "members", "tp"),
    on_gangs((1, 1), (3, 1), (4, 1), (1, 2), (2, 2), rings=((3, 1), (2, 2))),
)
@several
@given(data=st.data())
def test_every_strategy_sees_the_window(
    gangs: Gangs, strategy: str, members: int, tp: int, data: st.DataObject
) -> None:
    """Both ends of every message are begun between the same yield points."""
    model = data.draw(st.sampled_from(("near", "near-far", "far-near")))
    gang, step = gangs(model, members, tp), data.draw(steps(strategy, members))
    with blocks_of(data.draw(st.integers(3, 30))):
        run(gang, step).check(step)


# --- bytes ----------------------------------------------------------------------------------


def sent(gang: StrategyRanks, step: PrefillStep) -> list[list[int]]:
    """Return the bytes of a step from member to member."""
    before = [list(engine.mesh.bytes_sent) for engine in gang.engines]
    gang.run(step, strategy_of)
    return [
        [now - then for now, then in zip(engine.mesh.bytes_sent, old, strict=True)]
        for engine, old in zip(gang.engines, before, strict=True)
    ]


@pytest.mark.parametrize("strategy", ["ulysses", "ring_kv", "ring_q", "levels"])
def test_only_keys_in_reach_are_sent(gangs: Gangs, strategy: str) -> None:
    """Of contiguous rows, the last six keys before each member's first row; history likewise."""
    gang = gangs("near", 4, 1)
    slices = [KvSlice(3, 0, 10), KvSlice(2, 10, 12), KvSlice(1, 12, 16)]
    plan = uniform_plan(("0-0-0", "0-0-1", "0-1-0", "0-1-1"), levels=2, layers=LAYERS)
    csa = plan if strategy == "levels" else None
    step = step_of(
        [0, 20, 40, 43, 60], [60], starts=[16], history=[slices], strategy=strategy, csa=csa
    )
    gang.hold_history(step, gang.forwards(step))
    try:
        found = sent(gang, step)
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_sequence(0)
    key = LAYERS * 2 * 2 * 16 * 4
    """Bytes of a token's keys and values: layers, both, KV heads, dim, fp32."""
    tokens = [[0] * 4 for _ in range(4)]
    tokens[0][1] = tokens[1][2] = 6
    tokens[1][3], tokens[2][3] = 3, 3
    tokens[1][0], tokens[2][0] = 4, 2
    assert found == [[count * key for count in row] for row in tokens]


@pytest.mark.parametrize("strategy", ["sp_tp", "gathered_weights"])
def test_history_out_of_reach_is_not_asked_for(gangs: Gangs, strategy: str) -> None:
    gang = gangs("near", 2, 1)
    near = step_of([0, 9, 20], [20], starts=[16], strategy=strategy, history=[[KvSlice(0, 0, 16)]])
    far = [KvSlice(1, 0, 10), KvSlice(0, 10, 16)]
    further = step_of([0, 9, 20], [20], starts=[16], strategy=strategy, history=[far])
    found = []
    for step in (near, further):
        gang.hold_history(step, gang.forwards(step))
        try:
            found.append(sent(gang, step))
        finally:
            for engine in gang.engines:
                engine.pool.slots.free_sequence(0)
    assert found[0] == found[1]


async def test_ranks_out_of_the_window_are_not_asked(tmp_path: Path) -> None:
    """The master decodes with the last six keys; one rank has older ones, one the oldest."""
    model = make_checkpoint(tmp_path, "mistral", sliding_window=7)
    request = Request(
        sequence_id=1,
        prompt=prompt_of(40),
        slices=(KvSlice(2, 0, 20), KvSlice(1, 20, 37), KvSlice(0, 37, 40)),
        sampling=Sampling(temperature=0, max_tokens=12),
    )
    async with thread_cell(model, prefill=2, decode=3) as cell:
        meshes = [rank.engine.mesh for rank in cell.decode_gang.ranks]
        assert (await cell.generate(request, group=(0, 1)))[0] == greedy_tokens(
            model, request.prompt.tolist(), 12
        )
        await cell.freed(1)
        queries, answers = 4 * 16 * 4, 4 * 17 * 4
        """Bytes of a row's queries, and of its outputs with LSEs, fp32."""
        # The window of position 40 begins at 34, that of 43 at 37.
        assert [mesh.bytes_sent for mesh in meshes] == [
            [0, 2 * 3 * queries, 0],
            [2 * 3 * answers, 0, 0],
            [0, 0, 0],
        ]
        cell.check_idle()


async def test_a_batch_is_built_again_when_a_rank_is_out_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with every token, although the window moves on with it."""
    model = make_checkpoint(tmp_path, "mistral", sliding_window=9)
    built: list[tuple[int, ...]] = []

    def build(
        engine: Engine, sequences: Sequence[BatchSequence], computed: Sequence[int]
    ) -> IterationBatch:
        batch = batch_of(engine, sequences, computed)
        if engine.rank == 0 and any(computed):  # others come behind the answer, until it is freed
            built.append((*batch.near.routes.outgoing,))
        return batch

    monkeypatch.setattr(decode_batch, "batch_of", build)
    request = Request(
        sequence_id=1,
        prompt=prompt_of(40),
        slices=(KvSlice(2, 0, 20), KvSlice(1, 20, 36), KvSlice(2, 36, 38), KvSlice(0, 38, 40)),
        sampling=Sampling(temperature=0, max_tokens=30),
    )
    async with thread_cell(model, prefill=2, decode=3) as cell:
        assert (await cell.generate(request, group=(0, 1)))[0] == greedy_tokens(
            model, request.prompt.tolist(), 30
        )
        await cell.freed(1)
        cell.check_idle()
    found = [asked for asked, _ in groupby(asked for asked in built if asked)]
    assert found == [(1, 2), (2,)]
    assert built[-1] == ()
    assert len(built) < 12, "29 tokens of one sequence"


async def test_only_the_last_window_is_sent_and_only_the_master_has_it(tmp_path: Path) -> None:
    """Whoever holds other layers; there are two of either kind."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_checkpoint(
        tmp_path, "gpt_oss", sliding_window=7, num_hidden_layers=4, layer_types=kinds
    )
    request = Request(
        sequence_id=1,
        prompt=prompt_of(40),
        slices=(KvSlice(2, 0, 20), KvSlice(1, 20, 40)),
        sampling=Sampling(temperature=0, max_tokens=12),
    )
    async with thread_cell(model, prefill=2, decode=3, window_slots=7) as cell:
        with headers_sent() as sent:
            (tokens,) = await cell.generate(request, group=(0, 1))
        assert tokens == greedy_tokens(model, request.prompt.tolist(), 12)
        await cell.freed(1)
        cell.check_idle()
        spec = cell.decode_gang.ranks[0].engine.spec
        queries, answers = (spec.heads * (spec.head_dim + more) * 4 for more in (0, 1))
        """Bytes of a row's queries, and of its outputs with LSEs, fp32."""
        assert [rank.engine.mesh.bytes_sent for rank in cell.decode_gang.ranks] == [
            [0, 2 * 11 * queries, 2 * 11 * queries],
            [2 * 11 * answers, 0, 0],
            [2 * 11 * answers, 0, 0],
        ]
    assert [positions_of(sent, layer) for layer in range(4)] == [
        list(range(34, 40)),
        list(range(40)),
    ] * 2


# --- gangs ----------------------------------------------------------------------------------

OF_QWEN2 = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
FAMILIES = [
    ("gpt_oss", {"sliding_window": 5}),
    ("mistral", {"sliding_window": 7}),
    pytest.param("gemma3_text", {"sliding_window": 6}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        *FAMILIES,
        pytest.param("qwen2", OF_QWEN2, marks=pytest.mark.slow),
    ],
)
def test_any_conversations_with_a_pool_of_their_own(
    tmp_path: Path, family: str, config: dict[str, Any], tp: int
) -> None:
    """Windowed layers have slots for two sequences on a rank. Turns begin with cached KV of the
    other layers, answers are longer than windows, and answers end or are cancelled anywhere."""
    model = make_checkpoint(tmp_path, family, **config)
    slots = 2 * config["sliding_window"]

    @settings(max_examples=examples(4))
    @given(st.lists(PLANS, min_size=2, max_size=2), st.integers(1, 4 // tp), st.integers(1, 3))
    def any_plans(plans: list[Plan], prefill: int, decode: int) -> None:
        async def check() -> None:
            async with thread_cell(
                model,
                prefill=prefill,
                prefill_tp=tp,
                decode=decode,
                window_slots=slots,
                quantum_ms=0.0,
            ) as cell:
                assert cell.decode.window == config["sliding_window"]
                await hold(cell, model, plans, longest=20)

        asyncio.run(check())

    any_plans()


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True], ids=["two gangs", "elastic"])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_any_conversations(
    tmp_path: Path, family: str, config: dict[str, Any], in_place: bool
) -> None:
    """Turns begin with cached KV on any ranks, are piggybacked or not, and decode over ranks."""
    model = make_checkpoint(tmp_path, family, **config)

    @settings(max_examples=examples(5))
    @given(st.lists(PLANS, min_size=2, max_size=2), st.integers(2, 3))
    def any_plans(plans: list[Plan], instances: int) -> None:
        async def check() -> None:
            if in_place:
                async with elastic_cell(model, instances, quantum_ms=0.0) as cell:
                    await hold(cell, model, plans)
            else:
                async with thread_cell(model, prefill=2, decode=instances, quantum_ms=0.0) as cell:
                    await hold(cell, model, plans)

        asyncio.run(check())

    any_plans()
