"""KV that a gang has in files: which runs of blocks, and how fast they are read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from csps.protocols.core.placement import KvSlice, Span, joined, within
from csps.protocols.gang.messages import SavedPart, SavedRun
from csps.services.scheduling.events.events import GangId, InstanceId, instance_id
from csps.services.scheduling.state.prefix_tree import Hashes

RUN_BLOCKS = 64
"""Most blocks of a run. A restore reads whole files, even if it wants few of their blocks."""


class Restorable(msgspec.Struct, frozen=True, gc=False):
    """What files have of a prompt behind its cached prefix."""

    parts: tuple[SavedPart, ...]
    """Parts of runs, in order and without gaps."""
    slices: tuple[KvSlice, ...]
    """Placement on the gang's instances."""

    @property
    def start(self) -> int:
        """First position."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """Position behind the last one."""
        return self.parts[-1].stop

    def from_part(self, number: int) -> Restorable:
        """Return what the parts from this one on have."""
        parts = self.parts[number:]
        slices = within(self.slices, Span(parts[0].start, self.stop))
        return Restorable(parts=parts, slices=joined(slices))


class SavedRuns:
    """Runs of one gang. A run counts when all of its instances have reported their parts.

    Ranks do not report files that had to go. Reading one fails, and beyond `most_blocks` there
    cannot be files of all: the runs that were reported first are forgotten.

    Args:
        block: tokens of a block.
        most_blocks: of which there can be files.
    """

    def __init__(self, gang: GangId, block: int, most_blocks: int) -> None:
        self._gang, self._block, self._most = gang, block, most_blocks
        self._reported: dict[str, dict[InstanceId, None]] = {}
        """Instances that have their parts, by the name of the run; the one reported first is the
        first."""
        self._by_hash: dict[bytes, tuple[SavedRun, int]] = {}
        """Whole runs and the number of the block in them, by the block's hash."""
        self._speeds: dict[InstanceId, int] = {}

    def __len__(self) -> int:
        """Return how many blocks are in files."""
        return len(self._by_hash)

    @property
    def bytes_per_s(self) -> int:
        """Speed of the slowest instance; 0 while none knows it."""
        return min(self._speeds.values(), default=0)

    def add(self, instance: InstanceId, runs: Iterable[SavedRun], bytes_per_s: int) -> None:
        """Note parts that an instance has, and its speed, if it knows it."""
        if bytes_per_s:
            self._speeds[instance] = bytes_per_s
        for run in runs:
            here = self._reported.setdefault(run.name, {})
            here[instance] = None
            if all(kv_slice.instance in here for kv_slice in self._placed(run)):
                for number, block_hash in enumerate(run.hashes):
                    self._by_hash.setdefault(block_hash, (run, number))
        if len(self._by_hash) > self._most:
            self._forget_first()

    def _forget_first(self) -> None:
        """Forget the runs that were reported first, until an eighth of the room is free."""
        sizes: dict[str, int] = {}
        for run, _ in self._by_hash.values():
            sizes[run.name] = sizes.get(run.name, 0) + 1
        excess, gone = len(self._by_hash) - self._most * 7 // 8, list[str]()
        for name in self._reported:
            if excess <= 0:
                break
            gone.append(name)
            excess -= sizes.get(name, 0)
        self.forget(gone)

    def forget(self, names: Iterable[str]) -> None:
        """Forget runs that could not be read."""
        gone = set(names)
        for name in gone:
            self._reported.pop(name, None)
        self._by_hash = {
            block_hash: found
            for block_hash, found in self._by_hash.items()
            if found[0].name not in gone
        }

    def note_speed(self, bytes_per_s: int) -> None:
        """Note the speed of a restore on all instances together."""
        for instance, before in self._speeds.items():
            self._speeds[instance] = max(1, (before + bytes_per_s) // 2)

    def behind(self, hashes: Hashes, blocks: int) -> Restorable | None:
        """Return what files have of a prompt behind its first blocks; None if nothing."""
        parts, slices, at = list[SavedPart](), list[KvSlice](), blocks
        while at < len(hashes) and hashes[at] in self._by_hash:
            run, number = self._by_hash[hashes[at]]
            first = at
            for block_hash in run.hashes[number:]:
                if at == len(hashes) or hashes[at] != block_hash:
                    break
                at += 1
            span = Span(first * self._block, at * self._block)
            parts.append(SavedPart(run.name, span.start, span.stop))
            # Where the prompt leaves the run, another one may go on.
            slices += within(self._placed(run), span)
        return Restorable(parts=tuple(parts), slices=joined(slices)) if parts else None

    def new_runs(
        self, hashes: Hashes, start: int, stop: int, slices: tuple[KvSlice, ...]
    ) -> list[SavedRun]:
        """Return the runs of these positions that are in no file, as ranks name instances.

        Args:
            hashes: of all blocks from the beginning of the prompt.
            slices: placement of the positions.
        """
        runs = []
        for first in range(start // self._block, stop // self._block, RUN_BLOCKS):
            last = min(first + RUN_BLOCKS, stop // self._block)
            if all(block_hash in self._by_hash for block_hash in hashes[first:last]):
                continue
            span = Span(first * self._block, last * self._block)
            placed = tuple(
                KvSlice.of(kv_slice.instance - instance_id(self._gang, 0), kv_slice.span)
                for kv_slice in joined(within(slices, span))
            )
            runs.append(SavedRun(start=span.start, hashes=hashes[first:last], slices=placed))
        return runs

    def _placed(self, run: SavedRun) -> list[KvSlice]:
        """Return the placement of a run on the scheduler's instances."""
        return [
            KvSlice.of(instance_id(self._gang, kv_slice.instance), kv_slice.span)
            for kv_slice in run.slices
        ]
