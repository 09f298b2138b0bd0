"""How rows and heads are cut, by the ranks as by whoever predicts what they will send."""

from __future__ import annotations


def even_share(total: int, parts: int, index: int) -> range:
    """Part `index` of `total` things cut into contiguous parts that differ by one at most."""
    return range(index * total // parts, (index + 1) * total // parts)
