"""What a header announces: keys and values of one layer, in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from csps.actors.kept_kv import KeptKv
from csps.models.tensor_checksum import tensor_checksum


@dataclass(frozen=True)
class KvBody:
    """Shape suffixes as in `kept_kv`."""

    k: Tensor
    """(t, h, d) of all tokens, or (n, d) of kept ones."""
    v: Tensor
    kept_ht: Tensor | None = None
    """bool; None if all tokens are there."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """In the order in which they travel; empty ones do not."""
        whole = (self.k, self.v) if self.kept_ht is None else (self.kept_ht, self.k, self.v)
        return tuple(part for part in whole if part.numel())

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return self.k.nbytes + self.v.nbytes

    @property
    def kept(self) -> KeptKv | None:
        """If only some tokens are there."""
        return None if self.kept_ht is None else KeptKv(self.kept_ht, self.k, self.v)

    def moved(self, move: Callable[[Tensor], Tensor]) -> KvBody:
        """The same, each tensor somewhere else."""
        kept_ht = None if self.kept_ht is None else move(self.kept_ht)
        return KvBody(move(self.k), move(self.v), kept_ht)

    def checksum(self) -> int:
        """CRC-32 of all bytes that travel."""
        return reduce(lambda start, part: tensor_checksum(part, start), self.parts, 0)
