"""Who is there: the membership of the gangs, as the router learns it.

In production the answer comes from a registry that outlives replicas, by long poll; in tests and
in a single process from `StaticDirectory`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from csps.protocols.gang_members import GangMembers, GangRole


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The newest complete gang of each role; None while there is none."""

    prefill: GangMembers | None = None
    decode: GangMembers | None = None
    elastic: GangMembers | None = None

    def gang(self, role: GangRole) -> GangMembers | None:
        """The gang of `role`."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


class Directory(Protocol):
    """Answers when something has changed."""

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """Wait until the view is newer than `version`; returns its version and the view.

        -1 is older than every view. An implementation may return earlier with the same version,
        as a long poll does that has run into its time limit.
        """
        ...


class StaticDirectory:
    """A directory in this process's memory; `publish` replaces the view."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self._version, self._view = 0, view or ClusterView()
        self._changed = asyncio.Event()

    def publish(self, view: ClusterView) -> None:
        """Make `view` the current one and wake whoever waits for a change."""
        self._version, self._view = self._version + 1, view
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        while self._version <= version:
            await self._changed.wait()
        return self._version, self._view
