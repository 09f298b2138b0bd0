"""A router's right to command gangs: its generation, and taking gangs over under it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from csps.protocols.errors import ConfigError, RanksHeld, Superseded
from csps.protocols.gang_client import GangClient
from csps.services.cluster.generations import Generations
from csps.services.cluster.precedence import Precedence

_log = logging.getLogger(__name__)


class Fencing:
    """Attaches to gangs under a generation that grows whenever another router was newer."""

    def __init__(self, generations: Generations, *, secret: bytes, router_id: str) -> None:
        self._generations = generations
        self._precedence = Precedence(generations)
        self._secret, self._router_id = secret, router_id
        self._attachments = 0
        self.generation = 0
        """0 until one is granted, and again from the moment that another router is newer."""

    async def go_first(self, wanted: bool) -> None:
        """Whether this router goes before newer ones; due every `fence.KEEP_ALIVE_S`."""
        await self._precedence.renew(self.generation if wanted else 0)

    async def attach(
        self,
        gangs: Sequence[GangClient],
        attached: Callable[[GangClient], None],
        *,
        model: str | None = None,
    ) -> None:
        """Take over those of the gangs that answer, or none while another router holds any.

        Args:
            attached: called with each gang that was taken over; the others are hung up on.
            model: fingerprint that gangs must have, if any.

        Raises:
            RanksHeld: another router is alive, and holds one of them or goes first.
            Superseded: another router is newer; next time this one will be.
            FaultError, ConfigError: a gang cannot be reached, or used.
        """
        if not self.generation:
            self.generation = await self._generations.claim()
            _log.info("router generation %d", self.generation)
        await self._precedence.check(self.generation, time.monotonic())
        taken: set[GangClient] = set()
        try:
            errors = await _each(lambda gang: self._ask(gang, model), gangs)
            # Of a router that is alive not one gang may be taken: it would lose the others' work.
            self._check_newest(errors.values())
            free = [gang for gang in gangs if gang not in errors]
            errors |= await _each(lambda gang: gang.attach(self.generation), free)
            for gang in free:
                if gang not in errors:
                    taken.add(gang)
                    attached(gang)
            self._check_newest(errors.values())
        finally:
            for gang in gangs:
                if gang not in taken:
                    gang.hang_up("not attached")
        for error in errors.values():
            raise error

    def _check_newest(self, errors: Iterable[BaseException]) -> None:
        for error in errors:
            if isinstance(error, Superseded):
                self.generation = 0
            if isinstance(error, RanksHeld | Superseded):
                raise error

    async def _ask(self, gang: GangClient, model: str | None) -> None:
        """Whether the gang could be taken over, and used: one that could not is never held, not
        even for a moment, in which a router that could use it would be refused."""
        self._attachments += 1
        # A new name each time, so that a rank which this router was attached to before drops
        # what it still does for it.
        name = f"{self._router_id}.{self._attachments}"
        await gang.connect(secret=self._secret, router_id=name)
        await gang.check_free(self.generation)
        await gang.describe()
        found = gang.descriptions[0].model_fingerprint
        if model is not None and found != model:
            raise ConfigError(
                f"{gang.role} gang {gang.gang_id} serves another model, {found}, than the requests "
                f"began with, {model}"
            )


async def _each(
    work: Callable[[GangClient], Awaitable[None]], gangs: Sequence[GangClient]
) -> dict[GangClient, BaseException]:
    """Do it with all gangs at once; what went wrong with which."""
    results = await asyncio.gather(*map(work, gangs), return_exceptions=True)
    return {gang: it for gang, it in zip(gangs, results, strict=True) if it is not None}
