"""Radix tree of the KV that a gang has retained, by prompt prefix.

A *segment* is a run of blocks that one sequence has computed. Its children are the segments that
follow it in some prompt. Blocks are named by chain hashes, which cover all tokens up to their ends,
so that equal hashes are equal prefixes. Segments are cut only where prompts part or a reference
ends: a million tokens that no other prompt begins with are one segment and not 16,000 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

import msgspec

from csps.protocols.core.placement import KvSlice, Span, tokens_on, within
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
    """Sequence that computed them; instances store them under its id."""
    slices: tuple[KvSlice, ...]
    """Placement, each position once."""
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
        return tuple(
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

    def _add_ref(self, last: Segment, change: int) -> None:
        self.version += 1
        for upward in _upwards(last):
            before, upward.refs = upward.refs, upward.refs + change
            if not before or not upward.refs:
                self._count(self.referenced_tokens, upward, change)
                self._count_unreferenced(upward, -change)

    def _touch(self, last: Segment) -> None:
        for upward in _upwards(last):
            self._recent.pop(upward, None)
            self._recent[upward] = None

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

    def evict(self, needed: Mapping[InstanceId, int]) -> list[tuple[SequenceId, range]]:
        """Evict the least recently used segments that nobody references, with all behind them,
        until so many tokens have gone from these instances or nothing more can go.

        Returns:
            Sequences and their positions that are no longer retained.
        """
        left, gone = dict(needed), list[Segment]()
        for segment in list(self._recent):
            if not any(count > 0 for count in left.values()):
                break
            if segment.refs or segment not in self._recent:
                continue
            if any(left.get(kv_slice.instance, 0) > 0 for kv_slice in segment.slices):
                for removed in self._remove(segment):
                    gone.append(removed)
                    for instance, tokens in tokens_on(removed.slices).items():
                        left[instance] = left.get(instance, 0) - tokens
        return [(segment.source, range(segment.start, self.stop(segment))) for segment in gone]

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
        for segment in list(self._recent):
            if self.unreferenced_of(tenant) <= most:
                break
            if segment.tenant == tenant and not segment.refs and segment in self._recent:
                gone += self._remove(segment)
        return [(segment.source, range(segment.start, self.stop(segment))) for segment in gone]

    def _remove(self, segment: Segment) -> list[Segment]:
        """Remove the segment and all behind it."""
        self.version += 1
        del self._children_of(segment.parent)[segment.hashes[0]]
        gone = [segment]
        for removed in gone:
            gone.extend(removed.children.values())
            del self._recent[removed]
            self._count(self.cached_tokens, removed, -1)
            self._count_unreferenced(removed, -1)
        return gone

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
            refs=segment.refs,
        )
        self._children_of(segment.parent)[front.hashes[0]] = front
        segment.parent, segment.start = front, at
        segment.hashes = segment.hashes[blocks:]
        segment.slices = within(segment.slices, Span(at, stop))
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
