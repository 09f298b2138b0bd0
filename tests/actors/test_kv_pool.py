"""The KV pool against a dictionary that maps every (layer, request, position) to its value."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from device_budget import DEVICE, DeviceBudget
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from property_examples import examples
from torch import Tensor

from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_cache.slot_allocator import NotHeld, OutOfSlots, PinnedSpan
from csps.protocols.core.placement import Span

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
    """Return keys filled with the values, and values with their negatives."""
    k_thd = torch.tensor(values).view(-1, 1, 1).expand(-1, KV_HEADS, HEAD_DIM)
    return k_thd, -k_thd


def contents(
    pool: KvPool, layer: int, sequence_id: int, positions: Iterable[int]
) -> dict[int, float]:
    """Return the value at each position of a sequence; every element of a row must agree."""
    seen: dict[int, float] = {}
    for position in positions:
        k_thd, v_thd = pool.read(layer, sequence_id, span(position, position + 1))
        value = float(k_thd[0, 0, 0])
        assert (k_thd == value).all()
        assert (v_thd == -value).all()
        seen[position] = value
    return seen


def slots_in_use(pool: KvPool, sequence_id: int) -> list[int]:
    return [slot for run in pool.slots.runs(sequence_id) for slot in run]


# --- single calls -----------------------------------------------------------------------


def test_neighbours_are_read_where_they_lie() -> None:
    pool = make_pool(8)
    pool.slots.allocate(1, [span(0, 3)])
    k_thd, _ = pool.read(0, 1, span(0, 3))
    pool.k.fill_(7.0)
    assert (k_thd == 7.0).all()


def test_fragmented_pool_is_filled_to_the_last_slot() -> None:
    pool = make_pool(10)
    for sequence_id in range(10):
        pool.slots.allocate(sequence_id, [span(sequence_id, sequence_id + 1)])
    for sequence_id in range(0, 10, 2):
        pool.slots.free_sequence(sequence_id)
    pool.slots.allocate(99, [span(0, 5)])
    assert pool.slots.free == 0
    pool.write(0, 99, span(0, 5), *rows_of([0.0, 1.0, 2.0, 3.0, 4.0]))
    assert len(pool.slots.runs(99)) == 5
    assert contents(pool, 0, 99, range(5)) == {i: float(i) for i in range(5)}
    pool.slots.check_integrity()


@pytest.mark.parametrize("between", [0, 2])
def test_span_over_interleaved_runs_is_written_row_by_row(between: int) -> None:
    pool = make_pool(16)
    pool.slots.allocate(1, [span(position, position + 1) for position in range(0, 10, 2)])
    pool.slots.allocate(2, [span(0, between)])
    pool.slots.allocate(1, [span(position, position + 1) for position in range(1, 10, 2)])
    values = [float(position * position) for position in range(10)]
    pool.write(0, 1, span(0, 10), *rows_of(values))
    assert contents(pool, 0, 1, range(10)) == dict(enumerate(values))


def test_rows_of_one_member_of_a_ring_are_written_by_one_copy_each() -> None:
    pool = KvPool(
        layers=1,
        slots=64,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=DEVICE,
    )
    pool.slots.allocate(1, [Span(member, 64, 4) for member in range(4)])
    k_thd = torch.empty(16, KV_HEADS, HEAD_DIM, device=DEVICE)
    with DeviceBudget() as budget:
        pool.write(0, 1, Span(3, 64, 4), k_thd, k_thd)
    assert budget.kernels.total() == 2
    assert not budget.copies


def test_writing_unallocated_positions_is_refused() -> None:
    pool = make_pool(8)
    pool.slots.allocate(1, [span(0, 4)])
    with pytest.raises(AssertionError, match="not allocated to sequence 1"):
        pool.write(0, 1, span(2, 6), *rows_of([0.0] * 4))
    with pytest.raises(AssertionError):
        pool.write(0, 1, span(0, 4), *rows_of([0.0] * 3))


def test_shared_slots_are_free_when_the_last_sequence_frees_them() -> None:
    pool = make_pool(16)
    pool.slots.allocate(1, [span(0, 6)])
    pool.write(0, 1, span(0, 6), *rows_of([float(i) for i in range(6)]))
    pool.slots.share_slots(2, 1, span(0, 4))
    pool.slots.allocate(2, [span(4, 7)])
    assert pool.slots.used == 9
    assert pool.slots.free_sequence(1) == 6
    assert pool.slots.used == 7
    assert contents(pool, 0, 2, range(4)) == {i: float(i) for i in range(4)}
    pool.slots.check_integrity()
    assert pool.slots.free_span(2, span(0, 4)) == 4
    assert pool.slots.used == pool.slots.tokens(2) == 3
    pool.slots.free_sequence(2)
    pool.slots.check_integrity()
    assert pool.slots.used == 0


# --- any sequence ----------------------------------------------------------------------------

RIDS = st.integers(0, 4)
SPANS = st.builds(
    lambda start, extent, step: Span(start, start + extent, step),
    st.integers(0, 20),
    st.integers(0, 9),
    st.sampled_from((1, 1, 2, 3)),
)


@dataclass(eq=False)
class Cell:
    """Oracle of a slot: what was last written there, by layer."""

    value: dict[int, float] = field(default_factory=dict)


class Pin(NamedTuple):
    """A pinned span and its cells."""

    pinned: PinnedSpan
    cells: dict[int, Cell]


class PoolMachine(RuleBasedStateMachine):
    """Random calls, with dictionaries as the oracle of ownership and of contents."""

    LAYERS, SLOTS = 2, 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.SLOTS, self.LAYERS)
        self.owned: dict[int, dict[int, Cell]] = defaultdict(dict)
        """Positions by sequence."""
        self.shared: dict[int, set[int]] = defaultdict(set)
        """Positions that others have computed, by sequence."""
        self.pins: list[Pin] = []
        self.numbers = itertools.count(1)

    @rule(sequence_id=RIDS, spans=st.lists(SPANS, max_size=4))
    def allocate(self, sequence_id: int, spans: list[Span]) -> None:
        asked = [position for s in spans for position in s.positions]
        fits = len(asked) <= self.SLOTS - len(self.cells())
        new = len(set(asked)) == len(asked) and not self.owned[sequence_id].keys() & set(asked)
        if fits and new:
            self.pool.slots.allocate(sequence_id, spans)
            self.owned[sequence_id].update({position: Cell() for position in asked})
        else:
            with pytest.raises(AssertionError if fits else OutOfSlots):
                self.pool.slots.allocate(sequence_id, spans)

    @rule(sequence_id=RIDS, source=RIDS, s=SPANS)
    def share_span(self, sequence_id: int, source: int, s: Span) -> None:
        has, theirs = self.owned[sequence_id], self.owned[source]
        if self.shared[sequence_id] >= set(s.positions):
            self.pool.slots.share_slots(sequence_id, source, s)
            return
        others = [p for p in s.positions if p in has and has[p] is not theirs.get(p)]
        if others or not theirs.keys() >= set(s.positions):
            with pytest.raises(NotHeld):
                self.pool.slots.share_slots(sequence_id, source, s)
            return
        self.pool.slots.share_slots(sequence_id, source, s)
        self.shared[sequence_id] |= set(s.positions) - has.keys()
        has.update({position: theirs[position] for position in s.positions})

    @rule(sequence_id=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def write(self, sequence_id: int, s: Span, layer: int) -> None:
        numbers = [float(next(self.numbers)) for _ in range(s.length)]
        if not self.owned[sequence_id].keys() >= set(s.positions):
            with pytest.raises(AssertionError):
                self.pool.write(layer, sequence_id, s, *rows_of(numbers))
            return
        self.pool.write(layer, sequence_id, s, *rows_of(numbers))
        for position, number in zip(s.positions, numbers, strict=True):
            self.owned[sequence_id][position].value[layer] = number

    @rule(sequence_id=RIDS, s=SPANS)
    def free_span(self, sequence_id: int, s: Span) -> None:
        freed = self.owned[sequence_id].keys() & set(s.positions)
        assert self.pool.slots.free_span(sequence_id, s) == len(freed)
        self.forget(sequence_id, freed)

    @rule(sequence_id=RIDS)
    def free_sequence(self, sequence_id: int) -> None:
        freed = set(self.owned[sequence_id])
        assert self.pool.slots.free_sequence(sequence_id) == len(freed)
        self.forget(sequence_id, freed)

    @rule(sequence_id=RIDS, s=SPANS)
    def pin(self, sequence_id: int, s: Span) -> None:
        if not self.owned[sequence_id].keys() >= set(s.positions):
            with pytest.raises(AssertionError, match="is not allocated"):
                self.pool.slots.pin(sequence_id, s)
            return
        cells = {position: self.owned[sequence_id][position] for position in s.positions}
        self.pins.append(Pin(self.pool.slots.pin(sequence_id, s), cells))

    @rule(random=st.randoms(use_true_random=False))
    def unpin(self, random: random.Random) -> None:
        if self.pins:
            self.pool.slots.unpin(self.pins.pop(random.randrange(len(self.pins))).pinned)

    @rule(s=SPANS, layer=st.integers(0, LAYERS - 1), head=st.integers(0, KV_HEADS - 1))
    def read_pinned(self, s: Span, layer: int, head: int) -> None:
        """Check a pinned span, whatever became of its sequence and of the slots since."""
        for pinned, cells in self.pins:
            common = s.intersection(pinned.span)
            heads = slice(head, KV_HEADS)
            k_thd, v_thd = self.pool.read_pinned(layer, pinned, common, heads=heads)
            assert k_thd.shape == v_thd.shape == (common.length, KV_HEADS - head, HEAD_DIM)
            for row, position in enumerate(common.positions):
                if (expected := cells[position].value.get(layer)) is not None:
                    assert (k_thd[row] == expected).all()
                    assert (v_thd[row] == -expected).all()

    @rule(sequence_id=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def read_span(self, sequence_id: int, s: Span, layer: int) -> None:
        if self.owned[sequence_id].keys() >= set(s.positions):
            k_thd, _ = self.pool.read(layer, sequence_id, s)
            read = dict(zip(s.positions, k_thd[:, 0, 0].tolist(), strict=True))
            assert read | self.written(layer, sequence_id, s.positions) == read

    @invariant()
    def owners_match(self) -> None:
        self.pool.slots.check_integrity()
        assert self.pool.slots.used == len(self.cells())
        assert self.pool.slots.free + self.pool.slots.used == self.pool.slots.capacity
        slot_of: dict[Cell, int] = {}
        for sequence_id, cells in self.owned.items():
            assert sorted(slots_in_use(self.pool, sequence_id)) == sorted(
                self.pool.slots.by_position(sequence_id, span(p, p + 1))[0] for p in cells
            )
            for position, cell in cells.items():
                (slot,) = self.pool.slots.by_position(
                    sequence_id, span(position, position + 1)
                ).tolist()
                assert slot_of.setdefault(cell, slot) == slot
        assert len(set(slot_of.values())) == len(slot_of)

    @invariant()
    def reads_return_what_was_written(self) -> None:
        for layer, sequence_id in itertools.product(range(self.LAYERS), self.owned):
            written = self.written(layer, sequence_id, self.owned[sequence_id])
            assert contents(self.pool, layer, sequence_id, written) == written

    def teardown(self) -> None:
        for pin in self.pins[::2]:
            self.pool.slots.unpin(pin.pinned)
        for sequence_id in self.owned:
            self.pool.slots.free_sequence(sequence_id)
        for pin in self.pins[1::2]:
            self.pool.slots.unpin(pin.pinned)
        self.pool.slots.check_integrity()
        assert self.pool.slots.free == self.SLOTS
        self.pool.slots.allocate(99, [span(0, self.SLOTS)])
        assert len(self.pool.slots.runs(99)) == 1

    def cells(self) -> set[Cell]:
        """Return the slots that a sequence has."""
        owned = [cell for cells in self.owned.values() for cell in cells.values()]
        return {*owned, *(cell for pin in self.pins for cell in pin.cells.values())}

    def written(self, layer: int, sequence_id: int, positions: Iterable[int]) -> dict[int, float]:
        cells = {p: self.owned[sequence_id][p] for p in positions}
        return {p: cell.value[layer] for p, cell in cells.items() if layer in cell.value}

    def forget(self, sequence_id: int, positions: set[int]) -> None:
        self.shared[sequence_id] -= positions
        for position in positions:
            del self.owned[sequence_id][position]


TestAnySequence = PoolMachine.TestCase
TestAnySequence.settings = settings(max_examples=examples(100), stateful_step_count=30)


# --- several threads -------------------------------------------------------------------------


def lives(rng: random.Random, sequence_ids: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    for _ in range(20):
        yield next(sequence_ids), rng.randint(1, 40), rng.randint(1, 10)


def test_threads_never_see_each_others_tokens() -> None:
    pool, sequence_ids, errors = make_pool(256, layers=2), itertools.count(), list[BaseException]()

    def live(sequence_id: int, prompt: int, answer: int) -> None:
        pool.slots.allocate(sequence_id, [span(0, prompt), span(prompt, prompt + answer)])
        try:
            for layer in range(2):
                pool.write(
                    layer, sequence_id, span(0, prompt), *rows_of([float(sequence_id)] * prompt)
                )
            for position, layer in itertools.product(range(prompt, prompt + answer), range(2)):
                pool.write(
                    layer, sequence_id, span(position, position + 1), *rows_of([float(sequence_id)])
                )
                expected = dict.fromkeys(range(position + 1), float(sequence_id))
                assert contents(pool, layer, sequence_id, range(position + 1)) == expected
        finally:
            assert pool.slots.free_sequence(sequence_id) == prompt + answer

    def work(seed: int) -> None:
        try:
            for sequence_id, prompt, answer in lives(random.Random(seed), sequence_ids):
                live(sequence_id, prompt, answer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert errors == []
    pool.slots.check_integrity()
    assert pool.slots.free == pool.slots.capacity
