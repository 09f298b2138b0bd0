"""Who owns, sends and sees what at each level of sparse SP-NTP (CSPS §3.2.4), without a count.

Levels are disjoint. At level v the members of a segment own its heads in equal shares; queries of
all parts but those of its first level-(v-1) segment go there, and keys and values of all but those
of its last one. Level 1 is seen causally, by every part.

Shape suffixes: o owners of heads, p parts (one per member), i parts that see, j parts that are
seen, h query heads, g KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csps.configurator.shapes import head_shares
from csps.protocols.topology import Segments

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LevelMasks:
    """One level."""

    level: int
    """From 1."""
    together_op: Mask
    """Owner and part share a segment; with each member itself."""
    sees_ij: Mask
    """Parts that see others whole; at level 1 each sees itself causally besides."""
    seeing_p: Mask
    """Parts that see something."""
    seen_p: Mask
    """Parts that are seen."""
    owned_oh: Mask
    owned_og: Mask
    """KV heads that the owned query heads read."""

    @property
    def queries_oph(self) -> Mask:
        """Queries that an owner needs of other members."""
        others_op = self.together_op & ~np.eye(len(self.together_op), dtype=np.bool_)
        needed: Mask = (others_op & self.seeing_p)[:, :, None] & self.owned_oh[:, None, :]
        return needed

    @property
    def keys_opg(self) -> Mask:
        """Keys and values that an owner needs of other members."""
        others_op = self.together_op & ~np.eye(len(self.together_op), dtype=np.bool_)
        needed: Mask = (others_op & self.seen_p)[:, :, None] & self.owned_og[:, None, :]
        return needed


def level_masks(
    segments_by_level: Sequence[Segments], heads: int, kv_heads: int
) -> Iterator[LevelMasks]:
    """Of each level, the nearest first.

    Args:
        heads: that ranks of equal place in their instances share, and the KV heads of these.
    """
    for level, here in enumerate(segments_by_level, start=1):
        nearer = segments_by_level[level - 2] if level > 1 else None
        seeing_p, seen_p = _sights(here, nearer)
        owned_oh, owned_og = _owned(here, heads, kv_heads)
        together_op = _together(here)
        yield LevelMasks(
            level=level,
            together_op=together_op,
            sees_ij=together_op & _precedes(nearer, len(together_op)),
            seeing_p=seeing_p,
            seen_p=seen_p,
            owned_oh=owned_oh,
            owned_og=owned_og,
        )


def _owned(segments: Segments, heads: int, kv_heads: int) -> tuple[Mask, Mask]:
    members = segments[-1].stop
    owned_oh = np.zeros((members, heads), bool)
    owned_og = np.zeros((members, kv_heads), bool)
    for segment in segments:
        shares = head_shares(heads, kv_heads, len(segment))
        for member, (queries, keys) in zip(segment, shares, strict=True):
            owned_oh[member, queries.start : queries.stop] = True
            owned_og[member, keys.start : keys.stop] = True
    return owned_oh, owned_og


def _sights(segments: Segments, nearer: Segments | None) -> tuple[Mask, Mask]:
    """Parts that see something at a level, and parts that are seen, each (p,)."""
    members = segments[-1].stop
    seeing = np.ones(members, bool)
    seen = np.ones(members, bool)
    if nearer is None:
        return seeing, seen
    for segment in segments:
        inner = [run for run in nearer if run.start in segment]
        seeing[inner[0].start : inner[0].stop] = False
        seen[inner[-1].start : inner[-1].stop] = False
    return seeing, seen


def _precedes(nearer: Segments | None, members: int) -> Mask:
    """(i, j): j comes before the nearer segment of i."""
    begins = np.arange(members)
    for run in nearer or ():
        begins[run.start : run.stop] = run.start
    before: Mask = np.arange(members)[None, :] < begins[:, None]
    return before


def _together(segments: Iterable[range]) -> Mask:
    """(o, p): owner and part share a segment."""
    label = np.concatenate([np.full(len(run), number) for number, run in enumerate(segments)])
    together: Mask = np.equal.outer(label, label)
    return together
