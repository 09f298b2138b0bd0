"""Where the ranks of a gang answer, as a registry tells whoever wants to reach them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GangRole = Literal["prefill", "decode", "elastic"]
"""What a gang may do: compute prompts, draw tokens, or both."""


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Where one rank answers RPC."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class GangMembers:
    """A complete gang: every rank 0 .. world_size - 1 has registered."""

    gang_id: str
    ranks: tuple[RankAddress, ...]
    """In rank order."""
    incarnation: int = 0
    """Larger than that of every gang which this one replaces; 0 where nobody counts."""

    def __post_init__(self) -> None:
        if [address.rank for address in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"gang {self.gang_id} is not complete, or not in rank order")
        if not self.ranks:
            raise ValueError(f"gang {self.gang_id} has no ranks")
