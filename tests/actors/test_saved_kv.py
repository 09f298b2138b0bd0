"""KV that survives its ranks: real gangs write it, and others with the same weights read it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang_driver import ANSWER_S, Prompt, Request, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, thread_cell
from greedy_reference import greedy_tokens
from rounded_reference import rounded_greedy
from torch import Tensor

from csps.actors.kv_cache.kv_files import KvFile, KvFiles
from csps.actors.worker import saved_kv
from csps.protocols.core.placement import KvSlice, Span, place, tokens_on, within, zigzag
from csps.protocols.gang.messages import (
    EvictKv,
    KvRestored,
    KvSaved,
    RestoreKv,
    Sampling,
    SavedPart,
    SavedRun,
    SaveKv,
)
from csps.protocols.rpc.schema import pack

GREEDY = Sampling(temperature=0, max_tokens=4)
LENGTH = 40
PLACED = place([0, 1], zigzag(LENGTH, 2))
HASHES = (b"one", b"two", b"three", b"four", b"five")
RUN = SavedRun(start=0, hashes=HASHES, slices=PLACED)
ALL = SavedPart(RUN.name, 0, LENGTH)
FIRST, RESTORED, NEXT = 1, 11, 12


async def compute(cell: ThreadCell) -> Prompt:
    """Compute a prompt on both prefill instances, which retain it as `PLACED`; return it."""
    prompt = prompt_of(LENGTH, 1)
    request = Request(
        sequence_id=FIRST,
        prompt=prompt,
        slices=even_slices(LENGTH, [0]),
        sampling=GREEDY,
        retain=True,
    )
    await cell.reserve(request)
    step = prefill_step([request.chunk(rows=PLACED)], [0, 1], strategy="ring_kv")
    await cell.prefilled(cell.submit(step, prompt))
    await cell.answer(request)
    return prompt


async def save(cell: ThreadCell, run: SavedRun = RUN) -> None:
    """Write what was computed, and wait until all ranks have."""
    cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=run)))
    await cell.until_received(cell.prefill.world_size, KvSaved, written=True)


async def restore(
    cell: ThreadCell, *parts: SavedPart, slices: tuple[KvSlice, ...] = PLACED
) -> list[int]:
    """Read from files; return how many tokens each rank has read."""
    message = RestoreKv(sequence_id=RESTORED, parts=parts or (ALL,), slices=slices)
    cell.prefill.notify_all("restore", pack(message))
    ranks = cell.prefill.world_size
    await cell.until_received(ranks, KvRestored, sequence_id=RESTORED)
    answers = sorted(cell.about(KvRestored), key=lambda answer: answer.rank)
    return [answer.tokens for answer in answers]


def kv_of(cell: ThreadCell, sequence_id: int, placed: tuple[KvSlice, ...]) -> list[Tensor]:
    """Return copies of all keys and values that the ranks have of a sequence."""
    return [
        tensor.clone()
        for rank in cell.prefill_gang.ranks
        for kv_slice in placed
        if kv_slice.instance == rank.engine.instance
        for layer in range(rank.engine.spec.layers)
        for tensor in rank.engine.pool.read(layer, sequence_id, kv_slice.span)
    ]


async def evict(cell: ThreadCell, *sequence_ids: int) -> None:
    """Free what is retained, and check that no slot is left."""
    for gang in (cell.prefill, cell.decode):
        for sequence_id in sequence_ids:
            await cell.retain_or_evict(gang, EvictKv(sequence_id=sequence_id))
    await cell.idle()


@pytest.mark.parametrize(("tp", "kv_dtype"), [(1, "auto"), (2, "auto"), (1, "int8")])
async def test_the_next_gang_answers_from_the_files_of_the_last(
    tiny_llama: Path, tmp_path: Path, tp: int, kv_dtype: str
) -> None:
    gangs: dict[str, Any] = {"prefill": 2, "decode": 1, "prefill_tp": tp, "kv_files": tmp_path}
    async with thread_cell(tiny_llama, **gangs, kv_dtype=kv_dtype) as cell:
        prompt = await compute(cell)
        before = kv_of(cell, FIRST, PLACED)
        await save(cell)
    async with thread_cell(tiny_llama, **gangs, kv_dtype=kv_dtype) as cell:
        cell.prefill.notify_all("list_saved")
        await cell.until_received(2 * tp, KvSaved, runs=(RUN,), written=False, listed=True)
        assert await restore(cell) == [LENGTH // 2] * 2 * tp
        after = kv_of(cell, RESTORED, PLACED)
        assert all(map(torch.equal, before, after))
        assert len(before) == len(after)

        text = np.concatenate([prompt, prompt_of(9, 7)])
        request = Request(
            sequence_id=NEXT, prompt=text, slices=even_slices(len(text), [0]), sampling=GREEDY
        )
        history = tuple(KvSlice.of(part.instance, part.span, RESTORED) for part in PLACED)
        await cell.reserve(request)
        step = prefill_step([request.chunk(LENGTH, history=history)], [0, 1])
        await cell.prefilled(cell.submit(step, text[LENGTH:]))
        reference = greedy_tokens if kv_dtype == "auto" else rounded_greedy
        assert await cell.answer(request) == [reference(tiny_llama, text.tolist(), 4)]
        await cell.freed(NEXT)
        await evict(cell, RESTORED)


async def test_the_longest_run_tells_how_fast_the_disk_is(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a small file takes longer than reading it."""
    short = SavedRun(start=24, hashes=HASHES[3:], slices=within(PLACED, Span(24, 40)))
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        await save(cell)
        cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=short)))
        await cell.until_received(2 + len(tokens_on(short.slices)), KvSaved, written=True)
        await evict(cell, FIRST)
    read, load = list[str](), KvFiles.load

    def loaded(files: KvFiles, run: str) -> KvFile:
        read.append(run)
        return load(files, run)

    monkeypatch.setattr(KvFiles, "load", loaded)
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        cell.prefill.notify_all("list_saved")
        await cell.until_received(2, KvSaved, listed=True)
        assert read == [RUN.name] * 2
        assert all(message.bytes_per_s > 1 for message in cell.about(KvSaved, listed=True))


async def test_files_of_another_form_of_kv_are_not_read(tiny_llama: Path, tmp_path: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        await save(cell)
    eight = thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path, kv_dtype="int8")
    async with eight as cell:
        assert await restore(cell) == [-1, -1]


async def test_some_of_a_run_can_be_read(tiny_llama: Path, tmp_path: Path) -> None:
    some = within(PLACED, Span(8, 24))
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        await save(cell)
        tokens = tokens_on(some)
        part = SavedPart(RUN.name, 8, 24)
        assert await restore(cell, part, slices=some) == [tokens[0], tokens[1]]
        assert all(map(torch.equal, kv_of(cell, FIRST, some), kv_of(cell, RESTORED, some)))
        await evict(cell, FIRST, RESTORED)


async def test_runs_follow_one_another(tiny_llama: Path, tmp_path: Path) -> None:
    cuts = (0, 16, 24, 40)
    runs = [
        SavedRun(start=a, hashes=(b"%d" % a,), slices=within(PLACED, Span(a, b)))
        for a, b in pairwise(cuts)
    ]
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        for number, run in enumerate(runs, start=1):
            cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=run)))
            held = sum(len(tokens_on(one.slices)) for one in runs[:number])
            await cell.until_received(held, KvSaved, written=True)
        parts = [SavedPart(run.name, run.start, run.stop) for run in runs]
        assert await restore(cell, *parts) == [LENGTH // 2] * 2
        assert all(map(torch.equal, kv_of(cell, FIRST, PLACED), kv_of(cell, RESTORED, PLACED)))
        await evict(cell, FIRST, RESTORED)


def damage(path: Path, harm: str) -> None:
    """Change or remove the file of rank 1."""
    (file,) = path.glob("*.1.*.kv")
    if harm == "changed":
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
    elif harm == "gone":
        file.unlink()


@pytest.mark.parametrize("harm", ["changed", "gone", "too few"])
async def test_what_cannot_be_read_is_said_and_its_slots_are_freed(
    tiny_llama: Path, tmp_path: Path, harm: str
) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        run = RUN
        if harm == "too few":
            run = SavedRun(start=0, hashes=HASHES[:4], slices=within(PLACED, Span(0, 32)))
        await save(cell, run)
        damage(tmp_path, harm)
        read = await restore(cell, SavedPart(run.name, 0, LENGTH))
        assert read == ([-1, LENGTH // 2] if harm == "too few" else [LENGTH // 2, -1])
        await evict(cell, FIRST, RESTORED)


async def test_what_is_gone_already_is_not_written(tiny_llama: Path, tmp_path: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        await compute(cell)
        await cell.retain_or_evict(cell.prefill, EvictKv(sequence_id=FIRST, start=5, stop=15))
        cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=RUN)))
        rest = SavedRun(start=15, hashes=HASHES[1:], slices=within(PLACED, Span(15, 40)))
        await save(cell, rest)
        assert {run for message in cell.about(KvSaved) for run in message.runs} == {rest}
        await evict(cell, FIRST)


class HeldFiles(KvFiles):
    """Files that nobody gets to read or write before they are let go."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.entered, self.let_go = threading.Event(), threading.Event()

    def _hold(self) -> None:
        self.entered.set()
        assert self.let_go.wait(ANSWER_S)

    def load(self, run: str):  # type: ignore[no-untyped-def]
        self._hold()
        return super().load(run)

    def save(self, *args, **more):  # type: ignore[no-untyped-def]
        self._hold()
        return super().save(*args, **more)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeldFiles]]:
    made: list[HeldFiles] = []

    def make(*args: object, **more: object) -> HeldFiles:
        made.append(HeldFiles(*args, **more))
        return made[-1]

    monkeypatch.setattr(saved_kv, "KvFiles", make)
    yield made
    for files in made:
        files.let_go.set()


async def test_slots_that_are_written_are_nobodys_until_then(
    tiny_llama: Path, tmp_path: Path, held: list[HeldFiles]
) -> None:
    """A step that needs them waits, and begins when they are free."""
    async with thread_cell(
        tiny_llama, prefill=2, decode=1, kv_slots=160, kv_files=tmp_path
    ) as cell:
        await compute(cell)
        cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=RUN)))
        await cell.prefill.stats()
        for files in held:
            assert files.entered.wait(ANSWER_S)
        await cell.retain_or_evict(cell.prefill, EvictKv(sequence_id=FIRST))
        used = [rank.engine.pool.slots.used for rank in cell.prefill_gang.ranks]
        assert used == [LENGTH // 2] * 2
        request = Request(
            sequence_id=NEXT,
            prompt=prompt_of(150, 5),
            slices=even_slices(150, [0]),
            sampling=GREEDY,
        )
        cell.submit(prefill_step([request.chunk()], [0]), request.prompt)
        await cell.prefill.stats()
        assert cell.prefill_gang.ranks[0].loop.waiting == 1
        for files in held:
            files.let_go.set()
        await cell.until_received(2, KvSaved, written=True)
        await cell.until(lambda: cell.tokens(NEXT))
        cell.cancel(NEXT)
        await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=FIRST))
        await cell.idle()


async def test_a_router_that_leaves_takes_no_slots_that_are_being_read(
    tiny_llama: Path, tmp_path: Path, held: list[HeldFiles]
) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_files=tmp_path) as cell:
        message = RestoreKv(sequence_id=RESTORED, parts=(ALL,), slices=PLACED)
        cell.prefill.notify_all("restore", pack(message))
        await cell.prefill.stats()
        for files in held:
            assert files.entered.wait(ANSWER_S)
        await cell.disconnect()
        slots = [rank.engine.pool.slots for rank in cell.prefill_gang.ranks]
        assert [one.used for one in slots] == [LENGTH // 2] * 2
        for files in held:
            files.let_go.set()
        await cell.idle()


async def test_a_slow_disk_takes_half_of_the_slots_at_most(
    tiny_llama: Path, tmp_path: Path, held: list[HeldFiles]
) -> None:
    """Of three runs of 20 tokens on each rank, two fit into half of 80 slots."""
    async with thread_cell(tiny_llama, prefill=2, decode=1, kv_slots=80, kv_files=tmp_path) as cell:
        await compute(cell)
        for _ in range(3):
            cell.prefill.notify_all("save", pack(SaveKv(sequence_id=FIRST, run=RUN)))
        await cell.prefill.stats()  # answered when those before it were taken
        for files in held:
            assert files.entered.wait(ANSWER_S)
            files.let_go.set()
        await cell.until_received(4, KvSaved, written=True)
        await evict(cell, FIRST)
        assert len(cell.about(KvSaved, written=True)) == 4
