"""Chunks of a prompt on groups that grow, with history moved as Tetris' policy wants it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gang_cell import laid_out
from gang_threads import ThreadCell
from test_chunked_prefill import Prefill, run_job, spans_of

from csps.actors.mesh import Mesh, Tag
from csps.protocols.placement import KvShare
from csps.services.scheduling.commands import Share
from csps.services.scheduling.policies.tetris.balance import balancing_moves


@dataclass(frozen=True)
class Chunk:
    """What is computed next, and by whom."""

    stop: int
    group: tuple[int, ...]


def random_chain(rng: random.Random, length: int, instances: int) -> list[Chunk]:
    """Each group contains the ones before it."""
    order = rng.sample(range(instances), instances)
    count = rng.randint(2, 4)
    sizes = sorted(rng.randint(1, instances) for _ in range(count))
    stops = [*sorted(rng.sample(range(1, length), count - 1)), length]
    return [
        Chunk(stop, tuple(rng.sample(order[:size], size)))
        for stop, size in zip(stops, sizes, strict=True)
    ]


def run_chunk(
    cell: ThreadCell, it: Prefill, chunk: Chunk, layout: str, **fields: Any
) -> tuple[int, Counter[tuple[int, int]]]:
    """Send a chunk to the ranks; returns its job, and the tokens of history that it is to move,
    from instance to instance."""
    before = it.owners[: it.done].copy()
    held = [Share.of(share.instance, share.span) for share in spans_of(before) if share.span.length]
    moves = [
        KvShare(instance=move.instance, span=move.span)
        for move in balancing_moves(held, chunk.group)
    ]
    rows = laid_out(layout, it.done, chunk.stop, chunk.group)
    piece = it.piece(chunk.stop, (*rows, *moves) if moves else (), rows=rows)
    job = run_job(cell, [it], [piece], chunk.group, **fields)
    after = it.owners[: len(before)]
    counts = np.bincount(after, minlength=max(chunk.group) + 1)[list(chunk.group)]
    assert counts.max() - counts.min() <= 1, "history is not even"
    changed = np.flatnonzero(before != after)
    pairs = zip(before[changed].tolist(), after[changed].tolist(), strict=True)
    return job, Counter(pairs)


class MovedBytes:
    """What ranks send to move KV, from rank to rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()
        counting, start = threading.Lock(), Mesh.start_exchange

        def counted(mesh: Mesh, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> Any:
            if tag == Tag.KV_MOVE:
                with counting:
                    for peer, tensor in sends:
                        self.sent[mesh.rank, peer] += tensor.nbytes
            return start(mesh, sends, recvs, tag)

        patch.setattr(Mesh, "start_exchange", counted)


def grown(length: int, groups: Sequence[Sequence[int]]) -> list[Chunk]:
    """Even chunks."""
    return [
        Chunk(length * number // len(groups), tuple(group))
        for number, group in enumerate(groups, 1)
    ]
