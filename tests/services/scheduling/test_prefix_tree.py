"""Turns that take over the KV of those before them, against a tree whose segments never merge."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.protocols.core.placement import KvSlice, Span, joined, tokens_on
from csps.services.scheduling.events.events import InstanceId, SequenceId
from csps.services.scheduling.state.prefix_tree import Hashes, PrefixTree, Segment

BLOCK = 4
INSTANCES = (1, 2)


class NeverMerges(PrefixTree):
    """The oracle: each turn stays a segment of its own, under its own name."""

    def _merge_upwards(self, segment: Segment) -> None:
        pass


class Both:
    """A tree and its oracle, which see the same turns."""

    def __init__(self) -> None:
        self.trees = PrefixTree(BLOCK), NeverMerges(BLOCK)
        self.reading: list[tuple[Hashes, tuple[Segment, Segment]]] = []
        self.sources = 0

    def begin(self, hashes: Hashes) -> None:
        """Let a turn read what is there of its prompt."""
        tree, oracle = self.trees
        (path, matched), (expected, same) = tree.match(hashes), oracle.match(hashes)
        assert matched == same, "other hits"
        tokens = matched * BLOCK
        slices, others = tree.slices(path, tokens), oracle.slices(expected, tokens)
        assert tokens_on(slices) == tokens_on(others), "other slots"
        assert tree.unreferenced(path, tokens) == oracle.unreferenced(expected, tokens)
        if matched:
            self.reading.append(
                (hashes, (tree.ref(hashes[:matched]), oracle.ref(hashes[:matched])))
            )
        else:
            self.insert(hashes, 0)
        self.check()

    def insert(self, hashes: Hashes, start: int) -> None:
        """Store a whole prompt from a position on, on one instance."""
        self.sources += 1
        holder = INSTANCES[self.sources % 3 // 2]
        slices = (KvSlice(holder, start, len(hashes) * BLOCK, 1, self.sources),)
        found = [tree.insert(hashes, start, slices) for tree in self.trees]
        assert found[0] == found[1], "other positions are retained"

    def end(self, index: int) -> None:
        """End a turn: it takes over what nobody else reads."""
        hashes, (mine, theirs) = self.reading.pop(index)
        start = self.trees[0].stop(mine)
        assert start == self.trees[1].stop(theirs)
        if start < len(hashes) * BLOCK:
            self.insert(hashes, start)
            self.trees[0].take_over(self.sources, mine, lambda source: True)
        self.trees[0].unref(mine)
        self.trees[1].unref(theirs)
        self.check()

    def evict(self, needed: dict[InstanceId, int]) -> None:
        """Evict; both lose the same."""
        gone = [tree.evict(needed) for tree in self.trees]
        assert total(gone[0]) == total(gone[1]), "other evictions"
        self.check()

    def check(self) -> None:
        for index, tree in enumerate(self.trees):
            tree.check([segments[index] for _, segments in self.reading])
        tree, oracle = self.trees
        for counts, others in (
            (tree.cached_tokens, oracle.cached_tokens),
            (tree.referenced_tokens, oracle.referenced_tokens),
        ):
            assert {k: n for k, n in counts.items() if n} == {k: n for k, n in others.items() if n}


def total(gone: list[tuple[SequenceId, range]]) -> int:
    return sum(map(len, (positions for _, positions in gone)))


def said(words: list[int]) -> Hashes:
    """Return chain hashes: each names all words up to its own."""
    return tuple(bytes(words[: at + 1]) for at in range(len(words)))


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 2), st.integers(0, 12)),
    st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 20), st.integers(0, 20)),
)


@settings(max_examples=examples(300))
@given(st.lists(ACTIONS, max_size=60))
def test_merged_turns_are_found_and_evicted_like_single_ones(
    actions: list[tuple[str, int, int]],
) -> None:
    both, talks = Both(), [[talk] for talk in range(3)]
    for action, first, second in actions:
        if action == "begin":
            # Every fourth prompt goes back and says something else.
            talk = talks[first]
            if second % 4 == 3:
                talk = talks[first] = [*talk[: second // 2 + 1], 100 + len(talk)]
            else:
                talk += [second % 2 + 10, 20]
            both.begin(said(talk[:60]))
        elif action == "end" and both.reading:
            both.end(first % len(both.reading))
        elif action == "evict":
            both.evict({1: first, 2: second})
    while both.reading:
        both.end(0)
    both.evict({1: 1 << 30, 2: 1 << 30})
    assert not list(both.trees[0])
    assert not any(both.trees[0].cached_tokens.values())


def test_turns_of_a_conversation_are_one_segment() -> None:
    both = Both()
    for turn in range(1, 101):
        both.begin(said(list(range(turn))))
        while both.reading:
            both.end(0)
    assert [len(list(tree)) for tree in both.trees] == [1, 100]


@given(st.lists(st.tuples(st.sampled_from(INSTANCES), st.integers(1, 3), st.integers(1, 4))))
def test_joined_slices_have_the_same_positions(parts: list[tuple[int, int, int]]) -> None:
    slices, start = [], 0
    for instance, step, count in parts:
        span = Span(start, start + step * (count - 1) + 1, step if count > 1 else 1)
        slices.append(KvSlice.of(instance, span, 7))
        start += step * count
    for instance in INSTANCES:
        before, after = (
            sorted(p for part in found if part.instance == instance for p in part.span.positions)
            for found in (slices, joined(slices))
        )
        assert before == after
