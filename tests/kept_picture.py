"""Pictures of gangs that have kept beginnings of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policy_view import Picture

from csps.services.scheduling.commands import Share
from csps.services.scheduling.ids import InstanceId, instance_id
from csps.services.scheduling.state import Request


class Kept(NamedTuple):
    """A `view.CachedView`."""

    tokens: int
    shares: tuple[Share, ...]
    taken: Mapping[InstanceId, int]


def kept(gang: int, tokens: int, *indices: int) -> Kept:
    """On these instances in equal parts, and in nobody's use."""
    cuts = [tokens * at // len(indices) for at in range(len(indices) + 1)]
    shares = tuple(
        Share(instance_id(gang, index), start, stop, origin=9)
        for index, start, stop in zip(indices, cuts, cuts[1:], strict=False)
    )
    return Kept(tokens, shares, {it.instance: it.tokens for it in shares})


@dataclass
class KeptPicture(Picture):
    """Of some requests, by their numbers and gangs (1 prefills, 2 decodes)."""

    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)

    def cached(self, request: object, gang: int) -> Kept | None:  # type: ignore[override]
        assert isinstance(request, Request)
        return self.kept.get((request.id, gang))
