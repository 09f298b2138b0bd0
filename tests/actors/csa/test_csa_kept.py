from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.actors.attention.base.levels import DropSchedule, LevelPart, always_kept, kept_counts
from csps.actors.attention.csa.kept_rows import nested_order
from csps.kernels.importance import covering_counts
from csps.protocols.attention.csa import CsaPlan, LayerGroup
from csps.protocols.gang.step_messages import PrefillChunk

PAIR = ("0-0-0", "0-0-1")


@settings(max_examples=examples(200))
@given(data=st.data())
def test_every_levels_kept_set_is_a_prefix_of_the_most_important(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 30))
    heads = data.draw(st.integers(1, 3))
    # Few distinct values: ties must not break nesting.
    values = st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens)
    importance = torch.tensor([data.draw(values) for _ in range(heads)], dtype=torch.float32)
    sinks = range(data.draw(st.integers(0, tokens)))
    least = len(sinks)
    counts = data.draw(st.lists(st.integers(least, tokens), min_size=1, max_size=3))
    counts.sort(reverse=True)

    order = nested_order(importance, counts, (sinks,))

    assert order.shape == (heads, counts[0])
    for head in range(heads):
        ranks = [(t not in sinks, -float(importance[head, t]), t) for t in range(tokens)]
        ranked = [token for _, _, token in sorted(ranks)]
        for count in counts:
            assert set(order[head, :count].tolist()) == set(ranked[:count])


@settings(max_examples=examples(200))
@given(data=st.data())
def test_covering_counts_are_the_fewest_that_reach_each_share(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 30))
    # Whole numbers have exact sums, so that a share is reached or missed without doubt.
    values = st.lists(st.integers(0, 5), min_size=tokens, max_size=tokens)
    importance = torch.tensor([data.draw(values), data.draw(values)], dtype=torch.float32)
    always = torch.zeros(tokens, dtype=torch.bool)
    always[: data.draw(st.integers(0, tokens))] = True
    shares = data.draw(st.lists(st.sampled_from([1.0, 0.75, 0.5, 0.25]), min_size=1, max_size=3))

    counts = covering_counts(importance, torch.tensor([shares, shares]), always_t=always)

    for head in range(2):
        droppable = sorted(importance[head, ~always].tolist(), reverse=True)
        for level, share in enumerate(shares):
            reaching = (
                n for n in range(len(droppable) + 1) if sum(droppable[:n]) >= share * sum(droppable)
            )
            want = tokens if share == 1.0 else int(always.sum()) + next(reaching)
            assert counts[head, level] == want


def part(start: int, length: int) -> LevelPart:
    return LevelPart(index=0, member=0, chunk=0, rows=slice(0, length), start=start)


def test_sinks_and_tail_are_always_kept() -> None:
    plan = CsaPlan(locations=PAIR, levels=2, sinks=4, tail=3)
    prompt = PrefillChunk(sequence_id=1, start=0, length=20)
    assert always_kept(plan, prompt, part(0, 10)) == (range(4), range(10, 10))
    assert always_kept(plan, prompt, part(10, 10)) == (range(0), range(7, 10))
    assert always_kept(plan, prompt, part(18, 2)) == (range(0), range(2))


def test_sinks_and_tail_do_not_count_a_token_twice() -> None:
    plan = CsaPlan(locations=PAIR, levels=2, sinks=9, tail=9)
    prompt = PrefillChunk(sequence_id=1, start=0, length=12)
    assert always_kept(plan, prompt, part(0, 6)) == (range(6), range(6, 6))
    assert always_kept(plan, prompt, part(6, 6)) == (range(3), range(3, 6))
    assert kept_counts(plan, [prompt], part(0, 6), (0.0, 0.9)) == (6, 6)


def test_a_chunk_that_does_not_end_its_prompt_has_no_tail() -> None:
    plan = CsaPlan(locations=PAIR, levels=2, sinks=0, tail=9)
    chunk = PrefillChunk(sequence_id=1, start=0, length=12, last=False)
    assert always_kept(plan, chunk, part(0, 12)) == (range(0), range(0))


def test_first_and_last_layer_never_drop() -> None:
    groups = (LayerGroup(first=0, stop=4, drop_ratios=((0.5,),)),)
    plan = CsaPlan(locations=PAIR, levels=2, layer_groups=groups)
    schedule = DropSchedule(plan=plan, layers=4, kv_heads=range(2), total_kv_heads=2)
    assert [schedule.drops(layer) for layer in range(4)] == [False, True, True, False]


def test_coverages_hold_where_ratios_would() -> None:
    groups = (LayerGroup(first=0, stop=4, coverages=((0.5, 0.6, 0.7, 0.8),)),)
    plan = CsaPlan(locations=PAIR, levels=2, layer_groups=groups)
    schedule = DropSchedule(plan=plan, layers=4, kv_heads=range(2, 4), total_kv_heads=4)
    assert [schedule.drops(layer) for layer in range(4)] == [False, True, True, False]
    assert schedule.head_coverages(0) is None
    assert schedule.head_coverages(1) == ((1.0, 0.7), (1.0, 0.8))
    assert schedule.head_ratios(1) == ((0.0, 0.0), (0.0, 0.0))


def test_a_rank_takes_the_ratios_of_its_own_heads() -> None:
    groups = (LayerGroup(first=1, stop=2, drop_ratios=((0.1, 0.2, 0.3, 0.4),)),)
    plan = CsaPlan(locations=PAIR, levels=2, layer_groups=groups)
    schedule = DropSchedule(plan=plan, layers=4, kv_heads=range(2, 4), total_kv_heads=4)
    assert schedule.head_ratios(1) == ((0.0, 0.3), (0.0, 0.4))
