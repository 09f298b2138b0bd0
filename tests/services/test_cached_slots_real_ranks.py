"""What is left in the pools of real ranks after conversations is what the router has cached, and
nothing once that is evicted."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from arbitrary_layout_policy import AnyLayout
from real_cell import ELASTIC, PAIR, Cell, answer, check_pools, real_cell

from csps.actors.engine.loop import EngineLoop
from csps.actors.engine.step_run import StepRun
from csps.protocols.gang.members import GangRole
from csps.services.scheduling.events.limits import ReuseSettings

BLOCK = 16
REUSE = ReuseSettings(enabled=True, max_share=1.0, block_tokens=BLOCK)
TURNS, BRANCHES = 4, 3


async def converse(cell: Cell) -> int:
    """Run conversations that begin alike, some branches of each turn at once, and leave one after
    its first token. Return the number of reused tokens."""
    random = np.random.default_rng(1)
    text: list[int] = random.integers(0, 256, 60).tolist()
    reused = 0
    for _ in range(TURNS):
        tails = [random.integers(0, 256, 25 + 30 * branch).tolist() for branch in range(BRANCHES)]
        handles = [cell.submit_tokens([*text, *tail], 6, BLOCK) for tail in tails]
        async with cell.submit_tokens(text, 400, BLOCK) as left:
            await anext(left)
        await asyncio.gather(*map(answer, handles))
        reused += sum(handle.cached_tokens for handle in handles)
        text = [*text, *tails[0]]
    return reused


class LastChunksFirst:
    """Lets the KV of a prompt's last chunk be received before that of the chunks before it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.overtaken = 0
        """Steps that the last one of their sequence has overtaken."""
        self._held: dict[tuple[EngineLoop, int], list[StepRun]] = defaultdict(list)
        self._last_sent: set[tuple[EngineLoop, int]] = set()
        self._lock = threading.Lock()
        sent = EngineLoop._step_sent

        def reordered(loop: EngineLoop, run: StepRun) -> None:
            chunk, *others = run.step.chunks
            key = loop, chunk.sequence_id
            with self._lock:
                # A busy machine may order them so by itself: nobody would then release the others.
                overtaken = key in self._last_sent
                if chunk.last:
                    self._last_sent.add(key)
                elif not (others or run.cancelled or overtaken) and chunk.destinations:
                    self._held[key].append(run)
                    return
                self.overtaken += overtaken and not chunk.last
            sent(loop, run)
            with self._lock:
                held = self._held.pop(key, [])
                self.overtaken += len(held)
            for earlier in held:
                sent(loop, earlier)

        patch.setattr(EngineLoop, "_step_sent", reordered)


@pytest.mark.parametrize(
    ("policy", "roles"),
    [
        ("csps", PAIR),
        ("tetris", PAIR),
        ("context_parallel", ELASTIC),
        ("chunked_prefill", ELASTIC),
        ("loongserve", ELASTIC),
    ],
)
async def test_pools_hold_what_is_cached_and_nothing_after_eviction(
    policy: str, roles: Sequence[GangRole], tiny_llama: Path
) -> None:
    async with real_cell(tiny_llama, policy, roles=roles, reuse=REUSE) as cell:
        assert await converse(cell)
        await check_pools(cell)


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_so_they_do_in_any_layout_and_order(
    roles: Sequence[GangRole], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, of which the last one's KV is received first."""
    order = LastChunksFirst(monkeypatch)
    async with real_cell(tiny_llama, AnyLayout(7, block=BLOCK), roles=roles, reuse=REUSE) as cell:
        assert await converse(cell)
        await check_pools(cell)
    assert order.overtaken or roles == ELASTIC
