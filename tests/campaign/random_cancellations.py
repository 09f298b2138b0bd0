"""Requests over real ranks of which most are cancelled, each at a random moment of its life."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gang_driver import ANSWER_S
from real_cell import ELASTIC, PAIR, Cell, check_pools, real_cell
from tiny_checkpoints import reference_tokens

from csps.protocols.core.errors import Cancelled
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.events.limits import ReuseSettings

BLOCK = 16
REUSE = ReuseSettings(enabled=True, max_share=1.0, block_tokens=BLOCK)
TOGETHER = 16
"""Requests at a time."""
LENGTHS = (5, 33, 90, 300, 600)
JUDGED = 4
"""Tokens of answers that are compared."""
GANGS: dict[str, dict[str, Any]] = {
    "csps": {"roles": PAIR},
    "fixed_sp": {"roles": PAIR},
    "tetris": {"roles": PAIR},
    "context_parallel": {"roles": PAIR},
    "chunked_prefill": {"roles": ELASTIC},
    "loongserve": {"roles": ELASTIC, "instances": 3},
}


@dataclass
class Cancellations:
    """What was cancelled, and what else was answered."""

    cancelled: Counter[str] = field(default_factory=Counter)
    """Cancelled requests, by their state at that moment."""
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    """Answers that were not those of transformers, and requests that failed."""

    @property
    def count(self) -> int:
        """Return how many requests were cancelled before their end."""
        return self.cancelled.total() - self.cancelled["finished"]


async def cancel_at_random(model: Path, policy: str, *, count: int, seed: int) -> Cancellations:
    """Cancel so many requests, and check what they leave: nothing but cached KV, and nothing once
    that is evicted."""
    found, drawn = Cancellations(), random.Random(seed)
    async with real_cell(model, policy, reuse=REUSE, **GANGS[policy]) as cell:
        shared = [drawn.randrange(256) for _ in range(max(LENGTHS))]
        while found.count < count:
            waves = [_one(cell, model, drawn, shared, found) for _ in range(TOGETHER)]
            await asyncio.gather(*waves)
            cell.service.check_integrity()
        await asyncio.wait_for(_answered(cell, model, shared[:90], found), ANSWER_S)  # caches
        await check_pools(cell)
        for gang in cell.gangs.values():
            for rank in gang.ranks:
                rank.check_health()
                rank.engine.pool.slots.check_integrity()
    return found


async def _one(
    cell: Cell, model: Path, drawn: random.Random, shared: Sequence[int], found: Cancellations
) -> None:
    """Submit a request; let it end, or cancel it after some time, or after some tokens."""
    length = drawn.choice(LENGTHS)
    common = drawn.choice([0, length // 2, length])
    prompt = [*shared[:common], *(drawn.randrange(256) for _ in range(length - common))]
    kind = drawn.choice(["time", "time", "time", "tokens", "whole"])
    delay_s, tokens = drawn.random() ** 2 * 0.4, drawn.randint(1, 30)
    if kind == "whole":
        await _answered(cell, model, prompt, found)
        return
    handle = cell.submit_tokens(prompt, drawn.randint(1, 60), BLOCK)
    left: Callable[[], None] = partial(_leave, handle, found)
    timer = asyncio.get_running_loop().call_later(delay_s if kind == "time" else ANSWER_S, left)
    try:
        async with asyncio.timeout(ANSWER_S), handle:
            seen = 0
            async for _ in handle:
                seen += 1
                if kind == "tokens" and seen == tokens:
                    left()
    except Cancelled:
        pass
    except Exception as error:
        found.wrong.append(f"a request failed: {error!r}")
    finally:
        timer.cancel()


def _leave(handle: RequestHandle, found: Cancellations) -> None:
    found.cancelled[handle.state] += 1
    handle.cancel()


async def _answered(cell: Cell, model: Path, prompt: Sequence[int], found: Cancellations) -> None:
    async with cell.submit_tokens(prompt, JUDGED, BLOCK) as handle:
        tokens = [token.token async for token in handle]
    found.answered += 1
    if tokens != reference_tokens(model, list(prompt), JUDGED):
        found.wrong.append(f"a prompt of {len(prompt)} tokens got {tokens}")
