"""Where the KV lies that the rows of a decode batch attend to on this rank.

It is looked up when the batch changes and not at each layer: from then on only the rank itself
appends to it, a slot a step. Shape suffixes as in `csps.kernels.decode_attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from csps.actors.kv_pool import KvBlock, KvPool
from csps.actors.slot_set import SlotSet
from csps.kernels.decode_attention import Run, SlotRuns
from csps.protocols.span import Span


class RequestSlots:
    """The slots of one request's KV in a pool, as its answer grows.

    Args:
        layers: those that are going to be read.
        seen: spans of positions, of which those that lie here have been written in all layers.
        answer: spans of positions whose slots `append` takes one after the other.
    """

    def __init__(
        self,
        pool: KvPool,
        rid: int,
        layers: Iterable[int],
        seen: Sequence[Span],
        answer: Sequence[Span] = (),
    ) -> None:
        self._kept = {
            layer: pool.kept_blocks(layer, rid) for layer in layers if pool.narrowed(layer, rid)
        }
        slots = pool.slots
        self._prompt = list(SlotSet(run for span in seen for run in slots.runs(rid, span)))
        own = (zip(it.positions, slots.by_position(rid, it).tolist(), strict=True) for it in answer)
        self._free: list[int] = [slot for _, slot in sorted(chain.from_iterable(own), reverse=True)]
        self._answer: list[range] = []

    def append(self) -> int:
        """The slot of the next token; from now on it is read as well."""
        slot = self._free.pop()
        if self._answer and self._answer[-1].stop == slot:
            self._answer[-1] = range(self._answer[-1].start, slot + 1)
        else:
            self._answer.append(range(slot, slot + 1))
        return slot

    def runs(self, layer: int) -> Iterable[range]:
        """Runs of slots that every KV head of a layer sees."""
        if layer in self._kept:
            return self._answer
        if self._prompt and self._answer and self._prompt[-1].stop == self._answer[0].start:
            joined = range(self._prompt[-1].start, self._answer[0].stop)
            return [*self._prompt[:-1], joined, *self._answer[1:]]
        return [*self._prompt, *self._answer]

    def blocks(self, layer: int) -> Sequence[KvBlock]:
        """What only some KV heads see, in a layer that was written with kept tokens only."""
        return self._kept.get(layer, ())

    @property
    def narrowed(self) -> bool:
        """Whether layers differ in what they hold."""
        return bool(self._kept)


class HeldRows:
    """The requests of some query rows, in their order."""

    def __init__(self, requests: Sequence[RequestSlots]) -> None:
        self.requests = requests
        self._narrowed = any(it.narrowed for it in requests)
        self._runs: dict[int, SlotRuns] = {}

    def grown(self) -> None:
        """Slots were appended."""
        self._runs.clear()

    def runs(self, layer: int) -> SlotRuns:
        """Where a layer's keys of each row lie, for all KV heads."""
        key = layer if self._narrowed else 0
        if key not in self._runs:
            found: list[Run] = [
                (row, run.start, run.stop)
                for row, request in enumerate(self.requests)
                for run in request.runs(layer)
            ]
            self._runs[key] = SlotRuns(len(self.requests), found)
        return self._runs[key]

    def blocks(self, layer: int) -> list[tuple[int, KvBlock]]:
        """(row, block) of what only some KV heads see."""
        if not self._narrowed:
            return []
        return [(row, it) for row, held in enumerate(self.requests) for it in held.blocks(layer)]
