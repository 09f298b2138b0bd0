"""Prefix cache: retained KV of all gangs, its references, and eviction when slots are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from csps.protocols.core.placement import KvSlice, Span, tokens_on, within
from csps.protocols.gang.messages import EvictKv, RestoreKv, RetainKv, SaveKv
from csps.services.scheduling.events.commands import ToFiles, ToGang
from csps.services.scheduling.events.events import (
    GangId,
    InstanceId,
    Retained,
    SequenceId,
    TenantId,
    gang_of,
    index_of,
)
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.ledger import Ledger
from csps.services.scheduling.state.prefix_tree import Hashes, PrefixTree, Segment
from csps.services.scheduling.state.saved_runs import Restorable, SavedRuns
from csps.services.scheduling.state.state import Cached, Gang, Instance, PrefixRef, Request, Round


class PrefixCache:
    """Prefix trees of all gangs, one each.

    Slots of retained KV are taken (`Instance.used`) but reclaimable (`Instance.reclaimable`) while
    nobody reads them. A reservation finds them empty only after the instance has confirmed
    eviction.
    """

    def __init__(self, this_round: Round, gangs: Gangs, settings: ReuseSettings) -> None:
        self._round, self._gangs, self.settings = this_round, gangs, settings
        self._most = Fraction(settings.max_share).limit_denominator(1000)
        self.trees: dict[GangId, PrefixTree] = {}
        self.ledger = Ledger()
        """Slots of sequences that are over where they hold them, those being evicted included. Of
        slots with several names, the last one counts."""
        self._slots: dict[InstanceId, int] = {}
        """Sums of the ledger by instance."""
        self._pending_acks: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        """Answers that each instance still owes about a sequence."""
        self._permilles: dict[TenantId, int] = {}
        """Shares of the tenants that have one."""
        self.saved: dict[GangId, SavedRuns] = {}
        """What gangs have in files, by gang that may have some."""
        self._restoring: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        """Slots that files are read into, by the sequence that has them."""

    def add(self, gang: Gang) -> None:
        """Add a gang that has come up."""
        self.ledger.add(gang)
        self.trees[gang.id] = PrefixTree(self.settings.block_tokens)
        self._slots.update((instance.id, 0) for instance in gang.instances)
        if self.settings.files_bytes and (gang.may_prefill or self.settings.decode_rest_tokens):
            block_bytes = self.settings.block_tokens * max(1, gang.kv_bytes_per_token)
            # Ranks on machines of their own have as many files each.
            most = len(gang.instances) * self.settings.files_bytes // block_bytes
            self.saved[gang.id] = SavedRuns(gang.id, self.settings.block_tokens, most)

    def drop(self, gang: Gang) -> None:
        """Drop a gang with all that it retained."""
        self.ledger.drop(gang)
        del self.trees[gang.id]
        self.saved.pop(gang.id, None)
        for instance in gang.instances:
            del self._slots[instance.id]
        self._restoring = {of: slots for of, slots in self._restoring.items() if of[0] != gang.id}
        self._pending_acks = {
            of: acks for of, acks in self._pending_acks.items() if of[0] != gang.id
        }

    # --- reuse ---

    def longest(self, request: Request, gang: GangId) -> Cached | None:
        """Return the longest reusable beginning of a waiting request's prompt on a gang; None if
        there is none. After a fault, a request computes all of its prompt."""
        if not request.hashes or request.attempts:
            return None
        version = self.trees[gang].version
        known = request.cached_by_gang.get(gang)  # policies ask several times in a round
        if known is None or known[0] != version:
            found = self.beginning(request, gang, request.prompt_tokens - 1)
            known = request.cached_by_gang[gang] = version, found
        return known[1]

    def beginning(self, request: Request, gang: GangId, most: int) -> Cached | None:
        """Return what a gang has of the prompt's first `most` tokens."""
        block = self.settings.block_tokens
        tree = self.trees[gang]
        path, matched = tree.match(request.hashes[: most // block])
        if not matched:
            return None
        tokens = matched * block
        return Cached(tokens, tree.slices(path, tokens), tree.unreferenced(path, tokens))

    def ref(self, request: Request, gang: Gang, tokens: int) -> PrefixRef:
        """Protect the first tokens of a prompt from eviction until `unref`."""
        hashes = request.hashes[: tokens // self.settings.block_tokens]
        used = PrefixRef(gang, self.trees[gang.id].ref(hashes))
        self._count(gang)
        return used

    def unref(self, ref: PrefixRef) -> None:
        """Release a reference."""
        if self._gangs.lives(ref.gang):
            self.trees[ref.gang.id].unref(ref.segment)
            self._evict_excess(ref.gang)
            self._count(ref.gang)
            self._round.stale = True

    # --- retention ---

    def may_retain(self, request: Request, cached: int) -> bool:
        """Return whether the prompt has whole blocks behind those that the request reuses."""
        blocks = min(len(request.hashes), request.prompt_tokens // self.settings.block_tokens)
        return self.settings.enabled and blocks * self.settings.block_tokens > cached

    def may_retain_answer(self, request: Request, cached: int) -> bool:
        """Return whether prompt and answer may have whole blocks behind those that the request
        reuses: a short turn fills none by itself, but its answer does."""
        tokens = request.prompt_tokens + request.output_tokens - 1  # the last one has no KV
        blocks = tokens // self.settings.block_tokens
        reuses = self.settings.enabled and bool(request.hashes)
        return reuses and blocks * self.settings.block_tokens > cached

    def prefilled(
        self,
        gang: Gang,
        source: SequenceId,
        request: Request,
        hashes: Hashes,
        slices: tuple[KvSlice, ...],
        reused: PrefixRef | None,
    ) -> None:
        """Retain what a sequence has computed where it is not decoded.

        Args:
            request: that it served.
            hashes: of its prompt; empty if the KV is corrupted.
            slices: placement of all that it has computed.
            reused: reference to what it has reused, if anything.
        """
        self._take(source, tokens_on(slices))
        stop = max(kv_slice.stop for kv_slice in slices)
        retained = self._insert(gang, source, request, hashes, slices)
        self._save(gang, source, request, hashes, retained, slices)
        left = self._take_over(gang, source, reused) if retained else []
        # The ranks have retained all that the sequence has computed and reused.
        start = 0 if reused is not None else min(kv_slice.start for kv_slice in slices)
        first = left[-1].start if left else retained.start
        before, behind = range(start, first), range(retained.stop, stop)
        for rest in (before, behind) if retained else (range(start, stop),):
            if rest:
                self._command(EvictKv, gang, source, rest)
        self._evict_left(gang, left)
        self._update(gang)

    def decoded(
        self,
        gang: Gang,
        source: SequenceId,
        request: Request,
        hashes: Hashes,
        slices: tuple[KvSlice, ...],
        slots: dict[InstanceId, int],
        reused: PrefixRef | None,
    ) -> None:
        """Retain what a sequence has computed where it was decoded.

        Args:
            request: that it served.
            hashes: of prompt and answer.
            slices: placement of what it has computed, or may have.
            slots: of the sequence; this ledger takes them over.
            reused: reference to what it has reused, if anything.
        """
        self._take(source, slots)
        retained = self._insert(gang, source, request, hashes, slices)
        left = self._take_over(gang, source, reused) if retained else []
        start = left[-1].start if left else retained.start
        self._command(RetainKv, gang, source, range(start, retained.stop))
        self._save(gang, source, request, hashes, retained, slices)
        self._evict_left(gang, left)
        self._update(gang)

    def _take_over(self, gang: Gang, heir: SequenceId, reused: PrefixRef | None) -> list[Segment]:
        """Let a sequence take over what it has reused (`PrefixTree.take_over`). Its instances share
        the slots already, so that no message has to come before the next request."""
        if reused is None:
            return []

        def answered(source: SequenceId) -> bool:
            return (gang.id, source) not in self._pending_acks

        left = self.trees[gang.id].take_over(heir, reused.segment, answered)
        for segment in left:
            self.ledger.transfer(segment.source, heir, tokens_on(segment.slices))
        return left

    def _evict_left(self, gang: Gang, left: Iterable[Segment]) -> None:
        """Free the former names of KV. No slot is freed: it has another name."""
        for segment in left:
            stop = self.trees[gang.id].stop(segment)
            self._command(EvictKv, gang, segment.source, range(segment.start, stop))

    def _insert(
        self,
        gang: Gang,
        source: SequenceId,
        request: Request,
        hashes: Hashes,
        slices: tuple[KvSlice, ...],
    ) -> range:
        """Insert a sequence's KV into the tree; return the positions that are retained."""
        start, stop = (
            min(kv_slice.start for kv_slice in slices),
            len(hashes) * self.settings.block_tokens,
        )
        if stop <= start:
            return range(0)
        named = (KvSlice.of(kv_slice.instance, kv_slice.span, source) for kv_slice in slices)
        if request.kv_permille < 1000:
            self._permilles[request.tenant] = request.kv_permille
        retained = within(named, Span(start, stop))
        return self.trees[gang.id].insert(hashes, start, retained, request.tenant)

    def retained(self, event: Retained) -> None:
        """Note what an instance has left of a sequence."""
        source, instance = event.sequence_id, event.instance
        of = gang_of(instance), source
        acks = self._pending_acks.get(of)
        if acks is None or not acks.get(instance):
            return
        acks[instance] -= 1
        before = self.ledger.slots_of(source).get(instance, 0)
        self.ledger.shrink(source, instance, event.tokens)
        self._slots[instance] -= before - self.ledger.slots_of(source).get(instance, 0)
        gang = self._gangs.by_id[of[0]]
        if not any(acks.values()):
            self._owes_nothing(gang, source)
        self._count(gang)
        self._round.stale = True

    def owing(self, gang: Gang, source: SequenceId) -> list[InstanceId]:
        """Return the instances that have not acknowledged what a gang is to do with a sequence's
        KV."""
        acks = self._pending_acks.get((gang.id, source), {})
        return [instance for instance, count in acks.items() if count]

    # --- files ---

    def _save(
        self,
        gang: Gang,
        source: SequenceId,
        request: Request,
        hashes: Hashes,
        retained: range,
        slices: tuple[KvSlice, ...],
    ) -> None:
        """Have what a sequence retains written to files, as far as it is in none."""
        if (saved := self.saved.get(gang.id)) is None or not retained:
            return
        for run in saved.new_runs(hashes, retained.start, retained.stop, slices):
            message = SaveKv(
                sequence_id=source, run=run, tenant=request.tenant, permille=request.kv_permille
            )
            self._round.emit(ToFiles(gang=gang.id, message=message))

    def restorable(self, request: Request, gang: Gang) -> Restorable | None:
        """Return what files have of a waiting request's prompt behind what its gang has cached;
        None if nothing."""
        saved = self.saved.get(gang.id)
        if not saved:
            return None
        hashes = request.hashes[: (request.prompt_tokens - 1) // self.settings.block_tokens]
        _, cached = self.trees[gang.id].match(hashes)
        return saved.behind(hashes, cached)

    def may_cache(self, gang: Gang, slices: tuple[KvSlice, ...]) -> bool:
        """Return whether the share for retained KV has room for so much on each instance."""
        return all(
            tokens <= int(self._most * self._gangs.instances[instance].capacity)
            for instance, tokens in tokens_on(slices).items()
        )

    def restore(self, gang: Gang, source: SequenceId, found: Restorable) -> None:
        """Have files read into slots, which are empty, under the name of a new sequence."""
        slots = tokens_on(found.slices)
        self._take(source, dict(slots))
        self._restoring[gang.id, source] = slots
        placed = tuple(
            KvSlice.of(index_of(kv_slice.instance), kv_slice.span) for kv_slice in found.slices
        )
        message = RestoreKv(sequence_id=source, parts=found.parts, slices=placed)
        self._round.emit(ToFiles(gang=gang.id, message=message))
        self._owe(gang, source)
        self._count(gang)

    def answered(self, gang: Gang, source: SequenceId, instance: InstanceId) -> bool:
        """Note an instance's answer about files that are read; return whether it was the last."""
        acks = self._pending_acks[gang.id, source]
        acks[instance] -= 1
        if any(acks.values()):
            return False
        self._owes_nothing(gang, source)
        return True

    def restored(
        self, gang: Gang, source: SequenceId, request: Request, found: Restorable, *, good: bool
    ) -> None:
        """Retain what was read from files, or free its slots.

        Args:
            request: whose prompt begins with it.
            good: all instances have read their parts.
        """
        del self._restoring[gang.id, source]
        retained = range(0)
        if good:
            hashes = request.hashes[: found.stop // self.settings.block_tokens]
            retained = self._insert(gang, source, request, hashes, found.slices)
        for rest in (
            range(found.start, retained.start) if retained else range(found.start, found.stop),
            range(retained.stop, found.stop) if retained else range(0),
        ):
            if rest:
                self._command(EvictKv, gang, source, rest)
        self._update(gang)

    # --- eviction ---

    def make_room(self, needed: Mapping[InstanceId, int]) -> bool:
        """Evict until so many slots are empty; return whether they are already."""
        missing: dict[GangId, dict[InstanceId, int]] = {}
        for instance, count in needed.items():
            found = self._gangs.instances[instance]
            if count > found.empty_slots:
                leaving = (
                    self._slots[instance]
                    - self.trees[found.gang.id].cached_tokens.get(instance, 0)
                    - self._being_read(instance)
                )
                missing.setdefault(found.gang.id, {})[instance] = (
                    count - found.empty_slots - leaving
                )
        for gang, counts in missing.items():
            self._evict(self._gangs.by_id[gang], counts)
        return not missing

    def _evict_excess(self, gang: Gang) -> None:
        """Evict what exceeds the shares for retained KV, of each tenant and of all."""
        tree = self.trees[gang.id]
        for tenant, permille in self._permilles.items():
            most = gang.capacity * permille // 1000
            if tree.unreferenced_of(tenant) > most:
                for source, positions in tree.evict_of(tenant, most):
                    self._command(EvictKv, gang, source, positions)
        excess = {
            instance.id: tree.cached_tokens.get(instance.id, 0)
            - tree.referenced_tokens.get(instance.id, 0)
            - int(self._most * instance.capacity)
            for instance in gang.instances
        }
        if any(tokens > 0 for tokens in excess.values()):
            self._evict(gang, excess)

    def _evict(self, gang: Gang, needed: Mapping[InstanceId, int]) -> None:
        for source, positions in self.trees[gang.id].evict(needed):
            self._command(EvictKv, gang, source, positions)
        self._count(gang)

    # --- invariants ---

    def _take(self, source: SequenceId, slots: dict[InstanceId, int]) -> None:
        self.ledger.extend(source, {instance: n for instance, n in slots.items() if n})
        for instance, count in slots.items():
            self._slots[instance] += count

    def _command(
        self, kind: type[RetainKv | EvictKv], gang: Gang, source: SequenceId, positions: range
    ) -> None:
        start, stop = positions.start, positions.stop
        message = kind(sequence_id=source, start=start, stop=stop)
        self._round.emit(ToGang(gang=gang.id, message=message))
        self._owe(gang, source)

    def _owe(self, gang: Gang, source: SequenceId) -> None:
        """Note that all instances of a gang owe an answer."""
        acks = self._pending_acks.setdefault(
            (gang.id, source), {instance.id: 0 for instance in gang.instances}
        )
        for instance in acks:
            acks[instance] += 1
        gang.owing.setdefault(source, self._round.now_ns)

    def _owes_nothing(self, gang: Gang, source: SequenceId) -> None:
        del self._pending_acks[gang.id, source]
        gang.owing.pop(source, None)

    def _update(self, gang: Gang) -> None:
        self._evict_excess(gang)
        self._count(gang)
        self._round.stale = True

    def _count(self, gang: Gang) -> None:
        used = self.trees[gang.id].referenced_tokens
        for instance in gang.instances:
            instance.reclaimable = (
                self._slots[instance.id] - used.get(instance.id, 0) - self._being_read(instance.id)
            )

    def _being_read(self, instance: InstanceId) -> int:
        """Return the slots of an instance that files are read into."""
        return sum(slots.get(instance, 0) for slots in self._restoring.values())

    def check_known(self, request: Request) -> None:
        """Assert that a request's remembered prefixes are right, or known to be out of date."""
        for gang, (version, found) in request.cached_by_gang.items():
            if gang in self.trees and version == self.trees[gang].version:
                most = request.prompt_tokens - 1
                assert found == self.beginning(request, gang, most), (
                    f"request {request.id}: remembered prefix of gang {gang}"
                )

    def check(self, refs: Iterable[PrefixRef], instances: Iterable[Instance]) -> None:
        """Assert that trees, slots and pending acks agree, and that no tenant exceeds its share."""
        all_refs = list(refs)
        for gang_id, tree in self.trees.items():
            tree.check([ref.segment for ref in all_refs if ref.gang.id == gang_id])
            capacity = self._gangs.by_id[gang_id].capacity
            for tenant, permille in self._permilles.items():
                assert tree.unreferenced_of(tenant) <= capacity * permille // 1000, (
                    f"cached KV of tenant {tenant} exceeds its share"
                )
        sums = self.ledger.sums(instances)
        assert sums == self._slots, f"slots of retained KV: entries {sums}, counted {self._slots}"
        retained: dict[tuple[GangId, SequenceId], dict[InstanceId, int]] = {}
        for gang_id, tree in self.trees.items():
            for segment in tree:
                tokens_by_instance = retained.setdefault((gang_id, segment.source), {})
                for holder, tokens in tokens_on(segment.slices).items():
                    tokens_by_instance[holder] = tokens_by_instance.get(holder, 0) + tokens
        for of, tokens_of in retained.items():
            everywhere = self.ledger.slots_of(of[1]).items()
            slots = {instance: n for instance, n in everywhere if gang_of(instance) == of[0]}
            assert all(slots.get(instance, 0) >= n for instance, n in tokens_of.items()), (
                f"retained KV of {of} has no slots"
            )
            assert of in self._pending_acks or slots == tokens_of, f"evicted KV of {of} has slots"
        for gang in self._gangs.by_id.values():
            for instance in gang.instances:
                used = self.trees[gang.id].referenced_tokens.get(instance.id, 0)
                used += self._being_read(instance.id)
                assert instance.reclaimable == self._slots[instance.id] - used >= 0, (
                    f"reclaimable slots of {instance.id}"
                )
