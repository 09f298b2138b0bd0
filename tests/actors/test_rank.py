"""A rank's own life: it starts or says why not, it tells when it is broken, it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gang_driver import (
    ANSWER_S,
    GREEDY,
    SECRET,
    Cell,
    GangPlan,
    Request,
    even_slices,
    in_threads,
    prefill_step,
    prompt_of,
)
from gang_threads import eventually, is_broken, thread_cell, thread_gang
from greedy_reference import greedy_tokens

from csps.actors.comm.rendezvous import host_store
from csps.actors.engine import decode_batch as stream_module
from csps.actors.worker.rank import Rank
from csps.actors.worker.rank_config import RankConfig
from csps.models.network import network
from csps.models.network.checkpoint_json import CheckpointError
from csps.models.network.network import Layer
from csps.models.tokenizers.grammar import STACK_BYTES
from csps.protocols.core.errors import DeadlineExceeded, FaultError, ProtocolError
from csps.protocols.gang.messages import JoinBatch, PrefillDone
from csps.protocols.rpc.schema import pack


def alone(model: Path, **fields: object) -> Rank:
    plan = GangPlan(model_dir=str(model), role="prefill", instances=1)
    config = RankConfig(**{**plan.rank_fields(0), **fields})
    return Rank(config, secret=SECRET, store=host_store("127.0.0.1", SECRET))


def test_a_rank_with_an_unloadable_checkpoint_raises_and_closes(
    tmp_path: Path,
) -> None:
    rank = alone(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        rank.start()
    rank.close()


def test_a_world_that_tp_does_not_divide_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="tp=2"):
        alone(tiny_llama, tp=2)


@pytest.mark.parametrize("role", ["prefill", "decode", "elastic"])
def test_only_ranks_that_compute_no_steps_pack_matrices(
    tiny_llama: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "PACKED_NUMBERS", 1)
    monkeypatch.setattr(network, "SHORT_INNER", 0)
    rank = alone(tiny_llama, role=role)
    rank.start()
    try:
        assert rank.engine.network.layers[0].weights.qkv.is_mkldnn == (role == "decode")
    finally:
        rank.close()


def test_only_the_engine_has_the_stack_that_follows_grammars(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: dict[str, int] = {}
    start_now, usual = threading.Thread.start, threading.stack_size()

    def start(thread: threading.Thread) -> None:
        stacks[thread.name] = threading.stack_size()
        start_now(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    rank = alone(tiny_llama, role="decode")
    rank.start()
    rank.close()
    assert stacks["engine"] == STACK_BYTES
    assert {size for name, size in stacks.items() if name != "engine"} == {usual}


def test_closing_ends_all_threads(tiny_llama: Path) -> None:
    before = set(threading.enumerate())
    rank = alone(tiny_llama, role="elastic")
    rank.start()
    assert set(threading.enumerate()) > before
    rank.close()
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive()]
    rank.check_health()  # it was asked to


async def test_closing_ends_threads_that_wait_for_kv_or_for_peers(tiny_llama: Path) -> None:
    """Closing does so also during a step whose other half no rank computes."""
    before = set(threading.enumerate())
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        request = Request(sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0, 1]))
        await cell.reserve(request)
        cell.submit(prefill_step([request.chunk()], [0, 1]), request.prompt, ranks=[0])
        await cell.prefill.stats()
    kinds = ("kv-", "engine", "sequencer", "rpc")
    left = [thread for thread in threading.enumerate() if thread.name.startswith(kinds)]
    assert not set(left) - before


@pytest.mark.parametrize("first", [0, 1])
async def test_a_gang_that_ends_reports_no_rank_as_broken(
    tiny_llama: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever rank is closed first; the others cannot go on, which is no news."""
    plan = GangPlan(model_dir=str(tiny_llama), role="decode", instances=3)
    async with thread_gang(plan) as gang:
        await in_threads([gang.ranks[first].close])
        others = [rank for rank in gang.ranks if rank is not gang.ranks[first]]
        await eventually(lambda: all(is_broken(rank) for rank in others))
    assert not [message for message in caplog.messages if "is broken" in message]


async def test_a_rank_whose_peers_are_gone_closes(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        for rank in (*cell.prefill_gang.ranks, *cell.decode_gang.ranks):
            for group in rank._groups:
                group.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_dead_loop_ends_its_gang_and_disconnects_the_router(
    tiny_llama: Path,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither its peers nor the router wait for a rank that cannot go on."""
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        request = Request(
            sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0, 1]), master=1
        )
        await cell.reserve(request)
        gang = cell.prefill_gang if role == "prefill" else cell.decode_gang
        other = cell.decode_gang if role == "prefill" else cell.prefill_gang
        patient = gang.ranks[1]

        monkeypatch.setattr(Layer, "qkv", failing_on(patient))
        cell.submit(prefill_step([request.chunk()], [0, 1]), request.prompt)
        if role == "decode":
            await cell.join(request)
        await eventually(lambda: all(is_broken(rank) for rank in gang.ranks))
        assert {message[:16] for message in caplog.messages if "is broken" in message} == {
            "rank 0 is broken", "rank 1 is broken",
        }  # fmt: skip
        with pytest.raises(FaultError, match="a mistake of ours"):
            patient.check_health()
        await (cell.prefill if role == "prefill" else cell.decode).lost
        for rank in other.ranks:
            rank.check_health()


def failing_on(patient: Rank) -> Callable[..., Any]:
    """Return a layer that one rank cannot compute."""
    qkv, broken = Layer.qkv, patient.engine.network.layers

    def failing(self: Layer, *arguments: Any) -> Any:
        if any(self is layer for layer in broken):
            raise ZeroDivisionError("a mistake of ours")
        return qkv(self, *arguments)

    return failing


async def test_an_iteration_that_does_not_end_is_noticed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        iterating, go_on = threading.Event(), threading.Event()
        leader, _ = cell.decode_gang.ranks
        qkv, mine = Layer.qkv, leader.engine.network.layers[0]

        def patient_qkv(self: Layer, *arguments: Any) -> Any:
            if self is mine:
                iterating.set()
                assert go_on.wait(ANSWER_S)
            return qkv(self, *arguments)

        monkeypatch.setattr(Layer, "qkv", patient_qkv)
        request = Request(sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0, 1]))
        await cell.reserve(request)
        cell.submit(prefill_step([request.chunk()], [0]), request.prompt)
        await cell.join(request)
        await eventually(iterating.is_set)
        leader.check_health()
        with monkeypatch.context() as hurried:
            hurried.setattr(stream_module, "ITERATION_S", 0.0)
            with pytest.raises(DeadlineExceeded, match="iteration"):
                leader.check_health()
        go_on.set()
        await cell.answer()
        await cell.freed(1)
        cell.check_idle()


async def test_a_rank_refuses_what_its_role_does_not_do(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=1, decode=1) as cell:
        request = Request(sequence_id=1, prompt=prompt_of(10), slices=even_slices(10, [0]))
        step = msgspec.structs.replace(prefill_step([request.chunk()], [0]), step_id=1)
        with pytest.raises(ProtocolError, match="runs no prefill steps"):
            await cell.decode.call(0, "prefill", pack(step))
        join = JoinBatch(sequence_id=1, first_token=0)
        with pytest.raises(ProtocolError, match="does not decode"):
            await cell.prefill.call(0, "join", pack(join))


async def test_an_elastic_gang_prefills_while_it_decodes(tiny_llama: Path) -> None:
    """Steps and iterations share a mesh and a pool; cancelling a prefill leaves decode's KV
    alone."""
    plans = [
        GangPlan(model_dir=str(tiny_llama), role=role, instances=2)
        for role in ("prefill", "elastic")
    ]
    async with thread_gang(plans[0]) as prefill, thread_gang(plans[1]) as elastic:
        cell, beside = Cell(), Cell()
        cell.prefill = await cell.attach(prefill.members, "prefill")
        cell.decode = await cell.attach(elastic.members, "decode")
        await cell.connect()
        long = Request(
            sequence_id=1,
            prompt=prompt_of(40),
            slices=even_slices(40, [0, 1]),
            sampling=replace(GREEDY, max_tokens=60),
        )
        await cell.reserve(long)
        cell.submit(prefill_step([long.chunk()], [0, 1]), long.prompt)
        await cell.join(long)
        beside.prefill = cell.decode  # its notifications come to `cell`
        for sequence_id in range(2, 8):
            prompt = prompt_of(30, sequence_id)
            here = Request(sequence_id=sequence_id, prompt=prompt, slices=())
            step = msgspec.structs.replace(
                prefill_step([here.chunk()], [0, 1]), step_id=100 + sequence_id
            )
            beside.submit(step, prompt)
            await cell.until_received(2, PrefillDone, step_id=step.step_id)
            assert cell.tokens(sequence_id) == greedy_tokens(tiny_llama, prompt.tolist(), 1)
            assert all(rank.engine.pool.slots.tokens(sequence_id) for rank in elastic.ranks)
            cell.cancel(sequence_id)
        await cell.until(lambda: cell.finished(1))
        assert cell.tokens(1) == greedy_tokens(tiny_llama, long.prompt.tolist(), 60)
        await cell.freed(*range(1, 8))
        await cell.decode.stats()
        for rank in elastic.ranks:
            rank.check_health()
            rank.engine.pool.slots.check_integrity()
            assert rank.engine.pool.slots.used == 0
