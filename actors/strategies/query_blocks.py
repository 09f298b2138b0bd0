"""How long attention is cut so that urgent jobs may run inside it.

Shape suffixes: t tokens, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

BLOCK_PRODUCTS = 2**31
"""Multiplications of q·k in one block of queries, between which other work may run: a twentieth of
a second on a core, as long as blocks are not kept at their least rows."""
MIN_BLOCK_ROWS = 1024
"""Shorter blocks make attention slower, as torch then works off fewer queries at a time. With many
keys such a block takes longer: near a second at 256K."""


def query_blocks(q_thd: Tensor, keys: int) -> Iterator[slice]:
    """Blocks of queries that attend to so many keys at most; one on a GPU, to which a layer is
    handed over as a whole anyway."""
    tokens, heads, dim = q_thd.shape
    rows = max(1, tokens) if q_thd.is_cuda else _block_rows(heads, dim, keys)
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def block_count(rows: int, heads: int, dim: int, keys: int) -> int:
    """How many blocks `query_blocks` makes of so many queries on a CPU."""
    return -(-rows // _block_rows(heads, dim, keys))


def _block_rows(heads: int, dim: int, keys: int) -> int:
    return max(MIN_BLOCK_ROWS, BLOCK_PRODUCTS // max(1, keys * heads * dim))
