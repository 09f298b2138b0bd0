"""Operations of prompts, and rates of cores, for the share of a roofline (MFU, CP App. A)."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from csps.models.checkpoints.loading import measure_weights
from csps.models.network.spec import read_spec
from csps.protocols.attention.ring_choice import prefill_flops

SIZE, ROUNDS = 1024, 10


def prompt_flops(model: Path, tokens: int) -> float:
    """Return the operations of a prompt.

    Only work on every token counts: embeddings are looked up, and a single row goes through the
    last layer's attention and the head.
    """
    spec = read_spec(model)
    outside = spec.vocab * spec.hidden * (1 if spec.tie_embeddings else 2)
    inside = measure_weights(model).parameters - outside
    layers = spec.layers - 1
    return prefill_flops(
        parameters=inside * layers // spec.layers,
        layers=layers,
        width=spec.heads * spec.head_dim,
        new=tokens,
    )


def peak_flops(*, threads: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations a second of a product of matrices by so many threads."""
    factor_mn = torch.rand(SIZE, SIZE).to(dtype)
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        torch.mm(factor_mn, factor_mn)
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return 2.0 * SIZE**3 / min(seconds)
