"""A rank's part of the KV that survives it: retained KV goes to files, and files back into slots.

Each direction has a thread of its own, so that reading never waits for writing. The RPC thread pins
what is to be written, before the log may evict it, and allocates the slots to read into. If too
much is pinned, a run is not written: what waits for a slow disk must not take slots from prompts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import torch

from csps.actors.attention.base.engine import Engine
from csps.actors.engine.loop import EngineLoop
from csps.actors.engine.step_reports import ProgressReport
from csps.actors.kv_cache.kv_files import KvFiles, UnusableFile
from csps.actors.kv_cache.slot_allocator import OutOfSlots, PinnedSpan
from csps.actors.timing.device_pace import wait_for_device
from csps.actors.worker.rank_config import RankConfig
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import (
    KvRestored,
    KvSaved,
    Notify,
    RestoreKv,
    SavedRun,
    SaveKv,
)

_log = logging.getLogger(__name__)

PINNED_SHARE = 2
"""One in so many slots may wait to be written."""
SPEED_BYTES = 2**20
"""Least bytes that say how fast a disk is: to open a small file takes longer than to read it."""
RUNS_AT_ONCE = 256
"""Runs in one notification: a few hundred kilobytes."""

Job = Callable[[], None]


def open_files(config: RankConfig, engine: Engine, fingerprint: str) -> KvFiles | None:
    """Return the files of a rank; None if its KV is not to survive it.

    Raises:
        ConfigError: their folder cannot be made.
    """
    if config.kv_files_path is None:
        return None
    pool = engine.pool
    identity = (
        *(config.release, fingerprint, config.role, config.dtype, config.world_size, config.tp),
        *(engine.spec.layers, pool.kv_heads, pool.head_dim),
    )
    layout = blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    path = Path(config.kv_files_path)
    try:
        return KvFiles(path, config.kv_files_bytes, layout=layout, rank=config.rank)
    except OSError as error:
        raise ConfigError(f"kv_reuse.files.path: {path}: {error.strerror}") from None


class SavedKv:
    """Writes and reads the files of one rank. Its methods are called from the RPC thread."""

    def __init__(self, files: KvFiles, engine: Engine, loop: EngineLoop, notify: Notify) -> None:
        self._files, self._engine, self._loop, self._notify = files, engine, loop, notify
        self._pool = engine.pool
        self._pinned, self._lock = 0, threading.Lock()
        self._bytes_per_s = 0
        self._has_read = False
        self._writing: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reading: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv-writer", self._writing), ("kv-reader", self._reading))
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Let the threads end, once they have done what they are doing."""
        for jobs in (self._writing, self._reading):
            jobs.put(None)

    def list_saved(self) -> None:
        """Send all runs of which this rank has its part."""
        self._reading.put(self._list)

    def save(self, message: SaveKv) -> None:
        """Write this rank's part of a run, unless it has none or it is gone."""
        spans = self._own(message.run.slices)
        tokens = sum(span.length for span in spans)
        with self._lock:
            if not spans or self._pinned + tokens > self._pool.slots.capacity // PINNED_SHARE:
                return
            pinned = self._pool.slots.pin_held(message.sequence_id, spans)
            if pinned is None:
                return
            self._pinned += tokens
        self._writing.put(lambda: self._write(message, pinned))

    def restore(self, message: RestoreKv) -> None:
        """Read runs into slots of their own."""
        spans = self._own(message.slices)
        try:
            if spans:
                self._loop.adopt(message.sequence_id, spans)
        except OutOfSlots as error:
            _log.info("nothing restored for sequence %d: %s", message.sequence_id, error)
            self._restored(message, -1)
            return
        # If the router leaves, nobody else may have the slots before they are read into.
        pinned = self._pool.slots.pin_held(message.sequence_id, spans)
        assert pinned is not None, "slots are gone that were just allocated"
        self._reading.put(lambda: self._read(message, pinned))

    def _own(self, slices: tuple[KvSlice, ...]) -> list[Span]:
        here = self._engine.instance
        return [kv_slice.span for kv_slice in slices if kv_slice.instance == here]

    # --- the threads -----------------------------------------------------------------------

    def _list(self) -> None:
        try:
            runs = list(self._files.runs())
            if runs and not self._bytes_per_s:
                self._measure(max(runs, key=lambda run: run.stop - run.start))
        except OSError as error:
            _log.warning("saved KV cannot be listed: %s", error)
            runs = []
        for at in range(0, max(1, len(runs)), RUNS_AT_ONCE):
            some = tuple(runs[at : at + RUNS_AT_ONCE])
            self._report(some, written=False, listed=at + RUNS_AT_ONCE >= len(runs))

    def _measure(self, run: SavedRun) -> None:
        """Measure how fast this disk is read."""
        began = time.monotonic()
        try:
            size = self._files.load(run.name).bytes
        except UnusableFile as error:
            _log.warning("saved KV cannot be read: %s", error)
        else:
            self._note_speed(size, time.monotonic() - began)

    def _note_speed(self, size: int, seconds: float) -> None:
        if size >= SPEED_BYTES or not self._bytes_per_s:
            self._bytes_per_s = max(1, int(size / max(seconds, 1e-6)))

    def _report(self, runs: tuple[SavedRun, ...], *, written: bool, listed: bool = False) -> None:
        saved = KvSaved(
            rank=self._engine.rank,
            runs=runs,
            bytes_per_s=self._bytes_per_s,
            written=written,
            listed=listed,
        )
        self._notify("saved", saved)

    def _write(self, message: SaveKv, pinned: tuple[PinnedSpan, ...]) -> None:
        began, written = time.monotonic(), 0
        tokens = sum(span.length for span, _ in pinned)
        try:
            written = self._files.save(
                message.run,
                self._body(pinned),
                tokens * self._token_bytes,
                owner=message.owner,
                permille=message.permille,
            )
        except OSError as error:
            _log.warning("KV of sequence %d was not saved: %s", message.sequence_id, error)
        finally:
            for span in pinned:
                self._pool.slots.unpin(span)
            with self._lock:
                self._pinned -= tokens
            self._loop.slots_freed()
        if not written:
            return
        if not self._has_read:
            self._note_speed(written, time.monotonic() - began)
        self._report((message.run,), written=True)

    @property
    def _token_bytes(self) -> int:
        return len(self._pool.k) * self._pool.layer_bytes

    def _body(self, pinned: tuple[PinnedSpan, ...]) -> Iterator[memoryview]:
        """Yield keys and values, layer by layer, span by span."""
        for layer in range(len(self._pool.k)):
            for span in pinned:
                for tensor in self._pool.read_pinned(layer, span, span.span):
                    own = tensor.contiguous().cpu().view(torch.uint8)
                    yield own.numpy().data.cast("B")

    def _read(self, message: RestoreKv, pinned: tuple[PinnedSpan, ...]) -> None:
        began, read, tokens = time.monotonic(), 0, -1
        progress = ProgressReport(self._notify, rank=self._engine.rank)
        try:
            stored = 0
            for part in message.parts:
                wanted = Span(part.start, part.stop)
                if not any(span.intersection(wanted).length for span, _ in pinned):
                    continue  # all of it is others'
                found = self._files.load(part.name)
                stored += self._store_run(found.run, found.body, wanted, pinned)
                read += found.bytes
                progress.step()
            wait_for_device(self._engine.device)
            if stored != sum(span.length for span, _ in pinned):
                raise UnusableFile(f"{stored} tokens are in the files, not all that are wanted")
            tokens = stored
        except (UnusableFile, OSError) as error:
            _log.warning("KV for sequence %d was not restored: %s", message.sequence_id, error)
        finally:
            for span in pinned:
                self._pool.slots.unpin(span)
            self._loop.slots_freed()
            seconds = time.monotonic() - began
            if read:
                self._has_read = True
                self._note_speed(read, seconds)
            self._restored(message, tokens, seconds)

    def _restored(self, message: RestoreKv, tokens: int, seconds: float = 0.0) -> None:
        restored = KvRestored(
            sequence_id=message.sequence_id,
            rank=self._engine.rank,
            tokens=tokens,
            seconds=seconds,
        )
        self._notify("restored", restored)

    def _store_run(
        self, run: SavedRun, content: memoryview, wanted: Span, pinned: tuple[PinnedSpan, ...]
    ) -> int:
        """Store what is wanted of a file's content in pinned slots; return how many tokens."""
        spans, pool, at = self._own(run.slices), self._pool, 0
        if len(content) != sum(span.length for span in spans) * self._token_bytes:
            raise UnusableFile(f"run {run.name} has {len(content)} bytes, not those of its tokens")
        body = torch.frombuffer(content, dtype=torch.uint8).view(pool.k.dtype)
        stored = [
            (target, span, common)
            for span in spans
            for target in pinned
            if (common := target.span.intersection(span).intersection(wanted)).length
        ]
        offsets: dict[Span, int] = {}
        for span in spans:
            offsets[span] = at
            at += 2 * span.length
        row = pool.kv_heads * pool.width
        for layer, layer_body in enumerate(body.view(len(pool.k), at * row)):
            for target, span, common in stored:
                kv_thd = layer_body[offsets[span] * row :][: 2 * span.length * row].view(
                    2, span.length, pool.kv_heads, pool.width
                )
                k_thd, v_thd = kv_thd[:, span.rows_of(common)].to(pool.k.device)
                slots = torch.from_numpy(target.slots[target.span.rows_of(common)])
                pool.write_slots(layer, slots.to(pool.k.device), k_thd, v_thd)
        return sum(common.length for _, _, common in stored)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            with torch.inference_mode():
                job()
        except Exception:
            _log.exception("saving or restoring KV failed")
