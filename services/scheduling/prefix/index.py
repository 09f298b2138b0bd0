"""Which prompts the gangs have kept KV of, who uses it, and what goes when room is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from csps.protocols.span import Span
from csps.services.scheduling.commands import Keep, Release, Share
from csps.services.scheduling.events import Kept
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import GangId, InstanceId, SequenceId, gang_of
from csps.services.scheduling.ledger import Ledger
from csps.services.scheduling.prefix.settings import ReuseSettings
from csps.services.scheduling.prefix.tree import Hashes, Tree
from csps.services.scheduling.shares import tokens_on, within
from csps.services.scheduling.state import Cached, Gang, Instance, Request, Use
from csps.services.scheduling.turn import Turn


class PrefixIndex:
    """One tree a gang.

    Slots of kept KV are taken (`Instance.used`), and free for whoever needs them
    (`Instance.reclaimable`) while nobody reads what is in them. They are empty, so that a
    reservation finds them, when the instance has said so.
    """

    def __init__(self, turn: Turn, gangs: Gangs, settings: ReuseSettings) -> None:
        self._turn, self._gangs, self.settings = turn, gangs, settings
        self._most = Fraction(settings.max_share).limit_denominator(1000)
        self.trees: dict[GangId, Tree] = {}
        self.ledger = Ledger()
        """Slots of sequences that are over where they hold them, what is to go included."""
        self._held: dict[InstanceId, int] = {}
        """Their sums."""
        self._owed: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        """How often an instance has still to say what it has left of a sequence."""

    def add(self, gang: Gang) -> None:
        """A gang has come up."""
        self.ledger.add(gang)
        self.trees[gang.id] = Tree(self.settings.block_tokens)
        self._held.update((it.id, 0) for it in gang.instances)

    def drop(self, gang: Gang) -> None:
        """A gang is gone with all that it kept."""
        self.ledger.drop(gang)
        del self.trees[gang.id]
        for instance in gang.instances:
            del self._held[instance.id]
        self._owed = {of: it for of, it in self._owed.items() if of[0] != gang.id}

    # --- reusing -------------------------------------------------------------------------------

    def longest(self, request: Request, gang: GangId) -> Cached | None:
        """What a gang has of a waiting request's prompt, as much as can be reused; None if that is
        nothing. After a fault a request computes all of its prompt."""
        if not request.hashes or request.attempts:
            return None
        version = self.trees[gang].version
        known = request.kept.get(gang)  # a policy asks several times in a round
        if known is None or known[0] != version:
            found = self.beginning(request, gang, request.prompt_tokens - 1)
            known = request.kept[gang] = version, found
        return known[1]

    def beginning(self, request: Request, gang: GangId, most: int) -> Cached | None:
        """The same, of the prompt's first tokens."""
        block = self.settings.block_tokens
        tree = self.trees[gang]
        path, matched = tree.match(request.hashes[: most // block])
        if not matched:
            return None
        tokens = matched * block
        return Cached(tokens, tree.shares(path, tokens), tree.unused(path, tokens))

    def use(self, request: Request, gang: Gang, tokens: int) -> Use:
        """Keep what is reused from going until `leave`."""
        hashes = request.hashes[: tokens // self.settings.block_tokens]
        used = Use(gang, self.trees[gang.id].use(hashes))
        self._count(gang)
        return used

    def leave(self, use: Use) -> None:
        """Nothing reads it any more."""
        if self._gangs.lives(use.gang):
            self.trees[use.gang.id].leave(use.segment)
            self._keep_within_share(use.gang)
            self._count(use.gang)
            self._turn.stale = True

    # --- keeping -------------------------------------------------------------------------------

    def may_stay(self, request: Request, cached: int) -> bool:
        """Whether there are whole blocks behind those that a request reuses."""
        blocks = min(len(request.hashes), request.prompt_tokens // self.settings.block_tokens)
        return self.settings.enabled and blocks * self.settings.block_tokens > cached

    def prefilled(
        self, gang: Gang, origin: SequenceId, hashes: Hashes, shares: tuple[Share, ...]
    ) -> None:
        """A sequence has left KV where it was computed to be decoded elsewhere.

        Args:
            hashes: of its prompt; none if the KV is not good.
            shares: where all lies that it has computed.
        """
        self._take(origin, tokens_on(shares))
        start, stop = min(it.start for it in shares), max(it.stop for it in shares)
        kept = self._insert(gang, origin, hashes, shares)
        before, behind = range(start, kept.start), range(kept.stop, stop)
        for rest in (before, behind) if kept else (range(start, stop),):
            if rest:
                self._tell(Release, gang, origin, rest)
        self._settle(gang)

    def decoded(
        self,
        gang: Gang,
        origin: SequenceId,
        hashes: Hashes,
        shares: tuple[Share, ...],
        slots: dict[InstanceId, int],
    ) -> None:
        """A sequence is over where it was computed and decoded.

        Args:
            hashes: of prompt and answer.
            shares: where what it has computed lies, and may lie.
            slots: that it has; they are this ledger's from now on.
        """
        self._take(origin, slots)
        self._tell(Keep, gang, origin, self._insert(gang, origin, hashes, shares))
        self._settle(gang)

    def _insert(
        self, gang: Gang, origin: SequenceId, hashes: Hashes, shares: tuple[Share, ...]
    ) -> range:
        """Which positions of a sequence are kept."""
        start, stop = min(it.start for it in shares), len(hashes) * self.settings.block_tokens
        if stop <= start:
            return range(0)
        named = (Share.of(it.instance, it.span, origin) for it in shares)
        return self.trees[gang.id].insert(hashes, start, within(named, Span(start, stop)))

    def kept(self, event: Kept) -> None:
        """An instance has said what it has left of a sequence."""
        origin, instance = event.sequence, event.instance
        of = gang_of(instance), origin
        owed = self._owed.get(of)
        if owed is None or not owed.get(instance):
            return
        owed[instance] -= 1
        before = self.ledger.held(origin).get(instance, 0)
        self.ledger.lower(origin, instance, event.tokens)
        self._held[instance] -= before - self.ledger.held(origin).get(instance, 0)
        gang = self._gangs.by_id[of[0]]
        if not any(owed.values()):
            del self._owed[of]
            gang.owing.pop(origin, None)
        self._count(gang)
        self._turn.stale = True

    # --- making room ---------------------------------------------------------------------------

    def make_room(self, needed: Mapping[InstanceId, int]) -> bool:
        """Give up what has to go until so many slots are empty; false if they are not yet."""
        missing: dict[GangId, dict[InstanceId, int]] = {}
        for instance, count in needed.items():
            it = self._gangs.instances[instance]
            if count > it.empty_slots:
                leaving = self._held[instance] - self.trees[it.gang.id].kept.get(instance, 0)
                missing.setdefault(it.gang.id, {})[instance] = count - it.empty_slots - leaving
        for gang, counts in missing.items():
            self._evict(self._gangs.by_id[gang], counts)
        return not missing

    def _keep_within_share(self, gang: Gang) -> None:
        """Give up what is too much for a gang."""
        tree = self.trees[gang.id]
        excess = {
            it.id: tree.kept.get(it.id, 0) - tree.used.get(it.id, 0) - int(self._most * it.capacity)
            for it in gang.instances
        }
        if any(it > 0 for it in excess.values()):
            self._evict(gang, excess)

    def _evict(self, gang: Gang, needed: Mapping[InstanceId, int]) -> None:
        for origin, positions in self.trees[gang.id].evict(needed):
            self._tell(Release, gang, origin, positions)
        self._count(gang)

    # --- books ---------------------------------------------------------------------------------

    def _take(self, origin: SequenceId, slots: dict[InstanceId, int]) -> None:
        self.ledger.extend(origin, {it: n for it, n in slots.items() if n})
        for instance, count in slots.items():
            self._held[instance] += count

    def _tell(
        self, kind: type[Keep | Release], gang: Gang, origin: SequenceId, positions: range
    ) -> None:
        start, stop = positions.start, positions.stop
        self._turn.emit(kind(gang=gang.id, sequence=origin, start=start, stop=stop))
        owed = self._owed.setdefault((gang.id, origin), {it.id: 0 for it in gang.instances})
        for instance in owed:
            owed[instance] += 1
        gang.owing.setdefault(origin, self._turn.now_ns)

    def _settle(self, gang: Gang) -> None:
        self._keep_within_share(gang)
        self._count(gang)
        self._turn.stale = True

    def _count(self, gang: Gang) -> None:
        used = self.trees[gang.id].used
        for it in gang.instances:
            it.reclaimable = self._held[it.id] - used.get(it.id, 0)

    def check_known(self, request: Request) -> None:
        """Assert that what a request knows is so, or known to be out of date."""
        for gang, (version, found) in request.kept.items():
            if gang in self.trees and version == self.trees[gang].version:
                most = request.prompt_tokens - 1
                assert found == self.beginning(request, gang, most), "what is kept of a prompt"

    def check(self, uses: Iterable[Use], instances: Iterable[Instance]) -> None:
        """Assert that trees, slots and what instances have to say agree."""
        in_use = list(uses)
        for number, tree in self.trees.items():
            tree.check([it.segment for it in in_use if it.gang.id == number])
        sums = self.ledger.sums(instances)
        assert sums == self._held, "slots of kept KV"
        kept: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        for number, tree in self.trees.items():
            for segment in tree:
                mine = kept.setdefault((number, segment.origin), {})
                for instance, tokens in tokens_on(segment.shares).items():
                    mine[instance] = mine.get(instance, 0) + tokens
        for of, tokens_of in kept.items():
            everywhere = self.ledger.held(of[1]).items()
            held = {instance: n for instance, n in everywhere if gang_of(instance) == of[0]}
            assert all(held.get(it, 0) >= n for it, n in tokens_of.items()), "kept without slots"
            assert of in self._owed or held == tokens_of, "slots of what is gone"
        for gang in self._gangs.by_id.values():
            for it in gang.instances:
                used = self.trees[gang.id].used.get(it.id, 0)
                assert it.reclaimable == self._held[it.id] - used >= 0, "reclaimable slots"
