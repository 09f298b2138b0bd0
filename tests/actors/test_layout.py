"""Owners of ranks, tokens and heads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from gang_driver import LAYOUTS, laid_out, prefill_step
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.attention.base.group import HeadSplit, SpGroup
from csps.actors.comm.layout import GangLayout, local_chunks
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


@given(instances=st.integers(1, 5), tp=st.integers(1, 4))
def test_every_rank_has_one_place(instances: int, tp: int) -> None:
    layout = GangLayout(world_size=instances * tp, tp=tp)
    assert layout.instances == instances
    places = [(layout.instance_of(r), layout.tp_rank_of(r)) for r in range(instances * tp)]
    assert places == [(i, t) for i in range(instances) for t in range(tp)]
    assert [layout.rank_of(*place) for place in places] == list(range(instances * tp))
    assert [r for i in range(instances) for r in layout.ranks_of(i)] == list(range(instances * tp))


@pytest.mark.parametrize(("world_size", "tp"), [(3, 2), (4, 0), (2, -1)])
def test_worlds_that_cannot_be_cut_are_refused(world_size: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"tp={tp}"):
        GangLayout(world_size=world_size, tp=tp)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[list[PrefillChunk], list[int]]:
    chunks = [
        PrefillChunk(sequence_id=sequence_id, start=draw(st.integers(0, 20)), length=length)
        for sequence_id, length in enumerate(
            draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
        )
    ]
    total = sum(chunk.length for chunk in chunks)
    inner = draw(st.lists(st.integers(0, total), max_size=6))
    return chunks, [0, *sorted(inner), total]


@given(cut_batches())
def test_local_chunks_are_a_bijection(batch: tuple[list[PrefillChunk], list[int]]) -> None:
    """Every token of every chunk is one row of one member, and the other way round."""
    chunks, bounds = batch
    laid_out = [
        (chunk.sequence_id, chunk.start + i) for chunk in chunks for i in range(chunk.length)
    ]
    for member, (begin, end) in enumerate(pairwise(bounds)):
        rows: dict[int, tuple[int, int]] = {}
        for part in local_chunks(chunks, bounds, member):
            tokens = [(part.chunk.sequence_id, p) for p in range(part.span.start, part.span.stop)]
            rows.update(zip(range(part.rows.start, part.rows.stop), tokens, strict=True))
        assert [rows[row] for row in range(end - begin)] == laid_out[begin:end]
        assert len(rows) == end - begin


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.data(),
)
def test_rows_in_any_layout_are_one_members_each(
    extents: list[tuple[int, int]], group: list[int], data: st.DataObject
) -> None:
    """The members' positions are checked chunk by chunk; the two orders undo each other."""
    chunks = []
    for sequence_id, (start, length) in enumerate(extents):
        computing = group[: data.draw(st.integers(1, 4))]
        rows = laid_out(data.draw(st.sampled_from(LAYOUTS)), start, start + length, computing)
        chunks.append(PrefillChunk(sequence_id=sequence_id, start=start, length=length, rows=rows))
    step, layout = prefill_step(chunks, group), GangLayout(world_size=4, tp=1)
    groups = [SpGroup(cast(Any, None), layout, step, member, StepClock()) for member in range(4)]
    tokens = [(chunk.sequence_id, chunk.start + i) for chunk in chunks for i in range(chunk.length)]
    in_batch_T = torch.arange(len(tokens))
    in_member_order_T = groups[0].in_member_order(in_batch_T)
    assert torch.equal(groups[0].in_batch_order(in_member_order_T), in_batch_T)
    for instance, own_group in zip(group, groups, strict=True):
        own = [
            (chunk.sequence_id, position)
            for chunk in chunks
            for kv_slice in chunk.rows
            if kv_slice.instance == instance
            for position in kv_slice.span.positions
        ]
        assert [
            tokens[at] for at in in_member_order_T[own_group.rows_of(own_group.member)].tolist()
        ] == own
        assert own_group.positions.tolist() == [position for _, position in own]
        for chunk in chunks:
            member, row = own_group.last_row_of(chunk)
            begin = step.bounds[member]
            assert tokens[in_member_order_T[begin + row]] == (
                chunk.sequence_id,
                chunk.start + chunk.length - 1,
            )


@pytest.mark.parametrize("rows", [[(0, 0, 3)], [(0, 0, 3), (1, 2, 4)], [(0, 0, 3), (1, 4, 5)]])
def test_rows_that_miss_or_repeat_positions_are_refused(rows: list[tuple[int, int, int]]) -> None:
    slices = tuple(KvSlice(i, start, stop) for i, start, stop in rows)
    chunk = PrefillChunk(sequence_id=1, start=0, length=4, rows=slices)
    with pytest.raises(ValueError, match="each once"):
        PrefillStep(step_id=1, group=(0, 1), bounds=(0, 2, 4), chunks=(chunk,)).check()


def test_bounds_that_are_not_those_of_the_rows_are_refused() -> None:
    chunks = (
        PrefillChunk(sequence_id=1, start=0, length=4, rows=laid_out("striped", 0, 4, [1, 0])),
    )
    with pytest.raises(ValueError, match=r"bounds \(0, 1, 4\) do not match the rows"):
        PrefillStep(step_id=1, group=(0, 1), bounds=(0, 1, 4), chunks=chunks).check()
    with pytest.raises(ValueError, match="instance 1 has rows, but is not in group"):
        PrefillStep(step_id=1, group=(0,), bounds=(0, 2), chunks=chunks).check()


@st.composite
def head_splits(draw: st.DrawFn) -> HeadSplit:
    kv_heads = draw(st.integers(1, 6))
    group = draw(st.integers(1, 6))
    return HeadSplit(heads=kv_heads * group, kv_heads=kv_heads, parts=draw(st.integers(1, 10)))


@given(head_splits())
def test_members_own_every_query_head_once_and_the_kv_heads_it_reads(split: HeadSplit) -> None:
    group, owned = split.heads // split.kv_heads, list[int]()
    for part in range(split.parts):
        queries = range(split.heads)[split.queries(part)]
        keys = range(split.kv_heads)[split.keys(part)]
        assert set(keys) == {head // group for head in queries}
        assert (split.query_count(part), split.key_count(part)) == (len(queries), len(keys))
        owned += queries
    assert owned == list(range(split.heads))
    sizes = [split.query_count(part) for part in range(split.parts)]
    assert max(sizes) - min(sizes) <= 1


@given(head_splits())
def test_uniform_runs_are_what_grouped_query_attention_computes(split: HeadSplit) -> None:
    """Query head i of a run reads KV head i // (queries / keys): the right one."""
    group = split.heads // split.kv_heads
    for part in range(split.parts):
        queries = range(split.heads)[split.queries(part)]
        keys = range(split.kv_heads)[split.keys(part)]
        seen: list[int] = []
        for own_queries, own_keys in split.uniform_runs(part) if queries else []:
            run_queries, run_keys = queries[own_queries], keys[own_keys]
            assert len(run_queries) % len(run_keys) == 0
            per_key = len(run_queries) // len(run_keys)
            for index, head in enumerate(run_queries):
                assert run_keys[index // per_key] == head // group
            seen += run_queries
        assert seen == list(queries)
