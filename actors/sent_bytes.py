"""What one step sends, of all that its rank does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Who reads traces needs the names of their attributes, and not torch.
    from csps.actors.mesh import Mesh


class SentBytes:
    """By receiving rank, without what is sent while the step stands still."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._others = list(mesh.bytes_sent)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """What is sent inside is not of the step."""
        before = list(self._mesh.bytes_sent)
        try:
            yield
        finally:
            sent = zip(self._others, self._mesh.bytes_sent, before, strict=True)
            self._others = [others + now - then for others, now, then in sent]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Since it was made, in rank order of the gang."""
        return tuple(
            now - others for now, others in zip(self._mesh.bytes_sent, self._others, strict=True)
        )
