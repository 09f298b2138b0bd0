"""SP-NTP over real exchanges against dense fp64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from csa_cases import scattered
from dense_reference import dense_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mesh_threads import on_ranks
from property_examples import examples
from small_blocks import blocks_of
from strict_group import strict
from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.ulysses import Ulysses
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.process_group import GroupMaker
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import even_share
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """A batch on a group of all ranks of a mesh; member i is mesh rank `order[i]`."""

    heads: int
    kv_heads: int
    chunks: tuple[PrefillChunk, ...]
    bounds: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    cancelled: frozenset[int] = frozenset()
    """Cancelled sequences."""

    @property
    def members(self) -> int:
        return len(self.order)

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    def tensors(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return q of all rows, and k and v of all positions of each chunk, history included."""
        generator = torch.Generator().manual_seed(self.rows)

        def random(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(self.dtype)

        ends = [chunk.start + chunk.length for chunk in self.chunks]
        keys = [random(end, self.kv_heads) for end in ends]
        return random(self.rows, self.heads), keys, [random(end, self.kv_heads) for end in ends]


def ulysses(case: Case, data_group: GroupMaker | None = None) -> tuple[Tensor, list[list[int]]]:
    """Return the output of all rows, and the bytes that each rank has sent to each."""
    q, keys, values = case.tensors()
    k_rows, v_rows = (
        torch.cat([part[chunk.start :] for chunk, part in zip(case.chunks, parts, strict=True)])
        for parts in (keys, values)
    )

    def body(mesh: Mesh) -> tuple[Tensor, list[int]]:
        member = case.order.index(mesh.rank)
        step = PrefillStep(step_id=1, group=case.order, bounds=case.bounds, chunks=case.chunks)
        layout = GangLayout(world_size=mesh.world_size, tp=1)
        group = SpGroup(mesh, layout, step, member, StepClock(), cancelled=set(case.cancelled))
        pool = pool_with_history(case, member, keys, values)
        strategy = Ulysses(
            group, pool, heads=case.heads, kv_heads=case.kv_heads, scale=HEAD_DIM**-0.5
        )
        rows = group.rows_of(member)
        before = list(mesh.bytes_sent)
        out = strategy.attend(0, q[rows], k_rows[rows], v_rows[rows], _store_nothing)
        sent = [now - then for now, then in zip(mesh.bytes_sent, before, strict=True)]
        return out, sent

    results = on_ranks(case.members, body, data_group)
    by_member = [results[rank][0] for rank in case.order]
    return torch.cat(by_member), [sent for _, sent in results]


def _store_nothing(
    layer: int,
    k_thd: Tensor,
    v_thd: Tensor,
    kept_ht: Tensor | None = None,
    /,
    *,
    member: int | None = None,
) -> None:
    """Ignore the KV of other members."""


def pool_with_history(
    case: Case, member: int, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> KvPool:
    pool = KvPool(
        layers=1,
        slots=256,
        kv_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        dtype=case.dtype,
        device="cpu",
    )
    for chunk, k, v in zip(case.chunks, keys, values, strict=True):
        for kv_slice in chunk.history:
            if kv_slice.instance == case.order[member]:
                span = slice(kv_slice.span.start, kv_slice.span.stop)
                pool.slots.allocate(chunk.sequence_id, [kv_slice.span])
                pool.write(0, chunk.sequence_id, kv_slice.span, k[span], v[span])
    return pool


def dense(case: Case) -> Tensor:
    q, keys, values = case.tensors()
    outs, begin = [], 0
    for chunk, k, v in zip(case.chunks, keys, values, strict=True):
        out, _ = dense_attention(
            q[begin : begin + chunk.length],
            k,
            v,
            q_positions=torch.arange(chunk.start, chunk.start + chunk.length),
            k_positions=torch.arange(len(k)),
        )
        outs.append(torch.zeros_like(out) if chunk.sequence_id in case.cancelled else out)
        begin += chunk.length
    return torch.cat(outs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    members = draw(st.integers(1, 8))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    starts = [draw(st.integers(0, 20)) for _ in lengths]
    chunks = tuple(
        PrefillChunk(
            sequence_id=sequence_id,
            start=start,
            length=length,
            history=draw(scattered(start, members)),
        )
        for sequence_id, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )
    total = sum(lengths)
    inner = sorted(
        draw(st.lists(st.integers(0, total), min_size=members - 1, max_size=members - 1))
    )
    return Case(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        chunks=chunks,
        bounds=(0, *inner, total),
        order=tuple(draw(st.permutations(range(members)))),
        cancelled=draw(st.frozensets(st.integers(0, len(lengths) - 1))),
    )


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_equals_dense_attention(case: Case) -> None:
    out, _ = ulysses(case)
    torch.testing.assert_close(out, dense(case), atol=1e-10, rtol=0.0)


@settings(max_examples=examples(10))
@given(cases())
def test_equals_dense_attention_by_the_rules_of_nccl(case: Case) -> None:
    out, _ = ulysses(case, strict())
    torch.testing.assert_close(out, dense(case), atol=1e-10, rtol=0.0)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 9))
def test_equals_dense_attention_in_blocks_of_queries(case: Case, rows: int) -> None:
    with blocks_of(rows):
        out, _ = ulysses(case)
    torch.testing.assert_close(out, dense(case), atol=1e-10, rtol=0.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=examples(1000), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_equals_dense_attention_often(case: Case) -> None:
    out, _ = ulysses(case)
    torch.testing.assert_close(out, dense(case), atol=1e-10, rtol=0.0)


def one_prompt(
    length: int, members: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32
) -> Case:
    return Case(
        heads=heads,
        kv_heads=kv_heads,
        chunks=(PrefillChunk(sequence_id=1, start=0, length=length),),
        bounds=tuple(index * length // members for index in range(members + 1)),
        order=tuple(range(members)),
        dtype=dtype,
    )


def often(*values: int) -> list[Any]:
    """Mark parameters as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("members", [1, 2, 3, 8, *often(4, 5, 6, 7)])
@pytest.mark.parametrize("length", [1, 40, *often(5)])
def test_fp32_and_bf16_keep_their_precision(members: int, length: int) -> None:
    """Allow bf16 2.5 times the error of one device, plus 2e-3."""
    case = one_prompt(length, members, 4, 2)
    out, _ = ulysses(case)
    torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=0.0)
    rounded = one_prompt(length, members, 4, 2, torch.bfloat16)
    exact = dense(rounded)
    alone = (ulysses(one_prompt(length, 1, 4, 2, torch.bfloat16))[0].double() - exact).abs().max()
    error = (ulysses(rounded)[0].double() - exact).abs().max()
    assert error <= 2.5 * alone + 2e-3


@pytest.mark.parametrize("members", [2, 4])
def test_an_even_split_sends_what_the_formula_says(members: int) -> None:
    """All ranks together send the fraction (N-1)/N of q, k, v and the output."""
    length, heads, kv_heads = 64, 8, 4
    _, sent = ulysses(one_prompt(length, members, heads, kv_heads))
    total = length * (2 * heads + 2 * kv_heads) * HEAD_DIM * 4
    assert sum(map(sum, sent)) == total * (members - 1) // members


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_nothing_is_sent_that_the_receiver_does_not_own(case: Case) -> None:
    """Rank i sends to j: q, k, v of i's rows in j's heads; o of j's rows in i's heads; for history
    at j, q of all rows in i's heads; for history at i, o and LSE in j's heads."""
    _, sent = ulysses(case)
    group = case.heads // case.kv_heads
    for i, sender in enumerate(case.order):
        for j, receiver in enumerate(case.order):
            if i == j:
                continue
            theirs = even_share(case.heads, case.members, j)
            theirs_kv = len({head // group for head in theirs})
            rows = [case.bounds[m + 1] - case.bounds[m] for m in range(case.members)]
            asked, answered = (
                sum(
                    chunk.length
                    for chunk in case.chunks
                    if any(kv_slice.instance == holder for kv_slice in chunk.history)
                    and chunk.sequence_id not in case.cancelled
                )
                for holder in (receiver, sender)
            )
            mine = len(even_share(case.heads, case.members, i))
            vectors = rows[i] * (len(theirs) + 2 * theirs_kv) + asked * mine
            vectors += answered * len(theirs)
            vectors += rows[j] * mine
            numbers = vectors * HEAD_DIM + answered * len(theirs)
            assert sent[sender][receiver] == numbers * 8
