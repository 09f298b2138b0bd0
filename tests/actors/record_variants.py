"""Print which variants of the Triton kernels steps and iterations need, and which a rank warms up.

Run as a program by test_kernel_warm_up.py, outside of the interpreter: MODEL STRATEGY..., where "by
name" is what a rank takes for the step. Prints a
JSON object {"needed": {kernel: variants}, "warm": {kernel: variants}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from device_budget import DEVICE
from gang_driver import even_bounds, even_slices
from recording_kernels import Variants, recorded_kernels
from strategy_ranks import MakeStrategy, step_of
from test_device_budgets import (
    NobodysMesh,
    _ignore_kv,
    decode_batch_of,
    engine_of,
    striped_step,
)
from test_launch_logs import STRATEGIES

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup, spans_on
from csps.actors.attention.choice import ANY_ROWS, strategy_of
from csps.actors.comm.layout import GangLayout
from csps.actors.engine.first_tokens import _last_attention
from csps.actors.engine.iteration import forward
from csps.actors.timing.timeline import StepClock
from csps.actors.worker import startup
from csps.protocols.gang.step_messages import PrefillStep

MEMBERS = 4
HISTORY = 9
LENGTHS = ([5, 40, 3, 1], [900])


def steps(strategies: Sequence[str]) -> Iterator[tuple[MakeStrategy, PrefillStep]]:
    """Yield steps of short and long chunks with each strategy, with history and without."""
    group = range(MEMBERS)
    for name in strategies:
        make = {**STRATEGIES, "by name": lambda members: strategy_of}[name]
        for lengths in LENGTHS:
            bounds = even_bounds(sum(lengths), MEMBERS)
            step = step_of(bounds, lengths)
            yield make(MEMBERS), step
            if name in ANY_ROWS:
                yield make(MEMBERS), striped_step(step)
            history = [even_slices(HISTORY, group) for _ in lengths]
            starts = [HISTORY] * len(lengths)
            yield make(MEMBERS), step_of(bounds, lengths, starts=starts, history=history)


def run(engine: Engine, strategy: MakeStrategy, step: PrefillStep, member: int) -> None:
    """Compute a step on one member, up to the attention of the rows from which it samples."""
    cast(NobodysMesh, engine.mesh).rank = member
    layout = GangLayout(world_size=MEMBERS, tp=1)
    engine = replace(engine, layout=layout)
    group = SpGroup(engine.mesh, layout, step, member, StepClock())
    slots, network = engine.pool.slots, engine.network
    for chunk in step.chunks:
        slots.allocate(chunk.sequence_id, sorted(spans_on(chunk.history, member)))
    start, stop = list(pairwise(step.bounds))[member]
    rotary = network.rotary(torch.zeros(stop - start, dtype=torch.int64, device=DEVICE))
    x_td = torch.empty(stop - start, engine.spec.hidden, dtype=torch.bfloat16, device=DEVICE)
    with strategy(group, engine) as entered:
        for index, layer in enumerate(network.layers[:-1]):
            x_td = layer.mlp(entered.attend_layer(index, layer, x_td, rotary, _ignore_kv))
        q_thd, k_thd, v_thd = network.layers[-1].qkv(x_td, rotary)
        rows = [row for row in range(stop - start) if _is_last(group, row)]
        _last_attention(engine, group, q_thd[rows], (k_thd, v_thd))
    for chunk in step.chunks:
        slots.free_sequence(chunk.sequence_id)


def _is_last(group: SpGroup, row: int) -> bool:
    return (group.member, row) in map(group.last_row_of, group.step.chunks)


def main(model: Path, strategies: Sequence[str]) -> None:
    needed = recorded_kernels()
    engine = engine_of(model)
    with torch.inference_mode():
        for strategy, step in steps(strategies):
            for member in range(MEMBERS):
                run(engine, strategy, step, member)
        for sequences in ((3, 0, 0), (0, 3, 0), (3, 3, 2), (64, 40, 2)):
            engine_of_batch = engine_of(model)
            forward(engine_of_batch, decode_batch_of(engine_of_batch, *sequences)._next_batch(()))
    found = {"needed": _listed(needed)}
    needed.clear()
    startup.compile_kernels(replace(engine, layout=GangLayout(world_size=MEMBERS, tp=1)))
    print(json.dumps(found | {"warm": _listed(needed)}))


def _listed(variants: Variants) -> dict[str, list[str]]:
    return {kernel: sorted(found) for kernel, found in variants.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
