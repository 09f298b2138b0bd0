"""Which prompts the gangs have kept KV of, who uses it, and what goes when room is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from csps.protocols.core.placement import Span
from csps.services.scheduling.events.commands import Evict, PlacedSlice, Retain
from csps.services.scheduling.events.events import GangId, InstanceId, Retained, SequenceId, gang_of
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.events.slices import tokens_on, within
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.ledger import Ledger
from csps.services.scheduling.state.prefix_tree import Hashes, PrefixTree
from csps.services.scheduling.state.state import Cached, Gang, Instance, PrefixRef, Request, Round


class PrefixCache:
    """One tree a gang.

    Slots of kept KV are taken (`Instance.used`), and free for whoever needs them
    (`Instance.reclaimable`) while nobody reads what is in them. They are empty, so that a
    reservation finds them, when the instance has said so.
    """

    def __init__(self, this_round: Round, gangs: Gangs, settings: ReuseSettings) -> None:
        self._round, self._gangs, self.settings = this_round, gangs, settings
        self._most = Fraction(settings.max_share).limit_denominator(1000)
        self.trees: dict[GangId, PrefixTree] = {}
        self.ledger = Ledger()
        """Slots of sequences that are over where they hold them, what is to go included."""
        self._slots: dict[InstanceId, int] = {}
        """Their sums."""
        self._pending_acks: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        """How often an instance has still to say what it has left of a sequence."""

    def add(self, gang: Gang) -> None:
        """A gang has come up."""
        self.ledger.add(gang)
        self.trees[gang.id] = PrefixTree(self.settings.block_tokens)
        self._slots.update((instance.id, 0) for instance in gang.instances)

    def drop(self, gang: Gang) -> None:
        """A gang is gone with all that it kept."""
        self.ledger.drop(gang)
        del self.trees[gang.id]
        for instance in gang.instances:
            del self._slots[instance.id]
        self._pending_acks = {of: it for of, it in self._pending_acks.items() if of[0] != gang.id}

    # --- reusing -------------------------------------------------------------------------------

    def longest(self, request: Request, gang: GangId) -> Cached | None:
        """What a gang has of a waiting request's prompt, as much as can be reused; None if that is
        nothing. After a fault a request computes all of its prompt."""
        if not request.hashes or request.attempts:
            return None
        version = self.trees[gang].version
        known = request.cached_by_gang.get(gang)  # a policy asks several times in a round
        if known is None or known[0] != version:
            found = self.beginning(request, gang, request.prompt_tokens - 1)
            known = request.cached_by_gang[gang] = version, found
        return known[1]

    def beginning(self, request: Request, gang: GangId, most: int) -> Cached | None:
        """The same, of the prompt's first tokens."""
        block = self.settings.block_tokens
        tree = self.trees[gang]
        path, matched = tree.match(request.hashes[: most // block])
        if not matched:
            return None
        tokens = matched * block
        return Cached(tokens, tree.slices(path, tokens), tree.unreferenced(path, tokens))

    def ref(self, request: Request, gang: Gang, tokens: int) -> PrefixRef:
        """Keep what is reused from going until `unref`."""
        hashes = request.hashes[: tokens // self.settings.block_tokens]
        used = PrefixRef(gang, self.trees[gang.id].ref(hashes))
        self._count(gang)
        return used

    def unref(self, ref: PrefixRef) -> None:
        """Nothing reads it any more."""
        if self._gangs.lives(ref.gang):
            self.trees[ref.gang.id].unref(ref.segment)
            self._evict_excess(ref.gang)
            self._count(ref.gang)
            self._round.stale = True

    # --- keeping -------------------------------------------------------------------------------

    def may_retain(self, request: Request, cached: int) -> bool:
        """Whether there are whole blocks behind those that a request reuses."""
        blocks = min(len(request.hashes), request.prompt_tokens // self.settings.block_tokens)
        return self.settings.enabled and blocks * self.settings.block_tokens > cached

    def prefilled(
        self, gang: Gang, source: SequenceId, hashes: Hashes, slices: tuple[PlacedSlice, ...]
    ) -> None:
        """A sequence has left KV where it was computed to be decoded elsewhere.

        Args:
            hashes: of its prompt; none if the KV is not good.
            shares: where all lies that it has computed.
        """
        self._take(source, tokens_on(slices))
        start, stop = (
            min(kv_slice.start for kv_slice in slices),
            max(kv_slice.stop for kv_slice in slices),
        )
        kept = self._insert(gang, source, hashes, slices)
        before, behind = range(start, kept.start), range(kept.stop, stop)
        for rest in (before, behind) if kept else (range(start, stop),):
            if rest:
                self._command(Evict, gang, source, rest)
        self._update(gang)

    def decoded(
        self,
        gang: Gang,
        source: SequenceId,
        hashes: Hashes,
        slices: tuple[PlacedSlice, ...],
        slots: dict[InstanceId, int],
    ) -> None:
        """A sequence is over where it was computed and decoded.

        Args:
            hashes: of prompt and answer.
            shares: where what it has computed lies, and may lie.
            slots: that it has; they are this ledger's from now on.
        """
        self._take(source, slots)
        self._command(Retain, gang, source, self._insert(gang, source, hashes, slices))
        self._update(gang)

    def _insert(
        self, gang: Gang, source: SequenceId, hashes: Hashes, slices: tuple[PlacedSlice, ...]
    ) -> range:
        """Which positions of a sequence are kept."""
        start, stop = (
            min(kv_slice.start for kv_slice in slices),
            len(hashes) * self.settings.block_tokens,
        )
        if stop <= start:
            return range(0)
        named = (PlacedSlice.of(kv_slice.instance, kv_slice.span, source) for kv_slice in slices)
        return self.trees[gang.id].insert(hashes, start, within(named, Span(start, stop)))

    def retained(self, event: Retained) -> None:
        """An instance has said what it has left of a sequence."""
        source, instance = event.sequence_id, event.instance
        of = gang_of(instance), source
        owed = self._pending_acks.get(of)
        if owed is None or not owed.get(instance):
            return
        owed[instance] -= 1
        before = self.ledger.slots_of(source).get(instance, 0)
        self.ledger.shrink(source, instance, event.tokens)
        self._slots[instance] -= before - self.ledger.slots_of(source).get(instance, 0)
        gang = self._gangs.by_id[of[0]]
        if not any(owed.values()):
            del self._pending_acks[of]
            gang.owing.pop(source, None)
        self._count(gang)
        self._round.stale = True

    # --- making room ---------------------------------------------------------------------------

    def make_room(self, needed: Mapping[InstanceId, int]) -> bool:
        """Give up what has to go until so many slots are empty; false if they are not yet."""
        missing: dict[GangId, dict[InstanceId, int]] = {}
        for instance, count in needed.items():
            it = self._gangs.instances[instance]
            if count > it.empty_slots:
                leaving = self._slots[instance] - self.trees[it.gang.id].cached_tokens.get(
                    instance, 0
                )
                missing.setdefault(it.gang.id, {})[instance] = count - it.empty_slots - leaving
        for gang, counts in missing.items():
            self._evict(self._gangs.by_id[gang], counts)
        return not missing

    def _evict_excess(self, gang: Gang) -> None:
        """Give up what is too much for a gang."""
        tree = self.trees[gang.id]
        excess = {
            instance.id: tree.cached_tokens.get(instance.id, 0)
            - tree.referenced_tokens.get(instance.id, 0)
            - int(self._most * instance.capacity)
            for instance in gang.instances
        }
        if any(it > 0 for it in excess.values()):
            self._evict(gang, excess)

    def _evict(self, gang: Gang, needed: Mapping[InstanceId, int]) -> None:
        for source, positions in self.trees[gang.id].evict(needed):
            self._command(Evict, gang, source, positions)
        self._count(gang)

    # --- books ---------------------------------------------------------------------------------

    def _take(self, source: SequenceId, slots: dict[InstanceId, int]) -> None:
        self.ledger.extend(source, {it: n for it, n in slots.items() if n})
        for instance, count in slots.items():
            self._slots[instance] += count

    def _command(
        self, kind: type[Retain | Evict], gang: Gang, source: SequenceId, positions: range
    ) -> None:
        start, stop = positions.start, positions.stop
        self._round.emit(kind(gang=gang.id, sequence_id=source, start=start, stop=stop))
        owed = self._pending_acks.setdefault((gang.id, source), {it.id: 0 for it in gang.instances})
        for instance in owed:
            owed[instance] += 1
        gang.owing.setdefault(source, self._round.now_ns)

    def _update(self, gang: Gang) -> None:
        self._evict_excess(gang)
        self._count(gang)
        self._round.stale = True

    def _count(self, gang: Gang) -> None:
        used = self.trees[gang.id].referenced_tokens
        for instance in gang.instances:
            instance.reclaimable = self._slots[instance.id] - used.get(instance.id, 0)

    def check_known(self, request: Request) -> None:
        """Assert that what a request knows is so, or known to be out of date."""
        for gang, (version, found) in request.cached_by_gang.items():
            if gang in self.trees and version == self.trees[gang].version:
                most = request.prompt_tokens - 1
                assert found == self.beginning(request, gang, most), "what is kept of a prompt"

    def check(self, uses: Iterable[PrefixRef], instances: Iterable[Instance]) -> None:
        """Assert that trees, slots and what instances have to say agree."""
        in_use = list(uses)
        for gang_id, tree in self.trees.items():
            tree.check([it.segment for it in in_use if it.gang.id == gang_id])
        sums = self.ledger.sums(instances)
        assert sums == self._slots, "slots of kept KV"
        kept: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        for gang_id, tree in self.trees.items():
            for segment in tree:
                mine = kept.setdefault((gang_id, segment.source), {})
                for instance, tokens in tokens_on(segment.slices).items():
                    mine[instance] = mine.get(instance, 0) + tokens
        for of, tokens_of in kept.items():
            everywhere = self.ledger.slots_of(of[1]).items()
            held = {instance: n for instance, n in everywhere if gang_of(instance) == of[0]}
            assert all(held.get(it, 0) >= n for it, n in tokens_of.items()), "kept without slots"
            assert of in self._pending_acks or held == tokens_of, "slots of what is gone"
        for gang in self._gangs.by_id.values():
            for it in gang.instances:
                used = self.trees[gang.id].referenced_tokens.get(it.id, 0)
                assert it.reclaimable == self._slots[it.id] - used >= 0, "reclaimable slots"
