"""What traffic depends on beside the group: the sizes of a model's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from csps.protocols.even_share import even_share


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of a model's attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    lse: int = 1
    """Elements of the model's dtype that an fp32 LSE takes: 1 in fp32, 2 in 16 bit."""

    def __post_init__(self) -> None:
        sizes = self.hidden, self.heads, self.kv_heads, self.head_dim, self.layers, self.lse
        if min(sizes) < 1:
            raise ValueError(f"sizes of attention start at 1: {self}")

    @property
    def width(self) -> int:
        """Of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys of one token, or of the values."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """Of a layer's four projections; their biases are not counted."""
        return 2 * self.hidden * (self.width + self.kv_width)


def lse_elements(element_bytes: int) -> int:
    """Elements of a dtype that one fp32 LSE takes on a wire; at least one."""
    return max(1, 4 // element_bytes)


def head_shares(heads: int, kv_heads: int, parts: int) -> Iterator[tuple[range, range]]:
    """Query heads of each part, and the KV heads that they read; a KV head goes to every part one
    of whose query heads reads it."""
    group = heads // kv_heads
    for part in range(parts):
        queries = even_share(heads, parts, part)
        keys = range(queries[0] // group, queries[-1] // group + 1) if queries else range(0)
        yield queries, keys
