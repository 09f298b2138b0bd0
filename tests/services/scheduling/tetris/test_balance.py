"""History over a group that has grown: even to within a token, and nothing moves in vain."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import LAYOUTS, KvSlice, outside, place, tokens_on
from csps.services.scheduling.policies.tetris.policy import balancing_moves


def positions(slices: tuple[KvSlice, ...]) -> list[tuple[int, int]]:
    """(position, instance), ascending."""
    return sorted(
        (at, kv_slice.instance)
        for kv_slice in slices
        for at in range(kv_slice.start, kv_slice.stop, kv_slice.step)
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[KvSlice, ...], list[int]]:
    """Chunks on nested groups, each in some layout, and the group that follows."""
    instances = draw(st.permutations(range(8)))
    sizes = sorted(draw(st.lists(st.integers(1, 8), min_size=2, max_size=4)))
    history: tuple[KvSlice, ...] = ()
    start = 0
    for size in sizes[:-1]:
        length = draw(st.integers(1, 60))
        layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        history += place(sorted(instances[:size]), layout(length, size), start=start)
        start += length
    return history, sorted(instances[: sizes[-1]])


def moved(history: tuple[KvSlice, ...], moves: tuple[KvSlice, ...]) -> tuple[KvSlice, ...]:
    """Return where history is stored then."""
    return (*outside(history, moves), *moves)


@given(histories())
def test_members_have_as_much_to_within_a_token(
    world: tuple[tuple[KvSlice, ...], list[int]],
) -> None:
    history, group = world
    after = moved(history, balancing_moves(history, group))
    held = [tokens_on(after).get(instance, 0) for instance in group]
    assert max(held) - min(held) <= 1
    assert [at for at, _ in positions(after)] == [at for at, _ in positions(history)]


@given(histories())
def test_only_displaced_tokens_move(world: tuple[tuple[KvSlice, ...], list[int]]) -> None:
    """As many as the fullest members have above what they are to have; nobody gives and takes."""
    history, group = world
    moves = balancing_moves(history, group)
    before, after = tokens_on(history), tokens_on(moved(history, moves))
    displaced = sum(max(0, before.get(instance, 0) - after.get(instance, 0)) for instance in group)
    assert sum(move.tokens for move in moves) == displaced
    total, size = sum(before.values()), len(group)
    least = sum(max(0, held - -(-total // size)) for held in before.values())
    most = sum(max(0, held - total // size) for held in before.values())
    assert least <= displaced <= most
    givers = {instance for instance in group if before.get(instance, 0) > after.get(instance, 0)}
    assert givers.isdisjoint(move.instance for move in moves)


@given(histories(), st.integers(0, 10))
def test_nobody_takes_in_more_than_there_is_room_for(
    world: tuple[tuple[KvSlice, ...], list[int]], room: int
) -> None:
    history, group = world
    moves = balancing_moves(history, group, dict.fromkeys(group, room))
    assert all(count <= room for count in tokens_on(moves).values())


@given(histories(), st.integers(1, 3), st.none() | st.integers(0, 30))
def test_what_others_have_computed_stays_and_counts(
    world: tuple[tuple[KvSlice, ...], list[int]], chunks: int, room: int | None
) -> None:
    """Members differ by a token, but for those who have more of that."""
    history, group = world
    end = sorted(kv_slice.stop for kv_slice in history)[len(history) * chunks // 4]
    others = tuple(
        msgspec.structs.replace(kv_slice, source=7) for kv_slice in history if kv_slice.stop <= end
    )
    stored = (*others, *(kv_slice for kv_slice in history if kv_slice.stop > end))
    moves = balancing_moves(stored, group, None if room is None else dict.fromkeys(group, room))
    assert not any(move.source for move in moves)
    assert outside(others, moves) == others
    if room is None:
        held, fixed = tokens_on(moved(stored, moves)), tokens_on(others)
        with_own = [
            held[instance] for instance in group if held.get(instance, 0) > fixed.get(instance, 0)
        ]
        least = min(held.get(instance, 0) for instance in group)
        assert all(tokens - least <= 1 for tokens in with_own)


@given(histories())
def test_what_is_even_stays_where_it_is(world: tuple[tuple[KvSlice, ...], list[int]]) -> None:
    history, group = world
    after = moved(history, balancing_moves(history, group))
    assert balancing_moves(after, group) == ()
