"""Living gangs and the pairs of them that can serve requests."""

from __future__ import annotations

import logging

from csps.services.scheduling.events.events import GangId, GangUp, InstanceId, make_id
from csps.services.scheduling.state.state import Gang, GangPair, Instance, Round, new_gang

_log = logging.getLogger(__name__)


class Gangs:
    """Living gangs, their instances, and the KV links between them."""

    def __init__(self, this_round: Round) -> None:
        self._round = this_round
        self._links: dict[tuple[GangId, GangId], None] = {}
        self._generation = 0
        self._numbers = {"sequence": 0, "step": 0}
        self.by_id: dict[GangId, Gang] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self.pairs: list[GangPair] = []
        """Pairs on which something can start, the oldest first."""
        self.unready_ns: int | None = None
        """Time since when there is no pair; None while there is one, and before the first batch."""
        self._standby = False

    def up(self, event: GangUp) -> Gang:
        """Add an attached gang."""
        assert event.gang not in self.by_id, f"gang {event.gang} came up twice"
        gang = new_gang(event, self._round.now_ns)
        self._generation = max(self._generation, event.generation)
        self.by_id[gang.id] = gang
        self.instances.update((instance.id, instance) for instance in gang.instances)
        if gang.may_prefill and gang.may_decode:
            self._links[gang.id, gang.id] = None
        self._pair()
        return gang

    def down(self, gang: Gang) -> None:
        """Remove a gang that is gone."""
        del self.by_id[gang.id]
        for instance in gang.instances:
            del self.instances[instance.id]
        for link in [link for link in self._links if gang.id in link]:
            del self._links[link]
        self._round.discard(gang.id)
        self._pair()

    def link(self, prefill: GangId, decode: GangId) -> None:
        """Note that KV can go from one gang to the other."""
        if prefill in self.by_id and decode in self.by_id:
            self._links[prefill, decode] = None
            self._pair()

    def unlink(self, prefill: GangId, decode: GangId) -> None:
        """Note that KV can no longer go there."""
        self._links.pop((prefill, decode), None)
        self._pair()

    def reset(self, gang: Gang, reason: str) -> None:
        """Reset a gang, once; nothing starts on it any more."""
        if not gang.resetting:
            gang.resetting = True
            _log.info("resetting %s gang %d: %s", gang.role, gang.id, reason)
            self._round.reset(gang.id, reason)
            self._pair()

    def note_heartbeat(self, instance: InstanceId) -> None:
        """Note that an instance decodes."""
        if (found := self.instances.get(instance)) is not None:
            found.last_heartbeat_ns = self._round.now_ns

    def lives(self, gang: Gang) -> bool:
        """Return whether the gang has not gone down."""
        return self.by_id.get(gang.id) is gang

    def next_id(self, kind: str) -> int:
        """Return an unused id for a sequence or a step."""
        self._numbers[kind] += 1
        return make_id(self._generation, self._numbers[kind])

    def stand_by(self, waits: bool) -> None:
        """Count no wait for gangs while another router serves with them. It ends when its requests
        do, which its own deadline bounds."""
        self._standby = waits
        if not waits and self.unready_ns is not None:
            self.unready_ns = self._round.now_ns

    @property
    def missing_ns(self) -> int | None:
        """Time since when there are no gangs that this router might serve with; None if there are
        some."""
        return None if self._standby else self.unready_ns

    def note_time(self) -> None:
        """Count the wait for gangs from the first batch on."""
        if not self.pairs and self.unready_ns is None:
            self.unready_ns = self._round.now_ns

    def _pair(self) -> None:
        pairs = []
        for link in self._links:
            prefill, decode = (self.by_id[gang] for gang in link)
            if not (prefill.resetting or decode.resetting):
                pairs.append(GangPair(prefill=prefill, decode=decode))
        if not pairs and (self.pairs or self.unready_ns is None):
            self.unready_ns = self._round.now_ns
        elif pairs:
            self.unready_ns = None
        self.pairs = pairs
        self._round.stale = True
