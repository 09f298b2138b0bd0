"""Gangs of tiny models that tests of several strategies run their jobs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from rank_world import STRICT
from strategy_ranks import MakeStrategy, StrategyRanks, job_of, strategy_ranks
from tiny_checkpoints import make_checkpoint

from csps.actors.process_group import GroupMaker
from csps.protocols.placement import KvShare
from csps.protocols.span import Span

LAYERS = 3
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "mha": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "qk-norm": {"family": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
}

Gangs = Callable[[str, int, int], StrategyRanks]
"""(model, instances, ranks of each) -> a gang, the same for the same arguments."""


@contextmanager
def started_once(
    folders: pytest.TempPathFactory, data_group: GroupMaker | None = STRICT
) -> Iterator[Gangs]:
    """Starts each gang when it is first asked for, or after a job that failed on it, and closes
    all on the way out; with plain gloo (None) clocks and timelines tell when exchanges ended."""
    started: dict[tuple[str, int, int], StrategyRanks] = {}
    stacks: list[ExitStack] = []

    def gang(model: str, instances: int, tp: int) -> StrategyRanks:
        key = model, instances, tp
        if key not in started or started[key].failed:
            config = {"num_hidden_layers": LAYERS, **MODELS[model]}
            path = make_checkpoint(folders.mktemp(model), **config)
            stacks.append(ExitStack())
            started[key] = stacks[-1].enter_context(
                strategy_ranks(path, instances=instances, tp=tp, data_group=data_group)
            )
        return started[key]

    try:
        yield gang
    finally:
        with ThreadPoolExecutor() as threads:  # each waits for gloo most of the time
            list(threads.map(ExitStack.close, stacks))


def check_scattered_history(
    gang: StrategyRanks,
    make: MakeStrategy,
    part: Callable[[int, int], None] | None = None,
    **fields: object,
) -> None:
    """A chunk whose earlier KV lies on both of two instances, between two whole prompts."""
    shares = [
        KvShare(instance=1, span=Span(start=0, stop=7)),
        KvShare(instance=0, span=Span(start=7, stop=19)),
        KvShare(instance=1, span=Span(start=19, stop=20)),
    ]
    job = job_of([0, 12, 25], [4, 15, 6], starts=[0, 20, 0], history=[[], shares, []], **fields)
    forwards = gang.forwards(job)
    gang.hold_history(job, forwards)
    try:
        gang.check(job, gang.run(job, make, part), forwards)
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_request(1)
