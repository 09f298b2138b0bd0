"""Radix tree of the KV that a gang has retained, by prompt prefix.

A *segment* is a run of blocks that lie under the name of one sequence. Its children are the
segments that follow it in some prompt. Blocks are named by chain hashes, which cover all tokens up
to their ends, so that equal hashes are equal prefixes. Segments are cut only where prompts part or
a reference ends: a million tokens that no other prompt begins with are one segment and not 16,000
blocks.

The turns of a conversation are one segment, too. Each turn reads the turns before it, so it can
*take over* what nobody else reads: instances then store all of it under the name of the newest
turn. Equal neighbors merge. Eviction still takes a conversation turn by turn, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile

import msgspec

from csps.protocols.core.placement import KvSlice, Span, joined, tokens_on, within
from csps.services.scheduling.events.events import InstanceId, SequenceId, TenantId

Hashes = tuple[bytes, ...]


class Segment(msgspec.Struct, kw_only=True, eq=False):
    """Run of blocks."""

    parent: Segment | None
    """Segment before it; None at the beginning."""
    start: int
    """Position of the first token."""
    hashes: Hashes
    tenant: TenantId
    source: SequenceId
    """Sequence under whose id instances store them: it computed them or took them over."""
    slices: tuple[KvSlice, ...]
    """Placement, each position once."""
    seams: tuple[int, ...] = ()
    """Positions at which segments were merged, ascending. Eviction takes what is between two."""
    used: int = 0
    """Number of its last use; equal where segments were used together."""
    children: dict[bytes, Segment] = msgspec.field(default_factory=dict)
    """Next segments, by their first hashes."""
    refs: int = 0
    """Sequences that use it, or a segment behind it."""


class PrefixTree:
    """Segments of one gang.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._roots: dict[bytes, Segment] = {}
        self._recent: dict[Segment, None] = {}
        """All segments, the least recently used first; each after all behind it."""
        self._uses = 0
        self.version = 0
        """Number that changes whenever `match`, `slices` or `unreferenced` may answer differently.
        """
        self.cached_tokens: dict[InstanceId, int] = {}
        """Tokens of all segments, by instance."""
        self.referenced_tokens: dict[InstanceId, int] = {}
        """Tokens of referenced segments, by instance."""
        self._unreferenced: dict[TenantId, int] = {}
        """Tokens of unreferenced segments, by tenant."""

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over all segments, the least recently used first."""
        return iter(list(self._recent))

    def stop(self, segment: Segment) -> int:
        """Return the position behind a segment."""
        return segment.start + len(segment.hashes) * self._block

    # --- finding ---

    def match(self, hashes: Hashes) -> tuple[list[Segment], int]:
        """Return the segments that a prompt begins with, and how many of its blocks they have; of
        the last one perhaps not all."""
        path: list[Segment] = []
        matched, children = 0, self._roots
        while matched < len(hashes) and (found := children.get(hashes[matched])) is not None:
            path.append(found)
            common = _common(found.hashes, hashes, matched)
            matched += common
            if common < len(found.hashes):
                break
            children = found.children
        return path, matched

    def slices(self, path: Sequence[Segment], tokens: int) -> tuple[KvSlice, ...]:
        """Return the placement of the first tokens of a path."""
        wanted = Span(0, tokens)
        return joined(
            kv_slice
            for segment in path
            if segment.start < tokens
            for kv_slice in (
                segment.slices if self.stop(segment) <= tokens else within(segment.slices, wanted)
            )
        )

    def unreferenced(self, path: Sequence[Segment], tokens: int) -> dict[InstanceId, int]:
        """Return the unreferenced tokens among the first of a path, by instance."""
        return tokens_on(self.slices([segment for segment in path if not segment.refs], tokens))

    # --- references ---

    def ref(self, hashes: Hashes) -> Segment:
        """Protect these blocks, which are all here, from eviction until `unref`.

        Returns:
            The segment of the last block.
        """
        path, matched = self.match(hashes)
        assert matched == len(hashes) > 0, "a prefix is referenced that the tree does not have"
        last = self._cut(path[-1], matched * self._block)
        self._add_ref(last, 1)
        self._touch(last)
        return last

    def unref(self, segment: Segment) -> None:
        """Release a reference."""
        self._add_ref(segment, -1)
        (behind,) = segment.children.values() if len(segment.children) == 1 else (segment,)
        self._merge_upwards(behind)

    def _merge_upwards(self, segment: Segment) -> None:
        """Merge a segment and those before it where they are equal but for their positions.

        Whatever cuts them again, cuts at the same positions as if they had not been merged: they
        have the same references and were used together, so they are neighbors in `_recent`.
        """
        while (before := segment.parent) is not None:
            equal = (
                len(before.children) == 1
                and (before.source, before.refs) == (segment.source, segment.refs)
                and (before.used, before.tenant) == (segment.used, segment.tenant)
            )
            if not equal:
                segment = before
                continue
            self.version += 1
            # Those who reference all of both hold the back one.
            segment.seams = (*before.seams, segment.start, *segment.seams)
            segment.parent, segment.start = before.parent, before.start
            segment.hashes = before.hashes + segment.hashes
            segment.slices = joined((*before.slices, *segment.slices))
            self._children_of(segment.parent)[segment.hashes[0]] = segment
            del self._recent[before]

    def _add_ref(self, last: Segment, change: int) -> None:
        self.version += 1
        for upward in _upwards(last):
            before, upward.refs = upward.refs, upward.refs + change
            if not before or not upward.refs:
                self._count(self.referenced_tokens, upward, change)
                self._count_unreferenced(upward, -change)

    def _touch(self, last: Segment) -> None:
        self._uses += 1
        for upward in _upwards(last):
            self._recent.pop(upward, None)
            self._recent[upward] = None
            upward.used = self._uses

    # --- inserting and evicting ---

    def insert(
        self, hashes: Hashes, start: int, slices: tuple[KvSlice, ...], tenant: TenantId = 0
    ) -> range:
        """Insert KV that a sequence has computed, under the source that its slices name.

        Args:
            hashes: of all blocks from the beginning of the prompt.
            start: first position that the sequence computed, at the beginning of a block.
            slices: placement of its positions, to the end of the last block.

        Returns:
            Retained positions: others may be here already.
        """
        path, matched = self.match(hashes)
        stop, here = len(hashes) * self._block, matched * self._block
        if here < start or here == stop:  # KV without all before it is of no use
            if path:
                self._touch(path[-1])
            return range(0)
        parent = self._cut(path[-1], here) if path else None
        new = Segment(
            parent=parent,
            start=here,
            hashes=hashes[matched:],
            tenant=tenant,
            source=slices[0].source,
            slices=within(slices, Span(here, stop)),
        )
        self.version += 1
        self._children_of(parent)[new.hashes[0]] = new
        self._count(self.cached_tokens, new, 1)
        self._count_unreferenced(new, 1)
        self._touch(new)
        return range(here, stop)

    def take_over(
        self, heir: SequenceId, reused: Segment, may_leave: Callable[[SequenceId], bool]
    ) -> list[Segment]:
        """Store what a sequence has reused under its own name, as far as nobody else reads it and
        nothing but the sequence's own segment is behind it.

        Args:
            heir: sequence that still references what it has reused.
            reused: last segment that it has reused.
            may_leave: returns whether KV may lose a name.

        Returns:
            The segments as they were, from the last one on.
        """
        behind = next(iter(reused.children.values()), None)
        if behind is None or behind.source != heir:
            return []
        left = []
        for segment in _upwards(reused):
            alone = segment.refs == 1 and len(segment.children) == 1
            if not (alone and segment.tenant == behind.tenant and may_leave(segment.source)):
                break
            left.append(msgspec.structs.replace(segment))
            segment.source = heir
            segment.slices = tuple(
                [KvSlice.of(kv_slice.instance, kv_slice.span, heir) for kv_slice in segment.slices]
            )
        return left

    def evict(self, needed: Mapping[InstanceId, int]) -> list[tuple[SequenceId, range]]:
        """Evict the least recently used segments that nobody references, with all behind them,
        until so many tokens have gone from these instances or nothing more can go.

        Returns:
            Sequences and their positions that are no longer retained.
        """
        left, gone = dict(needed), list[Segment]()
        for segment, start in self._evictable():
            if not any(count > 0 for count in left.values()):
                break
            piece = within(segment.slices, Span(start, self.stop(segment)))
            if any(left.get(kv_slice.instance, 0) > 0 for kv_slice in piece):
                for removed in self._remove(segment, start):
                    gone.append(removed)
                    for instance, tokens in tokens_on(removed.slices).items():
                        left[instance] = left.get(instance, 0) - tokens
        return self._ranges(gone)

    def _evictable(self) -> Iterator[tuple[Segment, int]]:
        """Yield unreferenced segments, the least recently used first, and each position from which
        on one may be evicted, the last first. What was yielded may be evicted meanwhile."""
        for segment in list(self._recent):
            for start in (*reversed(segment.seams), segment.start):
                if segment.refs or segment not in self._recent:
                    break
                yield segment, start

    def _ranges(self, gone: Iterable[Segment]) -> list[tuple[SequenceId, range]]:
        """Return the sources of removed segments and their positions, neighbors together."""
        found: list[tuple[SequenceId, range]] = []
        for segment in gone:
            start, stop = segment.start, self.stop(segment)
            if found and found[-1] == (segment.source, range(stop, found[-1][1].stop)):
                stop = found.pop()[1].stop
            found.append((segment.source, range(start, stop)))
        return found

    def unreferenced_of(self, tenant: TenantId) -> int:
        """Return the tokens of a tenant's segments that nobody references."""
        return self._unreferenced.get(tenant, 0)

    def evict_of(self, tenant: TenantId, most: int) -> list[tuple[SequenceId, range]]:
        """Evict the least recently used of a tenant's segments that nobody references, until they
        have at most so many tokens.

        Returns:
            Sequences and their positions that are no longer retained.
        """
        gone = list[Segment]()
        for segment, start in self._evictable():
            if self.unreferenced_of(tenant) <= most:
                break
            if segment.tenant == tenant:
                gone += self._remove(segment, start)
        return self._ranges(gone)

    def _remove(self, segment: Segment, start: int) -> list[Segment]:
        """Remove what a segment has from a position on, and all behind it."""
        self.version += 1
        if start > segment.start:
            gone = [self._cut_off(segment, start)]
        else:
            del self._children_of(segment.parent)[segment.hashes[0]]
            del self._recent[segment]
            gone = [segment]
        for removed in gone:
            gone.extend(removed.children.values())
            self._recent.pop(removed, None)
            self._count(self.cached_tokens, removed, -1)
            self._count_unreferenced(removed, -1)
        return gone

    def _cut_off(self, segment: Segment, at: int) -> Segment:
        """Cut the back off a segment that nobody references; return it, with all children."""
        blocks = (at - segment.start) // self._block
        back = msgspec.structs.replace(
            segment,
            start=at,
            hashes=segment.hashes[blocks:],
            slices=within(segment.slices, Span(at, self.stop(segment))),
            seams=(),
        )
        segment.hashes, segment.children = segment.hashes[:blocks], {}
        segment.slices = within(segment.slices, Span(segment.start, at))
        segment.seams = tuple([seam for seam in segment.seams if seam < at])
        return back

    def _cut(self, segment: Segment, at: int) -> Segment:
        """Cut a segment at a position and return the front. The back becomes its child and stays
        the same object, which those hold that reference all of it."""
        if at == self.stop(segment):
            return segment
        self.version += 1
        blocks, stop = (at - segment.start) // self._block, self.stop(segment)
        assert 0 < blocks < len(segment.hashes), "a cut outside of a segment"
        front = Segment(
            parent=segment.parent,
            start=segment.start,
            hashes=segment.hashes[:blocks],
            tenant=segment.tenant,
            source=segment.source,
            slices=within(segment.slices, Span(segment.start, at)),
            seams=tuple([seam for seam in segment.seams if seam < at]),
            refs=segment.refs,
        )
        self._children_of(segment.parent)[front.hashes[0]] = front
        segment.parent, segment.start = front, at
        segment.hashes = segment.hashes[blocks:]
        segment.slices = within(segment.slices, Span(at, stop))
        segment.seams = tuple([seam for seam in segment.seams if seam > at])
        front.children[segment.hashes[0]] = segment
        self._touch(front)
        return front

    def _children_of(self, parent: Segment | None) -> dict[bytes, Segment]:
        return self._roots if parent is None else parent.children

    @staticmethod
    def _count(counts: dict[InstanceId, int], segment: Segment, sign: int) -> None:
        for instance, tokens in tokens_on(segment.slices).items():
            counts[instance] = counts.get(instance, 0) + sign * tokens

    def _count_unreferenced(self, segment: Segment, sign: int) -> None:
        tokens = sign * len(segment.hashes) * self._block
        self._unreferenced[segment.tenant] = self.unreferenced_of(segment.tenant) + tokens

    # --- invariants ---

    def check(self, refs: Sequence[Segment]) -> None:
        """Assert that the tree is whole and its sums are right.

        Args:
            refs: referenced segments, once for each reference.
        """
        found: list[Segment] = list(self._roots.values())
        for segment in found:
            assert segment.hashes, "an empty segment"
            seams = (segment.start, *segment.seams, self.stop(segment))
            assert all(a < b for a, b in pairwise(seams)), "seams are not ascending inside"
            covers = Span(segment.start, self.stop(segment)).partitioned_by(
                [kv_slice.span for kv_slice in segment.slices]
            )
            assert covers, "a segment does not have each of its positions once"
            assert all(kv_slice.source == segment.source for kv_slice in segment.slices), (
                "a segment has slices of several sources"
            )
            for first, child in segment.children.items():
                assert child.parent is segment, "a child names another parent"
                assert child.hashes[0] == first, "a child is filed under a wrong hash"
                assert child.start == self.stop(segment), "a gap in a path"
                found.append(child)
        assert set(found) == set(self._recent), "segments and their order"
        behind = list(self._recent)
        order = {segment: at for at, segment in enumerate(behind)}
        assert all(
            segment.parent is None or order[segment] < order[segment.parent] for segment in found
        ), "order"
        expected = dict.fromkeys(found, 0)
        for used in refs:
            for upward in _upwards(used):
                expected[upward] += 1
        assert all(segment.refs == count for segment, count in expected.items()), "references"
        unreferenced: dict[TenantId, int] = {}
        for segment in found:
            if not segment.refs:
                tokens = len(segment.hashes) * self._block
                unreferenced[segment.tenant] = unreferenced.get(segment.tenant, 0) + tokens
        counted = {tenant: tokens for tenant, tokens in self._unreferenced.items() if tokens}
        assert counted == unreferenced, "unreferenced tokens by tenant"
        for counts, of in (
            (self.cached_tokens, found),
            (self.referenced_tokens, [segment for segment in found if segment.refs]),
        ):
            sums = tokens_on(kv_slice for segment in of for kv_slice in segment.slices)
            assert {instance: n for instance, n in counts.items() if n} == sums, (
                "tokens by instance"
            )


def _common(of: Hashes, hashes: Hashes, at: int) -> int:
    """Return how many blocks of a segment the prompt has from `at` on."""
    if of == hashes[at : at + len(of)]:  # the common case, compared at once
        return len(of)
    pairs = zip(of, hashes[at:], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _upwards(segment: Segment | None) -> Iterator[Segment]:
    """Yield a segment and all before it, back to the beginning."""
    while segment is not None:
        yield segment
        segment = segment.parent
