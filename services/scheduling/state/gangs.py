"""Which gangs there are, and which pairs of them can serve a request."""

from __future__ import annotations

from csps.services.scheduling.events.commands import ResetGang
from csps.services.scheduling.events.events import GangId, GangUp, InstanceId, make_id
from csps.services.scheduling.state.state import Gang, GangPair, Instance, Round, new_gang


class Gangs:
    """Living gangs, their instances, and the connections for KV between them."""

    def __init__(self, this_round: Round) -> None:
        self._round = this_round
        self._links: dict[tuple[GangId, GangId], None] = {}
        self._generation = 0
        self._numbers = {"sequence": 0, "step": 0}
        self.by_id: dict[GangId, Gang] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self.pairs: list[GangPair] = []
        """What something can be started on, the oldest first."""
        self.unready_ns: int | None = None
        """Since when there is none; None while there is one, and before the first batch."""

    def up(self, event: GangUp) -> Gang:
        """A gang was attached."""
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
        """A gang is gone."""
        del self.by_id[gang.id]
        for instance in gang.instances:
            del self.instances[instance.id]
        for link in [it for it in self._links if gang.id in it]:
            del self._links[link]
        self._round.discard(gang.id)
        self._pair()

    def link(self, prefill: GangId, decode: GangId) -> None:
        """KV can go from one to the other."""
        if prefill in self.by_id and decode in self.by_id:
            self._links[prefill, decode] = None
            self._pair()

    def unlink(self, prefill: GangId, decode: GangId) -> None:
        """It cannot any more."""
        self._links.pop((prefill, decode), None)
        self._pair()

    def reset(self, gang: Gang, reason: str) -> None:
        """Have the gang ended, once; nothing is started on it any more."""
        if not gang.resetting:
            gang.resetting = True
            self._round.emit(ResetGang(gang=gang.id, reason=reason))
            self._pair()

    def note_heartbeat(self, instance: InstanceId) -> None:
        """An instance gave a sign of life."""
        if (it := self.instances.get(instance)) is not None:
            it.last_heartbeat_ns = self._round.now_ns

    def lives(self, gang: Gang) -> bool:
        """The gang has not gone down."""
        return self.by_id.get(gang.id) is gang

    def next_id(self, kind: str) -> int:
        """An id for a sequence or a step that never was one."""
        self._numbers[kind] += 1
        return make_id(self._generation, self._numbers[kind])

    def note_time(self) -> None:
        """Count the wait for gangs from the first batch on."""
        if not self.pairs and self.unready_ns is None:
            self.unready_ns = self._round.now_ns

    def _pair(self) -> None:
        pairs = []
        for link in self._links:
            prefill, decode = (self.by_id[it] for it in link)
            if not (prefill.resetting or decode.resetting):
                pairs.append(GangPair(prefill=prefill, decode=decode))
        if not pairs and (self.pairs or self.unready_ns is None):
            self.unready_ns = self._round.now_ns
        elif pairs:
            self.unready_ns = None
        self.pairs = pairs
        self._round.stale = True
