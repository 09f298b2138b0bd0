"""The KV pool against a dictionary that maps every (layer, request, position) to its value."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from property_examples import examples
from torch import Tensor

from csps.actors.kv_pool import KvPool, KvRun, OutOfSlots, PinnedSpan
from csps.protocols.errors import from_wire, to_wire
from csps.protocols.messages import Span

KV_HEADS, HEAD_DIM = 2, 4


def make_pool(slots: int, layers: int = 1) -> KvPool:
    return KvPool(
        layers=layers,
        slots=slots,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
    )


def span(start: int, stop: int) -> Span:
    return Span(start=start, stop=stop)


def rows_of(values: list[float]) -> tuple[Tensor, Tensor]:
    """Keys filled with the values, values with their negatives."""
    k_thd = torch.tensor(values).view(-1, 1, 1).expand(-1, KV_HEADS, HEAD_DIM)
    return k_thd, -k_thd


def contents(runs: list[KvRun]) -> dict[int, float]:
    """Position → value of what a view shows; every element of a row must agree."""
    seen: dict[int, float] = {}
    for run in runs:
        value = run.k_thd[:, :1, :1]
        assert (run.k_thd == value).all()
        assert (run.v_thd == -value).all()
        assert (run.positions.diff() > 0).all()
        for position, number in zip(run.positions.tolist(), value.flatten().tolist(), strict=True):
            assert position not in seen
            seen[position] = number
    return seen


def slots_in_use(pool: KvPool, rid: int) -> list[int]:
    return [slot for run in pool.runs(rid) for slot in run]


# --- layout --------------------------------------------------------------------------------


def test_prompt_and_answer_of_one_call_are_one_slice() -> None:
    pool = make_pool(100)
    pool.allocate(1, [span(0, 30)])
    pool.allocate(2, [span(0, 20), span(20, 40)])
    pool.write(0, 2, span(0, 20), *rows_of([1.0] * 20))
    pool.write(0, 2, span(20, 21), *rows_of([2.0]))
    (run,) = pool.view(0, 2)
    assert run.positions.tolist() == list(range(21))


def test_views_share_memory_with_the_pool() -> None:
    pool = make_pool(8)
    pool.allocate(1, [span(0, 3)])
    pool.write(0, 1, span(0, 3), *rows_of([1.0, 2.0, 3.0]))
    (run,) = pool.view(0, 1)
    pool.k.fill_(7.0)
    assert (run.k_thd == 7.0).all()


def test_request_grows_next_to_what_it_has() -> None:
    pool = make_pool(100)
    pool.allocate(1, [span(0, 10)])
    pool.allocate(2, [span(0, 5)])
    pool.allocate(3, [span(0, 10)])
    pool.free_request(2)  # leaves the tighter run, which best fit alone would take
    pool.allocate(3, [span(10, 15)])
    assert len(pool.runs(3)) == 1


def test_best_fit_takes_the_tightest_run() -> None:
    pool = make_pool(100)
    for rid, length in enumerate([10, 1, 6, 1, 8, 1]):
        pool.allocate(rid, [span(0, length)])
    tight = pool.runs(2)
    for rid in (0, 2, 4):
        pool.free_request(rid)
    pool.allocate(9, [span(0, 6)])
    assert pool.runs(9) == tight


def test_fragmented_pool_is_filled_to_the_last_slot() -> None:
    pool = make_pool(10)
    for rid in range(10):
        pool.allocate(rid, [span(rid, rid + 1)])
    for rid in range(0, 10, 2):
        pool.free_request(rid)
    pool.allocate(99, [span(0, 5)])
    assert pool.free == 0
    pool.write(0, 99, span(0, 5), *rows_of([0.0, 1.0, 2.0, 3.0, 4.0]))
    assert len(pool.view(0, 99)) == 5
    assert contents(pool.view(0, 99)) == {i: float(i) for i in range(5)}
    pool.check_integrity()


def test_freed_neighbours_coalesce() -> None:
    pool = make_pool(30)
    for rid in range(3):
        pool.allocate(rid, [span(0, 10)])
    for rid in (0, 2, 1):
        assert pool.free_request(rid) == 10
    pool.allocate(5, [span(0, 30)])
    assert pool.runs(5) == [range(30)]


def test_tokens_of_a_striped_request_are_one_slice_with_gaps_in_its_positions() -> None:
    pool = make_pool(16)
    pool.allocate(1, [span(position, position + 1) for position in range(0, 24, 3)])
    for position in range(0, 24, 3):
        pool.write(0, 1, span(position, position + 1), *rows_of([float(position)]))
    (run,) = pool.view(0, 1)
    assert run.positions.tolist() == list(range(0, 24, 3))
    (run,) = pool.view(0, 1, span(0, 13))
    assert run.positions.tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("between", [0, 2])
def test_span_over_interleaved_runs_is_written_row_by_row(between: int) -> None:
    pool = make_pool(16)
    pool.allocate(1, [span(position, position + 1) for position in range(0, 10, 2)])
    pool.allocate(2, [span(0, between)])
    pool.allocate(1, [span(position, position + 1) for position in range(1, 10, 2)])
    values = [float(position * position) for position in range(10)]
    pool.write(0, 1, span(0, 10), *rows_of(values))
    assert contents(pool.view(0, 1)) == dict(enumerate(values))
    assert contents(pool.view(0, 1, span(3, 8))) == {i: values[i] for i in range(3, 8)}


# --- what is visible -------------------------------------------------------------------------


def test_only_what_was_written_in_the_layer_is_visible() -> None:
    pool = make_pool(16, layers=2)
    pool.allocate(1, [span(0, 8)])
    assert pool.view(0, 1) == []
    pool.write(0, 1, span(2, 5), *rows_of([2.0, 3.0, 4.0]))
    assert contents(pool.view(0, 1)) == {2: 2.0, 3: 3.0, 4: 4.0}
    assert contents(pool.view(0, 1, span(0, 4))) == {2: 2.0, 3: 3.0}
    assert pool.view(1, 1) == []


def test_span_looked_up_before_is_right_after_a_change() -> None:
    pool = make_pool(16)
    pool.allocate(1, [span(0, 4)])
    pool.write(0, 1, span(0, 4), *rows_of([0.0, 1.0, 2.0, 3.0]))
    wide = span(0, 6)
    assert list(contents(pool.view(0, 1, wide))) == [0, 1, 2, 3]
    pool.allocate(1, [span(4, 6)])
    pool.write(0, 1, span(4, 6), *rows_of([4.0, 5.0]))
    assert list(contents(pool.view(0, 1, wide))) == [0, 1, 2, 3, 4, 5]
    pool.free_span(1, span(1, 3))
    assert list(contents(pool.view(0, 1, wide))) == [0, 3, 4, 5]
    pool.free_request(1)
    assert pool.view(0, 1, wide) == []


def test_next_owner_of_a_slot_does_not_see_the_last_ones_tokens() -> None:
    pool = make_pool(4)
    pool.allocate(1, [span(0, 4)])
    pool.write(0, 1, span(0, 4), *rows_of([1.0] * 4))
    pool.free_request(1)
    pool.allocate(2, [span(0, 4)])
    assert pool.view(0, 2) == []


def test_unknown_request_holds_nothing() -> None:
    pool = make_pool(4)
    assert pool.free_request(7) == 0
    assert pool.free_span(7, span(0, 9)) == 0
    assert pool.tokens(7) == 0
    assert pool.positions(7).tolist() == []
    assert pool.view(0, 7) == []


# --- refusals --------------------------------------------------------------------------------


def test_allocation_is_all_or_nothing() -> None:
    pool = make_pool(10)
    pool.allocate(1, [span(0, 6)])
    with pytest.raises(OutOfSlots, match="5 needed, 4 free") as caught:
        pool.allocate(2, [span(0, 3), span(5, 7)])
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert pool.tokens(2) == 0
    assert pool.free == 4
    pool.check_integrity()


def test_out_of_slots_crosses_the_wire() -> None:
    error = from_wire(to_wire(OutOfSlots(needed=5, free=4)))
    assert isinstance(error, OutOfSlots)
    assert (error.needed, error.free) == (5, 4)


@pytest.mark.parametrize(
    "spans", [[span(3, 5)], [span(0, 9)], [span(8, 9), span(4, 5)], [span(6, 8), span(7, 9)]]
)
def test_same_position_twice_is_refused(spans: list[Span]) -> None:
    pool = make_pool(32)
    pool.allocate(1, [span(2, 6)])
    with pytest.raises(AssertionError, match="position"):
        pool.allocate(1, spans)
    assert pool.used == 4
    pool.check_integrity()


def test_writing_what_is_not_allocated_is_refused() -> None:
    pool = make_pool(8)
    pool.allocate(1, [span(0, 4)])
    with pytest.raises(AssertionError, match="not allocated to request 1"):
        pool.write(0, 1, span(2, 6), *rows_of([0.0] * 4))
    with pytest.raises(AssertionError):
        pool.write(0, 1, span(0, 4), *rows_of([0.0] * 3))


def test_integrity_check_names_a_shared_and_a_lost_slot() -> None:
    pool = make_pool(8)
    pool.allocate(1, [span(0, 2)])
    pool._free.add(range(1, 2))
    with pytest.raises(AssertionError, match=r"slots \[1\] have two owners"):
        pool.check_integrity()
    pool._free.remove(range(3))
    with pytest.raises(AssertionError, match=r"slots \[2\] are neither free nor owned"):
        pool.check_integrity()


# --- any sequence ----------------------------------------------------------------------------

RIDS = st.integers(0, 4)
SPANS = st.builds(
    lambda start, extent, step: Span(start, start + extent, step),
    st.integers(0, 20),
    st.integers(0, 9),
    st.sampled_from((1, 1, 2, 3)),
)


@dataclass
class Pin:
    """What the oracle knows of a pinned span."""

    pinned: PinnedSpan
    rid: int
    held: set[int]
    """Positions that the request has not freed since."""
    value: dict[tuple[int, int], float]
    """By layer and position, what was last written there."""

    def leaving(self) -> set[int]:
        """Slots that only the pin keeps."""
        span = self.pinned.span
        freed = [row for row, p in enumerate(span.positions) if p not in self.held]
        return {int(self.pinned.slots[row]) for row in freed}


class PoolMachine(RuleBasedStateMachine):
    """Random calls, with a dictionary as the oracle of ownership and of contents."""

    LAYERS, SLOTS = 2, 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.SLOTS, self.LAYERS)
        self.owned: dict[int, set[int]] = {}
        self.value: dict[tuple[int, int, int], float] = {}
        self.pins: list[Pin] = []
        self.numbers = itertools.count(1)

    @rule(rid=RIDS, spans=st.lists(SPANS, max_size=4))
    def allocate(self, rid: int, spans: list[Span]) -> None:
        asked = [position for s in spans for position in s.positions]
        fits = len(asked) <= self.SLOTS - self.total() - self.leaving()
        new = len(set(asked)) == len(asked) and not self.owned.get(rid, set()) & set(asked)
        if fits and new:
            self.pool.allocate(rid, spans)
            self.owned.setdefault(rid, set()).update(asked)
        else:
            with pytest.raises(AssertionError if fits else OutOfSlots):
                self.pool.allocate(rid, spans)

    @rule(rid=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def write(self, rid: int, s: Span, layer: int) -> None:
        numbers = [float(next(self.numbers)) for _ in range(s.length)]
        positions = s.positions
        if not self.owned.get(rid, set()).issuperset(positions):
            with pytest.raises(AssertionError):
                self.pool.write(layer, rid, s, *rows_of(numbers))
            return
        self.pool.write(layer, rid, s, *rows_of(numbers))
        self.value |= {(layer, rid, p): x for p, x in zip(positions, numbers, strict=True)}
        for pin in self.pins:
            if pin.rid == rid:
                new = zip(positions, numbers, strict=True)
                pin.value |= {(layer, p): x for p, x in new if p in pin.held}

    @rule(rid=RIDS, s=SPANS)
    def free_span(self, rid: int, s: Span) -> None:
        gone = self.owned.get(rid, set()) & set(s.positions)
        assert self.pool.free_span(rid, s) == len(gone)
        self.forget(rid, gone)

    @rule(rid=RIDS)
    def free_request(self, rid: int) -> None:
        gone = set(self.owned.get(rid, set()))
        assert self.pool.free_request(rid) == len(gone)
        self.forget(rid, gone)

    @rule(rid=RIDS, s=SPANS)
    def pin(self, rid: int, s: Span) -> None:
        positions = set(s.positions)
        if not self.owned.get(rid, set()).issuperset(positions):
            with pytest.raises(AssertionError, match="is not allocated"):
                self.pool.pin(rid, s)
            return
        value = {
            (at, p): x for (at, it, p), x in self.value.items() if it == rid and p in positions
        }
        self.pins.append(Pin(self.pool.pin(rid, s), rid, positions, value))

    @rule(random=st.randoms(use_true_random=False))
    def unpin(self, random: random.Random) -> None:
        if self.pins:
            self.pool.unpin(self.pins.pop(random.randrange(len(self.pins))).pinned)

    @rule(s=SPANS, layer=st.integers(0, LAYERS - 1), head=st.integers(0, KV_HEADS - 1))
    def read_pinned(self, s: Span, layer: int, head: int) -> None:
        """Whatever became of the request, and whoever has got slots since."""
        for pin in self.pins:
            common = s.intersection(pin.pinned.span)
            heads = slice(head, KV_HEADS)
            k_thd, v_thd = self.pool.read_pinned(layer, pin.pinned, common, heads=heads)
            assert k_thd.shape == v_thd.shape == (common.length, KV_HEADS - head, HEAD_DIM)
            for row, position in enumerate(common.positions):
                if (expected := pin.value.get((layer, position))) is not None:
                    assert (k_thd[row] == expected).all()
                    assert (v_thd[row] == -expected).all()

    @rule(rid=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def read_span(self, rid: int, s: Span, layer: int) -> None:
        written = self.written(layer, rid)
        expected = {p: x for p, x in written.items() if p in s.positions}
        assert contents(self.pool.view(layer, rid, s)) == expected
        if self.owned.get(rid, set()).issuperset(s.positions):
            k_thd, _ = self.pool.read(layer, rid, s)
            read = dict(zip(s.positions, k_thd[:, 0, 0].tolist(), strict=True))
            assert read | expected == read

    @invariant()
    def owners_match(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used == self.total() + self.leaving()
        assert self.pool.free + self.pool.used == self.pool.capacity
        slots = [slot for rid in self.owned for slot in slots_in_use(self.pool, rid)]
        assert len(set(slots)) == len(slots) == self.total()
        for rid, positions in self.owned.items():
            assert self.pool.positions(rid).tolist() == sorted(positions)
            assert self.pool.tokens(rid) == len(positions)

    @invariant()
    def reads_give_back_what_was_written(self) -> None:
        for layer, rid in itertools.product(range(self.LAYERS), self.owned):
            assert contents(self.pool.view(layer, rid)) == self.written(layer, rid)

    def teardown(self) -> None:
        for pin in self.pins[::2]:
            self.pool.unpin(pin.pinned)
        for rid in self.owned:
            self.pool.free_request(rid)
        for pin in self.pins[1::2]:
            self.pool.unpin(pin.pinned)
        self.pool.check_integrity()
        assert self.pool.free == self.SLOTS
        self.pool.allocate(99, [span(0, self.SLOTS)])
        assert len(self.pool.runs(99)) == 1

    def total(self) -> int:
        return sum(map(len, self.owned.values()))

    def leaving(self) -> int:
        return len(set[int]().union(*(pin.leaving() for pin in self.pins)))

    def written(self, layer: int, rid: int) -> dict[int, float]:
        return {p: x for (at, owner, p), x in self.value.items() if (at, owner) == (layer, rid)}

    def forget(self, rid: int, positions: set[int]) -> None:
        self.owned.get(rid, set()).difference_update(positions)
        for pin in self.pins:
            if pin.rid == rid:
                pin.held -= positions
        self.value = {
            (layer, owner, position): x
            for (layer, owner, position), x in self.value.items()
            if owner != rid or position not in positions
        }


TestAnySequence = PoolMachine.TestCase
TestAnySequence.settings = settings(max_examples=examples(100), stateful_step_count=30)


# --- several threads -------------------------------------------------------------------------


def lives(rng: random.Random, rids: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    for _ in range(60):
        yield next(rids), rng.randint(1, 40), rng.randint(1, 10)


def test_threads_never_see_each_others_tokens() -> None:
    pool, rids, errors = make_pool(256, layers=2), itertools.count(), list[BaseException]()

    def live(rid: int, prompt: int, answer: int) -> None:
        pool.allocate(rid, [span(0, prompt), span(prompt, prompt + answer)])
        try:
            for layer in range(2):
                pool.write(layer, rid, span(0, prompt), *rows_of([float(rid)] * prompt))
            for position, layer in itertools.product(range(prompt, prompt + answer), range(2)):
                pool.write(layer, rid, span(position, position + 1), *rows_of([float(rid)]))
                expected = dict.fromkeys(range(position + 1), float(rid))
                assert contents(pool.view(layer, rid, span(0, position + 1))) == expected
        finally:
            assert pool.free_request(rid) == prompt + answer

    def work(seed: int) -> None:
        try:
            for rid, prompt, answer in lives(random.Random(seed), rids):
                live(rid, prompt, answer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert errors == []
    pool.check_integrity()
    assert pool.free == pool.capacity
