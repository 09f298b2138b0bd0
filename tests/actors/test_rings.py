"""Ring pass-KV and ring pass-Q over real exchanges against dense fp64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import msgspec
import pytest
import torch
from csa_cases import scattered
from dense_reference import dense_attention
from exchange_counter import counted
from gang_driver import bounds_of_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mesh_threads import on_ranks
from property_examples import examples
from small_blocks import blocks_of
from strict_group import strict
from torch import Tensor

from csps.actors.attention.base.group import SpGroup, span_positions
from csps.actors.attention.ring import ring
from csps.actors.attention.ring.ring_kv import RingKv
from csps.actors.attention.ring.ring_q import RingQ
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.process_group import GroupMaker
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import PhaseEvent, PhaseTimeline, StepClock
from csps.protocols.core.placement import KvSlice, place, striped, zigzag
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

HEAD_DIM = 8
RINGS = ("ring_kv", "ring_q")


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

    @property
    def step(self) -> PrefillStep:
        return PrefillStep(step_id=1, group=self.order, bounds=self.bounds, chunks=self.chunks)

    def tensors(self, chunk: PrefillChunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all positions of a chunk, history included."""
        generator = torch.Generator().manual_seed(chunk.sequence_id)
        stop = chunk.start + chunk.length

        def random(heads: int) -> Tensor:
            return torch.randn(stop, heads, HEAD_DIM, generator=generator).to(self.dtype)

        return random(self.heads), random(self.kv_heads), random(self.kv_heads)


@dataclass(frozen=True)
class RingRun:
    """Results of one layer of a ring."""

    outs: dict[int, Tensor]
    """Rows of each sequence's chunk in the order of positions."""
    sent: list[list[int]]
    """Bytes from rank to rank."""
    exchanges: list[list[tuple[Tag, int]]]
    """Tag and bytes of each message, by rank."""
    events: list[list[PhaseEvent]]
    """Timeline of each rank."""


def run(case: Case, strategy: str, data_group: GroupMaker | None = None) -> RingRun:
    """Run one layer of a ring."""

    def body(
        mesh: Mesh,
    ) -> tuple[Tensor, SpGroup, list[int], list[tuple[Tag, int]], list[PhaseEvent]]:
        exchanges = recorded_exchanges(mesh)
        layout = GangLayout(world_size=mesh.world_size, tp=1)
        member = case.order.index(mesh.rank)
        clock = StepClock()
        clock.timeline = PhaseTimeline(on=True)
        group = SpGroup(mesh, layout, case.step, member, clock, cancelled=set(case.cancelled))
        q, k, v = (own_rows(case, group, which) for which in range(3))
        pool, store = pool_with_history(case, mesh.rank), CheckingStore(case, group)
        before = list(mesh.bytes_sent)
        scale = HEAD_DIM**-0.5
        if strategy == "ring_kv":
            made = RingKv(group, pool, heads=case.heads, kv_heads=case.kv_heads, scale=scale)
            with made as ring_kv:
                out = ring_kv.attend(0, q, k, v, store)
                assert store.stored == set(ring_kv.offered(0, member))
        else:
            with RingQ(group, pool, scale=scale) as ring_q:
                out = ring_q.attend(0, q, k, v, store)
        sent = [now - then for now, then in zip(mesh.bytes_sent, before, strict=True)]
        return out, group, sent, exchanges, clock.timeline.events

    results = on_ranks(len(case.order), body, data_group)
    outs = {
        chunk.sequence_id: torch.full(
            (chunk.length, case.heads, HEAD_DIM), torch.nan, dtype=case.dtype
        )
        for chunk in case.chunks
    }
    for out, group, *_ in results:
        for part in group.local:
            outs[part.chunk.sequence_id][span_positions([part.span]) - part.chunk.start] = out[
                part.rows
            ]
    _, _, sent, exchanges, events = zip(*results, strict=True)
    return RingRun(outs, list(sent), list(exchanges), list(events))


class CheckingStore:
    """Checks that the KV of another member is what that member has."""

    def __init__(self, case: Case, group: SpGroup) -> None:
        self._case, self._group = case, group
        self.stored: set[int] = set()

    def __call__(
        self,
        layer: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
        /,
        *,
        member: int | None = None,
    ) -> None:
        assert member is not None
        assert member not in self.stored
        self.stored.add(member)
        theirs = replace(self._group, member=member)
        assert torch.equal(k_thd, own_rows(self._case, theirs, 1))
        assert torch.equal(v_thd, own_rows(self._case, theirs, 2))


def recorded_exchanges(mesh: Mesh) -> list[tuple[Tag, int]]:
    recorded: list[tuple[Tag, int]] = []
    start = mesh.start_exchange

    def recording(sends: Sequence[tuple[int, Tensor]], recvs: Any, tag: Tag) -> Any:
        recorded.extend((tag, tensor.nbytes) for _, tensor in sends if tensor.numel())
        return start(sends, recvs, tag)

    mesh.start_exchange = recording  # type: ignore[method-assign]
    return recorded


def own_rows(case: Case, group: SpGroup, which: int) -> Tensor:
    """Return a member's q, k or v, in the order of its rows."""
    heads = case.heads if which == 0 else case.kv_heads
    empty = torch.empty(0, heads, HEAD_DIM, dtype=case.dtype)
    parts = [case.tensors(part.chunk)[which][span_positions([part.span])] for part in group.local]
    return torch.cat([empty, *parts])


def pool_with_history(case: Case, instance: int) -> KvPool:
    pool = KvPool(
        layers=1,
        slots=512,
        kv_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        dtype=case.dtype,
        device="cpu",
    )
    for chunk in case.chunks:
        _, k, v = case.tensors(chunk)
        for kv_slice in chunk.history:
            if kv_slice.instance == instance:
                at = span_positions([kv_slice.span])
                pool.slots.allocate(chunk.sequence_id, [kv_slice.span])
                pool.write(0, chunk.sequence_id, kv_slice.span, k[at], v[at])
    return pool


def dense(case: Case, chunk: PrefillChunk) -> Tensor:
    q, k, v = case.tensors(chunk)
    positions = torch.arange(len(q))
    rows = slice(chunk.start, None)
    out, _ = dense_attention(q[rows], k, v, q_positions=positions[rows], k_positions=positions)
    return torch.zeros_like(out) if chunk.sequence_id in case.cancelled else out


def check(case: Case, strategy: str, data_group: GroupMaker | None = None) -> RingRun:
    result = run(case, strategy, data_group)
    for chunk in case.chunks:
        expected = dense(case, chunk)
        torch.testing.assert_close(result.outs[chunk.sequence_id], expected, atol=1e-10, rtol=0.0)
    return result


@st.composite
def rows_of(draw: st.DrawFn, start: int, length: int, members: int) -> tuple[KvSlice, ...]:
    """Place rows on some of the members, in a layout, or each position anywhere."""
    chosen = draw(st.permutations(range(members)))[: draw(st.integers(1, members))]
    layout = draw(st.sampled_from(("zigzag", "striped", "scattered")))
    if layout != "scattered":
        cut = {"zigzag": zigzag, "striped": striped}[layout]
        return place(chosen, cut(length, len(chosen)), start=start)
    owners = [draw(st.sampled_from(chosen)) for _ in range(length)]
    found = (KvSlice(owner, start + at, start + at + 1) for at, owner in enumerate(owners))
    return tuple(draw(st.permutations(list(found))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    members = draw(st.integers(1, 8))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    starts = [draw(st.sampled_from((0, 0, 1, 7, 40))) for _ in lengths]
    contiguous = draw(st.booleans())
    chunks = tuple(
        PrefillChunk(
            sequence_id=sequence_id,
            start=start,
            length=length,
            rows=() if contiguous else draw(rows_of(start, length, members)),
            history=draw(scattered(start, members)),
        )
        for sequence_id, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )
    order = tuple(draw(st.permutations(range(members))))
    total = sum(lengths)
    cuts = st.lists(st.integers(0, total), min_size=members - 1, max_size=members - 1)
    return Case(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        chunks=chunks,
        bounds=(0, *sorted(draw(cuts)), total)
        if contiguous
        else tuple(bounds_of_rows(chunks, order)),
        order=order,
        cancelled=draw(st.frozensets(st.integers(0, len(lengths) - 1))),
    )


relaxed = [HealthCheck.too_slow]


@pytest.mark.parametrize("strategy", RINGS)
@settings(max_examples=examples(12), suppress_health_check=relaxed)
@given(cases())
def test_equals_dense_attention(strategy: str, case: Case) -> None:
    check(case, strategy)


@pytest.mark.parametrize("strategy", RINGS)
@settings(max_examples=examples(8), suppress_health_check=relaxed)
@given(cases(), st.integers(1, 9))
def test_equals_dense_attention_by_the_rules_of_nccl(strategy: str, case: Case, rows: int) -> None:
    with blocks_of(rows):
        check(case, strategy, strict())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", RINGS)
@settings(max_examples=examples(1000), suppress_health_check=relaxed)
@given(cases())
def test_equals_dense_attention_often(strategy: str, case: Case) -> None:
    check(case, strategy)


def often(*values: int) -> list[Any]:
    """Mark parameters as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def one_prompt(
    length: int,
    members: int,
    layout: str = "zigzag",
    *,
    history: int = 0,
    dtype: torch.dtype = torch.float64,
    heads: tuple[int, int] = (4, 2),
) -> Case:
    """Return a prompt in one layout over all members, after a history that is striped over them."""
    order = tuple(range(members))
    bounds = tuple(index * length // members for index in range(members + 1))
    chunk = PrefillChunk(
        sequence_id=1,
        start=history,
        length=length,
        history=place(order, striped(history, members)) if history else (),
    )
    if layout != "contiguous":
        cut = {"zigzag": zigzag, "striped": striped}[layout]
        chunk = msgspec.structs.replace(
            chunk, rows=place(order, cut(length, members), start=history)
        )
        bounds = tuple(bounds_of_rows([chunk], order))
    return Case(*heads, (chunk,), bounds, order, dtype)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("members", [3, *often(1, 2, 8)])
@pytest.mark.parametrize("length", [1, 250])
def test_layouts(layout: str, members: int, length: int) -> None:
    """Cover prompts with several kinds of stairs, and prompts with fewer tokens than members."""
    case = one_prompt(length, members, layout)
    kv, q = (check(case, strategy).outs[1] for strategy in RINGS)
    torch.testing.assert_close(kv, q, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("members", [3, *often(1, 2, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("length", [40, *often(1)])
def test_fp32_and_bf16_keep_their_precision(strategy: str, members: int, length: int) -> None:
    """Allow bf16 2.5 times the error of one device, plus 2e-3."""
    case = one_prompt(length, members, history=30, dtype=torch.float32)
    (chunk,) = case.chunks
    out = run(case, strategy).outs[1]
    torch.testing.assert_close(out.double(), dense(case, chunk), atol=1e-5, rtol=0.0)
    rounded = replace(case, dtype=torch.bfloat16)
    exact = dense(rounded, chunk)
    single = one_prompt(length, 1, history=30, dtype=torch.bfloat16)
    alone = (run(single, strategy).outs[1].double() - exact).abs().max()
    error = (run(rounded, strategy).outs[1].double() - exact).abs().max()
    assert error <= 2.5 * alone + 2e-3


def sizes(ring_run: RingRun, tag: Tag) -> list[list[int]]:
    return [
        [size for message_tag, size in messages if message_tag == tag]
        for messages in ring_run.exchanges
    ]


@settings(max_examples=examples(6), suppress_health_check=relaxed)
@given(cases())
def test_each_member_sends_a_message_of_the_longest_shard_to_all_others(case: Case) -> None:
    members = len(case.order)
    longest = max(b - a for a, b in pairwise(case.bounds))
    around = sizes(run(case, "ring_q"), Tag.RING)
    assert around == [[longest * case.heads * HEAD_DIM * 8] * (members - 1)] * members
    around = sizes(run(case, "ring_kv"), Tag.RING)
    assert around == [around[0][:1] * (members - 1)] * members
    assert sum(around[0]) >= longest * 2 * case.kv_heads * HEAD_DIM * 8 * (members - 1)


@pytest.mark.parametrize(("length", "history"), [(48, 0), (24, 24), (8, 160), (1, 40)])
def test_history_rotates_if_that_moves_less_and_is_asked_for_otherwise(
    length: int, history: int
) -> None:
    members, (heads, kv_heads) = 4, (8, 2)
    result = run(one_prompt(length, members, history=history, heads=(heads, kv_heads)), "ring_kv")
    around = 2 * kv_heads * HEAD_DIM * members * (members - 1) * -(-history // members)
    asking = heads * (2 * HEAD_DIM + 1) * length * (members - 1)
    rotates = 0 < around < asking
    longest = -(-length // members) if length >= 2 * members else 1
    sent = sizes(result, Tag.RING)[0][0] // (2 * kv_heads * HEAD_DIM * 8)
    assert sent == longest + (-(-history // members) if rotates else 0)
    assert any(map(sum, sizes(result, Tag.HISTORY))) == (bool(history) and not rotates)


@pytest.mark.parametrize("history", [0, 96])
def test_pass_q_sends_queries_to_all_members_and_answers_of_seen_rows(history: int) -> None:
    """Count outputs and LSEs of rows that see a key: three quarters of all pairs of members in
    zigzag, all pairs with history everywhere."""
    members, length, (heads, kv_heads) = 4, 64, (4, 2)
    result = run(one_prompt(length, members, history=history, heads=(heads, kv_heads)), "ring_q")
    queries = (members - 1) * length * heads * HEAD_DIM * 8
    answers = (members - 1) * length * heads * (HEAD_DIM + 1) * 8
    assert sum(map(sum, sizes(result, Tag.RING))) == queries
    fraction = 1.0 if history else 0.75
    assert sum(map(sum, sizes(result, Tag.SECOND_EXCHANGE))) == fraction * answers
    assert sum(map(sum, result.sent)) == queries + fraction * answers


@pytest.mark.parametrize("strategy", RINGS)
def test_the_next_shard_is_on_its_way_while_the_current_one_is_computed(strategy: str) -> None:
    members = 4
    for events in run(one_prompt(200, members), strategy).events:
        rings = sorted(event.start_ns for event in events if event.name == "ring")
        rounds = sorted(event.start_ns for event in events if event.name == "attention")
        assert (len(rings), len(rounds)) == (members - 1, members)
        alternating = [*chain.from_iterable(zip(rings, rounds, strict=False)), rounds[-1]]
        assert alternating == sorted(alternating), "each is begun before the round that hides it"


@pytest.mark.parametrize("strategy", RINGS)
def test_all_rounds_but_the_last_are_computed_while_a_shard_travels(strategy: str) -> None:
    members = 4
    with counted(ring) as overlaps:
        run(one_prompt(200, members), strategy)
    last = sum(not call for call in overlaps.at_calls)
    assert (len(overlaps.at_calls), last) == (members**2, members)
    assert overlaps.phases == {"ring"}


def test_all_sequences_are_one_message_a_round() -> None:
    """Each sequence has its own zigzag rows."""
    members, order = 3, (2, 0, 1)
    chunks = tuple(
        PrefillChunk(
            sequence_id=sequence_id,
            start=0,
            length=length,
            rows=place(order, zigzag(length, members)),
        )
        for sequence_id, length in enumerate((30, 11))
    )
    case = Case(4, 2, chunks, tuple(bounds_of_rows(chunks, order)), order)
    for strategy in RINGS:
        result = check(case, strategy)
        assert all(len(messages) == members - 1 for messages in sizes(result, Tag.RING))
