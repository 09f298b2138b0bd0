"""Measure the phases of a layer on one rank: `python -m csps.actors.phase_probe MODEL DTYPE
KV_DTYPE WEIGHT_DTYPE DEVICE THREADS TP SIZES ROUNDS OVERRIDES`.

The probe calls what strategies call, with the weights and heads of the first of TP ranks. Sums over
ranks are exchanges and are not measured. SIZES are tokens, separated by commas. OVERRIDES is a JSON
object of values that replace those of config.json. The probe prints a JSON list of [phase, tokens,
keys, bytes, seconds] with the least time of the rounds, because other work only makes a phase
longer.

Shape suffixes: t tokens, k keys, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.importance import column_sums, select
from csps.kernels.merge import merge_into, nothing_seen
from csps.models.checkpoints.checkpoint import open_checkpoint
from csps.models.checkpoints.loading import read_network
from csps.models.network.network import Layer, Network

WINDOW = 64
"""Queries that score importance, unless a request says otherwise."""
SHARES = (1, 4)
"""Keys for each query in the rectangles that are measured."""


class PhaseTime(NamedTuple):
    """One measurement."""

    phase: str
    tokens: int
    keys: int
    """Keys attended to; -1 for causal attention of the tokens among themselves."""
    bytes: int
    seconds: float


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    print(json.dumps(measured(arguments)), flush=True)


def measured(arguments: Sequence[str]) -> list[PhaseTime]:
    """Return what `main` prints."""
    model, dtype, kv_dtype, weight_dtype, device, threads, tp, sizes, rounds, overrides = arguments
    torch.set_num_threads(int(threads))
    with open_checkpoint(Path(model), json.loads(overrides)) as checkpoint, torch.inference_mode():
        network = read_network(
            checkpoint,
            tp_rank=0,
            tp_size=int(tp),
            dtype=getattr(torch, dtype),
            device=device,
            all_reduce=None,
            rounds_kv=kv_dtype == "int8",
            fp8=weight_dtype == "fp8",
        )
        return [
            row
            for size in map(int, sizes.split(","))
            for row in _phases(network, size, device, int(rounds))
        ]


def _phases(network: Network, tokens: int, device: str, rounds: int) -> Iterator[PhaseTime]:
    # The last layer stands for all: of mixtures of experts, the first ones may have none.
    layer: Layer = network.layers[-1]
    spec = network.spec
    rotary = network.rotary(torch.arange(tokens, device=device))
    x_td = network.embed(torch.arange(tokens, device=device) % 256)
    q_thd, k_tgd, v_tgd = layer.qkv(x_td, rotary)
    out_thd, lse_ht = nothing_seen(q_thd)
    importance_gt = torch.rand(k_tgd.shape[1], tokens, device=device)

    def least(name: str, work: Callable[[], object], keys: int = 0, size: int = 0) -> PhaseTime:
        return PhaseTime(name, tokens, keys, size, _least(work, device, rounds))

    yield least("qkv", lambda: layer.qkv(x_td, rotary))
    yield least("linear", lambda: layer.attention_output(x_td, q_thd))
    yield least("mlp", lambda: layer.mlp(x_td))
    yield least(
        "attention",
        lambda: attention(
            q_thd,
            k_tgd,
            v_tgd,
            q_positions=range(tokens),
            k_positions=range(tokens),
            scale=spec.scale,
        ),
        keys=-1,
    )
    for share in SHARES:
        few_thd = q_thd[: max(1, tokens // share)]
        whole = partial(attention, few_thd, k_tgd, v_tgd, q_positions=None, k_positions=None)
        taken = _least(partial(whole, scale=spec.scale), device, rounds)
        yield PhaseTime("attention", len(few_thd), tokens, 0, taken)
    yield least("merge", lambda: merge_into(out_thd, lse_ht, q_thd, lse_ht))
    yield least("select", lambda: select(importance_gt, max(1, tokens // 4)))
    window_thd = q_thd[-WINDOW:]
    scoring = _least(lambda: _score(window_thd, k_tgd, v_tgd, spec.scale), device, rounds)
    yield PhaseTime("importance", len(window_thd), tokens, 0, scoring / 2)
    rows_t = torch.randperm(tokens, device=device)
    size = q_thd.numel() * q_thd.element_size()
    yield least("copy", lambda: q_thd.index_select(0, rows_t), size=size)


def _score(q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, scale: float) -> None:
    """Make both passes over the keys: LSEs, then column sums."""
    _, lse_ht = attention(q_thd, k_tgd, v_tgd, q_positions=None, k_positions=None, scale=scale)
    column_sums(q_thd, k_tgd, lse_ht.contiguous(), q_positions=None, k_positions=None, scale=scale)


def _least(work: Callable[[], object], device: str, rounds: int) -> float:
    """Return the least seconds, without the first round, which allocates memory."""
    work()
    taken = []
    for _ in range(rounds):
        _synchronize(device)
        begin = time.perf_counter()
        work()
        _synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
