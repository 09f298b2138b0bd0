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

from csps.actors.kv_pool import KvPool
from csps.actors.slot_allocator import NotHeld, OutOfSlots, PinnedSpan
from csps.protocols.span import Span

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


def contents(pool: KvPool, layer: int, rid: int, positions: Iterable[int]) -> dict[int, float]:
    """Position → value of what a request has; every element of a row must agree."""
    seen: dict[int, float] = {}
    for position in positions:
        k_thd, v_thd = pool.read(layer, rid, span(position, position + 1))
        value = float(k_thd[0, 0, 0])
        assert (k_thd == value).all()
        assert (v_thd == -value).all()
        seen[position] = value
    return seen


def slots_in_use(pool: KvPool, rid: int) -> list[int]:
    return [slot for run in pool.slots.runs(rid) for slot in run]


# --- single calls -----------------------------------------------------------------------


def test_neighbours_are_read_where_they_lie() -> None:
    pool = make_pool(8)
    pool.slots.allocate(1, [span(0, 3)])
    k_thd, _ = pool.read(0, 1, span(0, 3))
    pool.k.fill_(7.0)
    assert (k_thd == 7.0).all()


def test_fragmented_pool_is_filled_to_the_last_slot() -> None:
    pool = make_pool(10)
    for rid in range(10):
        pool.slots.allocate(rid, [span(rid, rid + 1)])
    for rid in range(0, 10, 2):
        pool.slots.free_request(rid)
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


def test_writing_what_is_not_allocated_is_refused() -> None:
    pool = make_pool(8)
    pool.slots.allocate(1, [span(0, 4)])
    with pytest.raises(AssertionError, match="not allocated to request 1"):
        pool.write(0, 1, span(2, 6), *rows_of([0.0] * 4))
    with pytest.raises(AssertionError):
        pool.write(0, 1, span(0, 4), *rows_of([0.0] * 3))


def test_what_is_shared_is_free_when_the_last_one_lets_go() -> None:
    pool = make_pool(16)
    pool.slots.allocate(1, [span(0, 6)])
    pool.write(0, 1, span(0, 6), *rows_of([float(i) for i in range(6)]))
    pool.slots.share(2, 1, span(0, 4))
    pool.slots.allocate(2, [span(4, 7)])
    assert pool.slots.used == 9
    assert pool.slots.free_request(1) == 6
    assert pool.slots.used == 7
    assert contents(pool, 0, 2, range(4)) == {i: float(i) for i in range(4)}
    pool.slots.check_integrity()
    pool.slots.drop_shared(2)
    assert pool.slots.used == pool.slots.tokens(2) == 3
    pool.slots.free_request(2)
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
    """What the oracle knows of a slot: by layer what was last written there."""

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
        """By request and position."""
        self.shared: dict[int, set[int]] = defaultdict(set)
        """By request, positions that others have computed."""
        self.pins: list[Pin] = []
        self.numbers = itertools.count(1)

    @rule(rid=RIDS, spans=st.lists(SPANS, max_size=4))
    def allocate(self, rid: int, spans: list[Span]) -> None:
        asked = [position for s in spans for position in s.positions]
        fits = len(asked) <= self.SLOTS - len(self.cells())
        new = len(set(asked)) == len(asked) and not self.owned[rid].keys() & set(asked)
        if fits and new:
            self.pool.slots.allocate(rid, spans)
            self.owned[rid].update({position: Cell() for position in asked})
        else:
            with pytest.raises(AssertionError if fits else OutOfSlots):
                self.pool.slots.allocate(rid, spans)

    @rule(rid=RIDS, origin=RIDS, s=SPANS)
    def share(self, rid: int, origin: int, s: Span) -> None:
        has, theirs = self.owned[rid], self.owned[origin]
        if self.shared[rid] >= set(s.positions):
            self.pool.slots.share(rid, origin, s)
            return
        others = [p for p in s.positions if p in has and has[p] is not theirs.get(p)]
        if others or not theirs.keys() >= set(s.positions):
            with pytest.raises(NotHeld):
                self.pool.slots.share(rid, origin, s)
            return
        self.pool.slots.share(rid, origin, s)
        self.shared[rid] |= set(s.positions) - has.keys()
        has.update({position: theirs[position] for position in s.positions})

    @rule(rid=RIDS)
    def drop_shared(self, rid: int) -> None:
        self.pool.slots.drop_shared(rid)
        self.forget(rid, set(self.shared[rid]))

    @rule(rid=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def write(self, rid: int, s: Span, layer: int) -> None:
        numbers = [float(next(self.numbers)) for _ in range(s.length)]
        if not self.owned[rid].keys() >= set(s.positions):
            with pytest.raises(AssertionError):
                self.pool.write(layer, rid, s, *rows_of(numbers))
            return
        self.pool.write(layer, rid, s, *rows_of(numbers))
        for position, number in zip(s.positions, numbers, strict=True):
            self.owned[rid][position].value[layer] = number

    @rule(rid=RIDS, s=SPANS)
    def free_span(self, rid: int, s: Span) -> None:
        gone = self.owned[rid].keys() & set(s.positions)
        assert self.pool.slots.free_span(rid, s) == len(gone)
        self.forget(rid, gone)

    @rule(rid=RIDS)
    def free_request(self, rid: int) -> None:
        gone = set(self.owned[rid])
        assert self.pool.slots.free_request(rid) == len(gone)
        self.forget(rid, gone)

    @rule(rid=RIDS, s=SPANS)
    def pin(self, rid: int, s: Span) -> None:
        if not self.owned[rid].keys() >= set(s.positions):
            with pytest.raises(AssertionError, match="is not allocated"):
                self.pool.slots.pin(rid, s)
            return
        cells = {position: self.owned[rid][position] for position in s.positions}
        self.pins.append(Pin(self.pool.slots.pin(rid, s), cells))

    @rule(random=st.randoms(use_true_random=False))
    def unpin(self, random: random.Random) -> None:
        if self.pins:
            self.pool.slots.unpin(self.pins.pop(random.randrange(len(self.pins))).pinned)

    @rule(s=SPANS, layer=st.integers(0, LAYERS - 1), head=st.integers(0, KV_HEADS - 1))
    def read_pinned(self, s: Span, layer: int, head: int) -> None:
        """Whatever became of the request, and whoever has got slots since."""
        for pinned, cells in self.pins:
            common = s.intersection(pinned.span)
            heads = slice(head, KV_HEADS)
            k_thd, v_thd = self.pool.read_pinned(layer, pinned, common, heads=heads)
            assert k_thd.shape == v_thd.shape == (common.length, KV_HEADS - head, HEAD_DIM)
            for row, position in enumerate(common.positions):
                if (expected := cells[position].value.get(layer)) is not None:
                    assert (k_thd[row] == expected).all()
                    assert (v_thd[row] == -expected).all()

    @rule(rid=RIDS, s=SPANS, layer=st.integers(0, LAYERS - 1))
    def read_span(self, rid: int, s: Span, layer: int) -> None:
        if self.owned[rid].keys() >= set(s.positions):
            k_thd, _ = self.pool.read(layer, rid, s)
            read = dict(zip(s.positions, k_thd[:, 0, 0].tolist(), strict=True))
            assert read | self.written(layer, rid, s.positions) == read

    @invariant()
    def owners_match(self) -> None:
        self.pool.slots.check_integrity()
        assert self.pool.slots.used == len(self.cells())
        assert self.pool.slots.free + self.pool.slots.used == self.pool.slots.capacity
        slot_of: dict[Cell, int] = {}
        for rid, cells in self.owned.items():
            assert sorted(slots_in_use(self.pool, rid)) == sorted(
                self.pool.slots.by_position(rid, span(p, p + 1))[0] for p in cells
            )
            for position, cell in cells.items():
                (slot,) = self.pool.slots.by_position(rid, span(position, position + 1)).tolist()
                assert slot_of.setdefault(cell, slot) == slot
        assert len(set(slot_of.values())) == len(slot_of)

    @invariant()
    def reads_give_back_what_was_written(self) -> None:
        for layer, rid in itertools.product(range(self.LAYERS), self.owned):
            written = self.written(layer, rid, self.owned[rid])
            assert contents(self.pool, layer, rid, written) == written

    def teardown(self) -> None:
        for pin in self.pins[::2]:
            self.pool.slots.unpin(pin.pinned)
        for rid in self.owned:
            self.pool.slots.free_request(rid)
        for pin in self.pins[1::2]:
            self.pool.slots.unpin(pin.pinned)
        self.pool.slots.check_integrity()
        assert self.pool.slots.free == self.SLOTS
        self.pool.slots.allocate(99, [span(0, self.SLOTS)])
        assert len(self.pool.slots.runs(99)) == 1

    def cells(self) -> set[Cell]:
        """Slots that somebody has."""
        owned = [cell for cells in self.owned.values() for cell in cells.values()]
        return {*owned, *(cell for pin in self.pins for cell in pin.cells.values())}

    def written(self, layer: int, rid: int, positions: Iterable[int]) -> dict[int, float]:
        cells = {p: self.owned[rid][p] for p in positions}
        return {p: cell.value[layer] for p, cell in cells.items() if layer in cell.value}

    def forget(self, rid: int, positions: set[int]) -> None:
        self.shared[rid] -= positions
        for position in positions:
            del self.owned[rid][position]


TestAnySequence = PoolMachine.TestCase
TestAnySequence.settings = settings(max_examples=examples(100), stateful_step_count=30)


# --- several threads -------------------------------------------------------------------------


def lives(rng: random.Random, rids: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    for _ in range(20):
        yield next(rids), rng.randint(1, 40), rng.randint(1, 10)


def test_threads_never_see_each_others_tokens() -> None:
    pool, rids, errors = make_pool(256, layers=2), itertools.count(), list[BaseException]()

    def live(rid: int, prompt: int, answer: int) -> None:
        pool.slots.allocate(rid, [span(0, prompt), span(prompt, prompt + answer)])
        try:
            for layer in range(2):
                pool.write(layer, rid, span(0, prompt), *rows_of([float(rid)] * prompt))
            for position, layer in itertools.product(range(prompt, prompt + answer), range(2)):
                pool.write(layer, rid, span(position, position + 1), *rows_of([float(rid)]))
                expected = dict.fromkeys(range(position + 1), float(rid))
                assert contents(pool, layer, rid, range(position + 1)) == expected
        finally:
            assert pool.slots.free_request(rid) == prompt + answer

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
    pool.slots.check_integrity()
    assert pool.slots.free == pool.slots.capacity
