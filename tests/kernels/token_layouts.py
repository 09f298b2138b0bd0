"""Inputs of the kernel tests: random tensors and layouts of tokens on ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


def random_qkv(
    seed: int,
    q_tokens: int,
    k_tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((q_tokens, heads, dim), (k_tokens, kv_heads, dim), (k_tokens, kv_heads, dim))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def layouts(n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return positions of queries and keys, some hundreds of tokens for n = 100."""
    shuffle = torch.Generator().manual_seed(1)
    return {
        "whole prompt": (torch.arange(3 * n), torch.arange(3 * n)),
        "chunk after history": (torch.arange(2 * n, 3 * n), torch.arange(3 * n)),
        "some history elsewhere": (torch.arange(2 * n, 3 * n), torch.arange(n, 3 * n)),
        "history only": (torch.arange(2 * n, 3 * n), torch.arange(2 * n)),
        "decode": (torch.tensor([3 * n - 1]), torch.arange(3 * n)),
        "decode of a few": (torch.arange(3 * n - 4, 3 * n), torch.arange(3 * n)),
        "future only": (torch.arange(n), torch.arange(n, 3 * n)),
        "keys begin midway": (torch.arange(3 * n), torch.arange(n, 5 * n // 2)),
        "zigzag, own shard": (zigzag(8 * n + 1, 3, 1), zigzag(8 * n + 1, 3, 1)),
        "zigzag, later shard": (zigzag(8 * n + 1, 3, 0), zigzag(8 * n + 1, 3, 2)),
        "zigzag, earlier shard": (zigzag(8 * n + 1, 3, 2), zigzag(8 * n + 1, 3, 0)),
        "zigzag after history": (2 * n + zigzag(4 * n, 2, 1), torch.arange(6 * n)),
        "striped, later shard": (torch.arange(1, 6 * n, 4), torch.arange(3, 6 * n, 4)),
        "striped, earlier shard": (torch.arange(3, 6 * n, 4), torch.arange(0, 6 * n, 4)),
        "striped over all keys": (torch.arange(1, 6 * n, 4), torch.arange(6 * n)),
        "all queries over a stripe": (torch.arange(4 * n), torch.arange(1, 4 * n, 4)),
        "descending": (torch.arange(3 * n).flip(0), torch.arange(3 * n)),
        "shuffled": (
            torch.randperm(4 * n, generator=shuffle),
            torch.randperm(4 * n, generator=shuffle),
        ),
    }


LAYOUTS = layouts(100)
SMALL_LAYOUTS = layouts(25)  # for kernels that an interpreter runs


@st.composite
def batches(draw: st.DrawFn, longest: int = 150) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.tuples(*[st.integers(0, longest)] * 2), max_size=4))
    q_lengths, k_lengths = [q for q, _ in lengths], [k for _, k in lengths]
    positions = st.integers(0, draw(st.sampled_from([10, 200])))
    q, k = sum(q_lengths), sum(k_lengths)
    return {
        "qkv": random_qkv(draw(st.integers(0, 9)), q, k, heads, kv_heads, draw(st.integers(1, 40))),
        "q_positions": torch.tensor(draw(_ordered(positions, q)), dtype=torch.int64),
        "k_positions": torch.tensor(draw(_ordered(positions, k)), dtype=torch.int64),
        "cu_seqlens_q": [0, *accumulate(q_lengths)],
        "cu_seqlens_k": [0, *accumulate(k_lengths)],
        "scale": draw(st.sampled_from([None, 0.5, 1.7])),
    }


def _ordered(positions: st.SearchStrategy[int], count: int) -> st.SearchStrategy[list[int]]:
    """Build sorted, repeated or shuffled positions; cheap for any count."""
    seeds, kinds = st.integers(0, 2**16), st.sampled_from(["runs", "sorted", "any"])

    def build(seed: int, kind: str, top: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        if kind == "runs":
            return list(range(top, top + count))
        chosen = torch.randint(0, 200, (count,), generator=generator)
        return (chosen.sort().values if kind == "sorted" else chosen).tolist()

    return st.builds(build, seeds, kinds, positions)
