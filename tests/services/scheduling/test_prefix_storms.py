"""Retained KV: random conversations, evictions, cancels and deaths, over ranks that know of every
position that they hold and of everyone who reads it."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import pytest
from arbitrary_layout_policy import AnyLayout, lay
from random_executor import RandomCell, SentSequence, gang_up

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.placement import KvSlice, own
from csps.protocols.gang.messages import EvictKv, RestoreKv, RetainKv, SavedRun, SaveKv
from csps.services.scheduling.core import restores
from csps.services.scheduling.core.restores import Restores
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.step_layout import slots_of
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import InstanceId, gang_of, instance_id
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state import saved_runs
from csps.services.scheduling.state.saved_runs import Restorable
from csps.services.scheduling.state.state import Gang, Request

BLOCK = 32


Place = tuple[int, int]
"""A gang, and a sequence that has left KV there."""


class RetainingCell(RandomCell):
    """Gangs that retain KV under the names of those that have computed or reused it."""

    PROMPTS = (1, 31, 90, 100, 300, 400, 640)

    KV_PERMILLE = 250

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int,
        *,
        faults: float,
        elastic: bool,
        tenants: int = 0,
        window: int = 0,
    ) -> None:
        super().__init__(
            scheduler, seed, faults=faults, elastic=elastic, tenants=tenants, window=window
        )
        self._elastic = elastic
        self._blocks = itertools.count()
        self._conversations: list[list[bytes]] = [[]]
        self._of_request: dict[int, tuple[bytes, ...]] = {}
        self.stored: dict[Place, dict[int, InstanceId]] = {}
        """Where that is stored which a sequence has computed."""
        self.shared: dict[Place, dict[int, tuple[InstanceId, int]]] = {}
        """Where that is stored which a retained sequence has reused, and who has computed it."""
        self.taken_over = 0
        self.retain: set[Place] = set()
        self._orders: dict[int, deque[RetainKv | EvictKv]] = {}
        """Commands that each gang has not executed."""
        self.reused = self.held = 0

    # --- conversations ---

    def _hashes(self, number: int) -> tuple[bytes, ...]:
        """Some of what was said before, and something new; one in four is nobody's to share."""
        if self.random.random() < 0.25:
            return ()
        blocks = self.requests[number].prompt // BLOCK
        before = self.random.choice(self._conversations)
        before = before[: self.random.randint(0, len(before))] if blocks else []
        said = [*before, *(str(next(self._blocks)).encode() for _ in range(blocks))][:blocks]
        self._of_request[number] = tuple(said)
        self._conversations.append(said)
        return tuple(said)

    def _answer_hashes(self, number: int) -> tuple[bytes, ...]:
        sequence = self.sequences[number]
        request = self.requests[sequence.reserve.request_id]
        said = self._of_request.get(sequence.reserve.request_id, ())
        blocks = (request.prompt + request.generated - 1) // BLOCK - len(said)
        answer = tuple(str(next(self._blocks)).encode() for _ in range(max(0, blocks)))
        if not said:
            return ()
        self._conversations.append([*said, *answer])
        self._of_request[-number] = (*said, *answer)
        return answer

    def _said(self, sequence: int) -> tuple[bytes, ...]:
        """What a sequence has hashes of, its answer included."""
        request = self.sequences[sequence].reserve.request_id
        return self._of_request.get(-sequence, self._of_request.get(request, ()))

    # --- what ranks do ---

    def _reserve(self, command: cmd.Reserve) -> None:
        super()._reserve(command)
        here = sum(kv_slice.tokens for kv_slice in command.message.slices if kv_slice.source)
        self._check_reused(command.message.sequence_id, command.message.slices, here)
        if self._elastic or command.piggybacked:
            assert here == command.cached, "reused, but not named"
        else:
            self.held += here
        self.reused += command.cached

    def _run_step(self, command: cmd.RunStep) -> None:
        super()._run_step(command)
        for chunk in command.step.chunks:
            history = chunk.history
            reserve = self.sequences[chunk.sequence_id].reserve
            place = gang_of(command.step.group[0]), chunk.sequence_id
            stored = self.stored.setdefault(place, {})
            self._check_reused(chunk.sequence_id, history, reserve.cached)
            named = {
                p: kv_slice.instance for kv_slice in own(history) for p in kv_slice.span.positions
            }
            assert named == stored, "history is not where it was left"
            assert chunk.start == reserve.cached + len(stored), "chunks follow one upon another"
            lay(stored, chunk, command.step, reserve.message if self._elastic else None)
            if chunk.retain:
                self.retain.add(place)
                self._share(place, history)

    def _share(self, place: Place, slices: tuple[KvSlice, ...], start: int = 0) -> None:
        """A sequence retains what it has reused; nobody has to have it under another name."""
        self.shared[place] = {
            p: (kv_slice.instance, self._origin((place[0], kv_slice.source), p))
            for kv_slice in slices
            if kv_slice.source
            for p in kv_slice.span.positions
            if p >= start
        }

    def _origin(self, place: Place, position: int) -> int:
        """Who has computed what a sequence has at a position."""
        shared = self.shared.get(place, {})
        return shared[position][1] if position in shared else place[1]

    def _left(self, place: Place) -> dict[int, InstanceId]:
        """Where that is stored which has a sequence's name."""
        shared = {p: instance for p, (instance, _) in self.shared.get(place, {}).items()}
        return shared | self.stored.get(place, {})

    def _check_reused(self, number: int, slices: tuple[KvSlice, ...], cached: int) -> None:
        """What others have computed is stored there, is the beginning of this prompt, and nothing
        else."""
        named = [kv_slice for kv_slice in slices if kv_slice.source]
        positions = sorted(p for kv_slice in named for p in kv_slice.span.positions)
        if named:
            assert positions == list(range(cached)), "not the prompt's beginning"
        for kv_slice in named:
            assert gang_of(kv_slice.instance) in self.gangs, "on a dead gang"
            stored = self._left((gang_of(kv_slice.instance), kv_slice.source))
            for p in kv_slice.span.positions:
                assert stored.get(p) == kv_slice.instance, "reused, but not there"
            blocks = -(-kv_slice.stop // BLOCK)
            assert self._said(kv_slice.source)[:blocks] == self._said(number)[:blocks], "other text"

    def _cancel(self, command: cmd.Cancel) -> None:
        super()._cancel(command)
        sequence = self.sequences[command.sequence_id]
        if sequence.prefill in command.gangs and not self._elastic:
            place = sequence.prefill, command.sequence_id
            self.retain.discard(place)
            if not sequence.steps:
                gone = self.stored.pop(place, {})
                self.shared.pop(place, None)
                self._check_unread(place, range(max(gone, default=-1) + 1))

    def _step_done(self) -> None:
        numbers = {chunk.sequence_id for step, _ in self.steps.values() for chunk in step.chunks}
        super()._step_done()
        for number in numbers:
            sequence = self.sequences[number]
            place = sequence.prefill, number
            if not sequence.steps and not self._elastic and place not in self.retain:
                self.stored.pop(place, None)
                self.shared.pop(place, None)

    def _retain_or_evict(self, gang: int, message: RetainKv | EvictKv) -> None:
        if isinstance(message, RetainKv):
            self._retain(gang, message)
        self._orders.setdefault(gang, deque()).append(message)

    def _retain(self, gang: int, message: RetainKv) -> None:
        sequence = self.sequences[message.sequence_id]
        reserve, request = sequence.reserve, self.requests[sequence.reserve.request_id]
        assert reserve.message.retain, "retained, but it was not to stay"
        assert not sequence.freeing, "retained, but it was cancelled"
        generated = request.generated - (request.output - reserve.message.output_tokens)
        computed = reserve.message.prompt_tokens + max(generated - 1, 0)
        reused = sum(kv_slice.tokens for kv_slice in reserve.message.slices if kv_slice.source)
        if message.stop > message.start:
            assert max(reused, message.start) < message.stop <= computed, "retained, not computed"
            self.taken_over += max(0, reused - message.start)
        answer = reserve.message.answer or (
            KvSlice(
                reserve.message.master,
                reserve.message.prompt_tokens,
                reserve.message.prompt_tokens + generated,
            ),
        )
        assert not sequence.unreceived or self._elastic, "retained, but not there"
        if message.stop > message.start:
            self._share((gang, message.sequence_id), reserve.message.slices, message.start)
        self.stored[gang, message.sequence_id] = {
            p: kv_slice.instance
            for kv_slice in (*own(reserve.message.slices), *answer)
            for p in kv_slice.span.positions
            if message.start <= p < message.stop
        }
        sequence.silent = True

    def _progress_only(self) -> None:
        if any(self._orders.values()) and self.random.random() < 0.4:
            self._execute()
        else:
            super()._progress_only()

    def _execute(self) -> None:
        """A gang does the next thing that it was told. Its instances say what they have left."""
        gang = self.random.choice([gang for gang, orders in self._orders.items() if orders])
        order = self._orders[gang].popleft()
        place = gang, order.sequence_id
        if isinstance(order, EvictKv):
            gone = range(order.start, order.stop)
            self._check_unread(place, gone)
            for known in (self.stored.setdefault(place, {}), self.shared.get(place, {})):
                for p in [at for at in known if at in gone]:
                    del known[p]
        else:
            self.sequences[order.sequence_id].unfreed = []
            self.retain.add((gang, order.sequence_id))
        left = Counter(self._left(place).values())
        for index in range(len(self.gangs[gang].instances)):
            instance = instance_id(gang, index)
            self._pending.append(
                ev.Retained(sequence_id=order.sequence_id, instance=instance, tokens=left[instance])
            )

    def _check_unread(self, place: Place, gone: range) -> None:
        reading = [chunk.history for step, _ in self.steps.values() for chunk in step.chunks]
        reading += [
            sequence.reserve.message.slices
            for sequence in self.sequences.values()
            if sequence.unfreed
        ]
        for kv_slice in (kv_slice for slices in reading for kv_slice in slices):
            if (gang_of(kv_slice.instance), kv_slice.source) == place:
                assert not set(kv_slice.span.positions) & set(gone), "released while it is read"

    def _gang_dies(self, gang: int | None = None) -> None:
        before = set(self.gangs)
        super()._gang_dies(gang)
        for dead in before - set(self.gangs):
            self._orders.pop(dead, None)
            for place in [where for where in self.stored if where[0] == dead]:
                del self.stored[place]
            for place in [where for where in self.shared if where[0] == dead]:
                del self.shared[place]

    @property
    def over(self) -> bool:
        return super().over and not any(self._orders.values())

    def _check_slots(self) -> None:
        used: Counter[int] = Counter()
        for sequence in self.sequences.values():
            used.update({instance: sequence.slots[instance] for instance in sequence.unfreed})
        # A slot with several names is one.
        slots = {
            (place[0], self._origin(place, p), p): instance
            for place in sorted(self.retain)
            for p, instance in self._left(place).items()
        }
        used.update(slots.values())
        for step, undone in self.steps.values():
            if not (self._elastic or any(chunk.retain for chunk in step.chunks)):
                sizes = slots_of(step, [chunk.history for chunk in step.chunks])
                used.update({instance: sizes.get(instance, 0) for instance in undone})
        for gang in self.gangs.values():
            for index, instance in enumerate(gang.instances):
                count = used[instance_id(gang.gang, index)]
                assert count <= instance.kv_slots, f"{count} of {instance.kv_slots} slots"
        self._check_windows()


class FilingCell(RetainingCell):
    """Gangs whose ranks have files, which survive them: some are written late or never, and some
    cannot be read."""

    PROMPTS = (90, 300, 400, 640, 640, 640)
    LIKE_COMPUTING = 8_000_000
    """Bytes a second of a disk from which a prompt comes about when it would be computed."""

    def __init__(self, scheduler: Scheduler, seed: int, *, faults: float, elastic: bool) -> None:
        super().__init__(scheduler, seed, faults=faults, elastic=elastic)
        self._carry_out[cmd.ToFiles] = self._to_files  # type: ignore[index]
        self._files: dict[tuple[tuple[bool, int], SavedRun], tuple[bytes, ...]] = {}
        """Whole texts up to the ends of runs, by whether their gang prefills and its size."""
        self._read: dict[int, tuple[bytes, ...]] = {}
        """Texts that were read, by the sequence that has them."""
        self._reading: dict[Place, list[ev.Restored]] = {}
        """Answers that gangs still owe."""
        self._answered: dict[Place, list[ev.Restored]] = {}
        self._unread: set[int] = set()
        """Sequences with slots in which is nothing, or not everything."""
        self._bytes_per_s = self.random.choice((10**9, self.LIKE_COMPUTING))
        self.restored = self.failed = self.fronts = 0

    def _said(self, sequence: int) -> tuple[bytes, ...]:
        return self._read[sequence] if sequence in self._read else super()._said(sequence)

    def _bring_up(self) -> None:
        prefill = not any(gang.may_prefill for gang in self.gangs.values())
        self._gang_number += 1
        sizes = (800, 1200, 4000) if prefill else (700, 5000)
        slots = [self.random.choice(sizes) for _ in range(self.random.choice((1, 2, 2)))]
        up = gang_up(
            self._gang_number,
            slots,
            prefill=prefill,
            decode=self._elastic or not prefill,
            kv_bytes_per_token=self.KV_BYTES,
        )
        self.gangs[up.gang] = up
        runs = tuple(run for kind, run in self._files if kind == (prefill, len(slots)))
        self._pending += [
            up,
            *(
                ev.Saved(
                    instance=instance_id(up.gang, index),
                    runs=runs,
                    bytes_per_s=self._bytes_per_s,
                    listed=self.random.random() < 0.9,
                )
                for index in range(len(slots))
            ),
        ]

    def _reserve(self, command: cmd.Reserve) -> None:
        request, reserved = self.requests[command.request_id], command.message
        if reserved.prompt_tokens == request.prompt + request.generated:
            super()._reserve(command)
            return
        assert not request.ended, "a front of a request that is over"
        assert request.sequence is None, "a front of a request that has started"
        assert not reserved.slices, "a front that is decoded"
        self.sequences[reserved.sequence_id] = SentSequence(reserve=command, front=True)
        self.fronts += 1

    def _run_step(self, command: cmd.RunStep) -> None:
        super()._run_step(command)
        for chunk in command.step.chunks:
            if self.sequences[chunk.sequence_id].front:
                assert chunk.retain, "computed for nobody"
                assert not chunk.last, "a front is sampled"
                assert not chunk.destinations, "a front is sent"

    def _to_files(self, command: cmd.ToFiles) -> None:
        assert command.gang in self.gangs, "a message to a dead gang"
        if isinstance(command.message, SaveKv):
            self._save(command.gang, command.message)
        else:
            self._restore(command.gang, command.message)

    def _kind(self, gang: int) -> tuple[bool, int]:
        up = self.gangs[gang]
        return up.may_prefill, len(up.instances)

    def _placed(self, gang: int, slices: tuple[KvSlice, ...]) -> dict[int, InstanceId]:
        return {p: instance_id(gang, part.instance) for part in slices for p in part.span.positions}

    def _save(self, gang: int, message: SaveKv) -> None:
        place, run = (gang, message.sequence_id), message.run
        left = self._left(place)
        for position, instance in self._placed(gang, run.slices).items():
            assert left[position] == instance, "written, but not there"
        text = self._said(message.sequence_id)[: run.stop // BLOCK]
        assert run.hashes == text[run.start // BLOCK :], "other text"
        if self.random.random() < 0.8:
            size = len(self.gangs[gang].instances)
            self._files[self._kind(gang), run] = text
            self._pending += [
                ev.Saved(
                    instance=instance_id(gang, index), runs=(run,), bytes_per_s=self._bytes_per_s
                )
                for index in range(size)
            ]

    def _restore(self, gang: int, message: RestoreKv) -> None:
        size, place = len(self.gangs[gang].instances), (gang, message.sequence_id)
        runs = {
            run.name: (run, text)
            for (kind, run), text in self._files.items()
            if kind == self._kind(gang)
        }
        wanted, there = self._placed(gang, message.slices), dict[int, InstanceId]()
        text: tuple[bytes, ...] = ()
        for part in message.parts:
            run, before = runs[part.name]
            here = self._placed(gang, run.slices)
            there |= {p: here[p] for p in range(part.start, part.stop)}
            assert before[: len(text)] == text, "other text"
            text = before[: part.stop // BLOCK]
        assert wanted == there, "not what these files have"
        assert sorted(wanted) == list(range(min(wanted), max(wanted) + 1)), "a gap"
        assert sum(part.tokens for part in message.slices) == len(wanted), "twice"
        self._read[message.sequence_id] = text
        self.stored[place] = wanted
        self.retain.add(place)
        self._unread.add(message.sequence_id)
        tokens = Counter(wanted.values())
        fails = self.random.randrange(size) if self.random.random() < 0.3 else None
        self._reading[place] = [
            ev.Restored(
                sequence_id=message.sequence_id,
                instance=instance_id(gang, index),
                tokens=-1 if index == fails else tokens[instance_id(gang, index)],
            )
            for index in range(size)
        ]
        self.failed += fails is not None
        self.restored += fails is None

    def _check_reused(self, number: int, slices: tuple[KvSlice, ...], cached: int) -> None:
        super()._check_reused(number, slices, cached)
        sources = {kv_slice.source for kv_slice in slices}
        assert not sources & self._unread, "reused, but not read yet, or not all of it"

    def _progress_only(self) -> None:
        if self._reading and self.random.random() < 0.4:
            place = self.random.choice(list(self._reading))
            answers = self._reading[place]
            self._pending.append(answers.pop(self.random.randrange(len(answers))))
            self._answered.setdefault(place, []).append(self._pending[-1])
            if not answers:
                del self._reading[place]
                if all(answer.tokens >= 0 for answer in self._answered.pop(place)):
                    self._unread.discard(place[1])
        else:
            super()._progress_only()

    def _gang_dies(self, gang: int | None = None) -> None:
        super()._gang_dies(gang)
        for place in [place for place in self._reading if place[0] not in self.gangs]:
            del self._reading[place]

    @property
    def over(self) -> bool:
        return super().over and not self._reading


CELLS = [
    ("any_layout", "pair"),
    ("any_layout", "elastic"),
    ("chunked_prefill", "elastic"),
    ("chunked_prefill", "pair"),
    ("context_parallel", "elastic"),
    ("context_parallel", "pair"),
    ("csps", "pair"),
    ("fixed_sp", "pair"),
    ("loongserve", "elastic"),
    ("tetris", "pair"),
]
OPTIONS = {
    "chunked_prefill": {"token_budget": 256, "spread_tokens": 200, "max_batch": 6},
    "context_parallel": {"short_tokens": 100, "max_batch": 6},
    "csps": {"spt_tokens": 200, "short_tokens": 100, "spread_tokens": 200, "max_batch": 6},
    "fixed_sp": {"sp": 2, "spread_tokens": 200, "max_batch": 6},
    "loongserve": {"decode_iterations": 2, "max_batch": 6},
    "tetris": {"improvement_rate": 0.05, "min_chunk": 1, "spread_tokens": 200, "max_batch": 6},
}


def storm(seed: int, *, tenants: int = 0, window: int = 0) -> tuple[str, int, int, int]:
    """Returns whose, how many tokens nobody computed again, how many were not sent again, and how
    many got the name of a later turn."""
    name, gangs = CELLS[seed % len(CELLS)]
    options = dict(OPTIONS.get(name, {}))
    if gangs == "pair" and name in ("csps", "context_parallel") and not window:
        options["prefill_tokens_max"] = (0, 60, 300)[seed // len(CELLS) % 3]
    policy = AnyLayout(seed, block=BLOCK) if name == "any_layout" else make_policy(name, options)
    scheduler = Scheduler(
        policy,  # type: ignore[arg-type]
        Costs(CostTable(latencies=Unmeasured())),
        limits=QueueLimits(max_waiting=8, max_waiting_tokens=30_000),
        reuse=ReuseSettings(
            enabled=True, max_share=(0.5, 1.0)[seed // len(CELLS) % 2], block_tokens=BLOCK
        ),
    )
    faults = (0.0, 0.05, 0.2)[seed // len(CELLS) % 3]
    elastic = gangs == "elastic"
    cell = RetainingCell(
        scheduler, seed, faults=faults, elastic=elastic, tenants=tenants, window=window
    )
    cell.play(requests=40, turns=160)
    assert not any(scheduler.counts)
    return f"{name} {gangs}", cell.reused, cell.held, cell.taken_over


@pytest.mark.parametrize("cells", range(6))
def test_what_is_retained_is_there_and_what_is_read_stays(cells: int) -> None:
    """Run each policy once."""
    found = [storm(seed) for seed in range(cells * len(CELLS), (cells + 1) * len(CELLS))]
    assert any(reused for _, reused, _, _ in found)


IN_STEPS = [
    at
    for at, (name, gangs) in enumerate(CELLS)
    if gangs == "pair" and name not in ("any_layout", "chunked_prefill")
]


@pytest.mark.parametrize("window", [40, 500])
@pytest.mark.parametrize("cell", IN_STEPS)
def test_slots_in_layers_with_a_window_are_not_retained(cell: int, window: int) -> None:
    """A sequence has them until its ranks have executed that it is retained."""
    found = [storm(seed, window=window) for seed in range(cell, 6 * len(CELLS), len(CELLS))]
    assert any(held for _, _, held, _ in found), "the decode gang reuses the KV of other layers"


@pytest.mark.parametrize("cells", range(3))
def test_tenants_keep_to_their_share_of_cached_kv(cells: int) -> None:
    """`check_invariants` compares what each keeps with its share, after every round."""
    seeds = range(cells * len(CELLS), (cells + 1) * len(CELLS))
    assert any(reused for _, reused, _, _ in (storm(seed, tenants=3) for seed in seeds))


def file_storm(seed: int) -> FilingCell:
    """Play one cell whose gangs have files."""
    (name, gangs), round_ = CELLS[seed % len(CELLS)], seed // len(CELLS)
    options = dict(OPTIONS.get(name, {}))
    rest = (0, 300)[round_ % 2] if gangs == "pair" and name in ("csps", "context_parallel") else 0
    if rest:
        options["prefill_tokens_max"] = rest
    policy = AnyLayout(seed, block=BLOCK) if name == "any_layout" else make_policy(name, options)
    scheduler = Scheduler(
        policy,  # type: ignore[arg-type]
        Costs(CostTable(latencies=Unmeasured())),
        limits=QueueLimits(max_waiting=8, max_waiting_tokens=30_000),
        reuse=ReuseSettings(
            enabled=True,
            max_share=(0.5, 1.0)[round_ % 2],
            block_tokens=BLOCK,
            files_bytes=10**8,
            decode_rest_tokens=rest,
        ),
    )
    elastic = gangs == "elastic"
    cell = FilingCell(scheduler, seed, faults=(0.05, 0.1, 0.2)[round_ % 3], elastic=elastic)
    cell.play(requests=40, turns=160)
    assert not any(scheduler.counts)
    return cell


def file_storms(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Play cells; return how many restores were good, how many failed, and how many fronts there
    were."""
    monkeypatch.setattr(restores, "OVERHEAD_NS", 0)
    restored = failed = fronts = 0
    for seed in seeds:
        monkeypatch.setattr(saved_runs, "RUN_BLOCKS", 1 + seed % 5)
        cell = file_storm(seed)
        restored, failed = restored + cell.restored, failed + cell.failed
        fronts += cell.fronts
    return restored, failed, fronts


@pytest.mark.parametrize("cells", range(2))
def test_what_is_read_from_files_is_what_was_written(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(file_storms(range(cells * 20, cells * 20 + 20), monkeypatch)[:2])


def wherever_possible(monkeypatch: pytest.MonkeyPatch, *, patient: bool = True) -> None:
    """Have fronts computed on busy gangs, too, and end them at whichever part.

    Args:
        patient: wait for both ends, however long that takes.
    """

    def part_of(
        self: Restores,
        request: Request,
        gang: Gang,
        found: Restorable,
        _computing_ns: int,
        *,
        first: bool,
    ) -> int | None:
        if not self._prefix.may_cache(gang, found.slices):
            return None
        parts = [
            number
            for number, part in enumerate(found.parts)
            if number and self._requests.may_be_front(request, part.start)
        ]
        if not parts or not self._may_split(request, gang):
            return 0
        return parts[request.id % len(parts)]

    monkeypatch.setattr(FilingCell, "PROMPTS", (90, 640, 1200, 1200))
    if patient:
        monkeypatch.setattr(Restores, "_computing_ns", lambda *_: 10**10)
    monkeypatch.setattr(Restores, "_first_part", part_of)


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("cells", [3, 4])
def test_what_is_read_follows_fronts_that_were_computed_meanwhile(
    cells: int, monkeypatch: pytest.MonkeyPatch, *, patient: bool
) -> None:
    wherever_possible(monkeypatch, patient=patient)
    assert all(file_storms(range(cells * 20, cells * 20 + 20), monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("hundred", range(10))
def test_what_is_read_follows_fronts_in_a_thousand_storms(
    hundred: int, monkeypatch: pytest.MonkeyPatch, *, patient: bool
) -> None:
    wherever_possible(monkeypatch, patient=patient)
    assert all(file_storms(range(hundred * 100, hundred * 100 + 100), monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_what_is_read_from_files_is_what_was_written_in_a_thousand_storms(
    hundred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(file_storms(range(hundred * 100, hundred * 100 + 100), monkeypatch)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_what_is_retained_is_there_in_two_thousand_storms(hundred: int) -> None:
    reused: Counter[str] = Counter()
    held: Counter[str] = Counter()
    renamed = 0
    for seed in range(hundred * 100, hundred * 100 + 100):
        whose, tokens, there, taken_over = storm(seed)
        reused[whose] += tokens
        held[whose] += there
        renamed += taken_over
    never = [whose for whose, tokens in reused.items() if not tokens]
    assert all(whose.startswith("any_layout") for whose in never), reused  # it does as it likes
    assert sum(held.values()), "everything is sent again"
    assert renamed, "no turn takes over those before it"
