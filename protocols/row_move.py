"""Moving the KV of a row that decodes, and where it goes on then: LoongServe's reactive migration.

The row goes on where it is while its KV is on the way: only the last tokens, which it has added
meanwhile, travel while it stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from csps.protocols.placement import KvShare
from csps.protocols.span import Span


@dataclass(frozen=True, kw_only=True)
class RowPlacement:
    """Where the KV of a row lies, and who draws its tokens."""

    shares: tuple[KvShare, ...]
    """Of the prompt's KV."""
    master: int
    answer: tuple[KvShare, ...] = ()
    """Who keeps which of the answer's positions; empty: the master."""

    @property
    def instances(self) -> frozenset[int]:
        """Whom the row concerns."""
        return frozenset((self.master, *(it.instance for it in (*self.shares, *self.answer))))


@dataclass(frozen=True, kw_only=True)
class MoveRow:
    """`move`, to every rank of an elastic gang: have a row's KV lie elsewhere, or its tokens drawn
    elsewhere. A step without pieces (`conductor`): whoever the row concerns, before or after, is a
    member. Each of their ranks answers with `moved`, unless the row leaves before."""

    job_id: int
    """The step's number, as `PrefillJob.job_id`."""
    rid: int
    prompt_length: int
    stop: int
    """No position from here on ever has KV."""
    before: RowPlacement
    after: RowPlacement
    trace: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for placement in (self.before, self.after):
            if not Span(0, self.stop).parted_by([it.span for it in self.shares_of(placement)]):
                raise ValueError(f"row {self.rid} does not have each position once in {placement}")

    @property
    def instances(self) -> tuple[int, ...]:
        """Members, ascending."""
        return tuple(sorted(self.before.instances | self.after.instances))

    def shares_of(self, placement: RowPlacement) -> tuple[KvShare, ...]:
        """Of all positions that ever have KV."""
        to_come = Span(self.prompt_length, max(self.prompt_length, self.stop))
        answer = placement.answer or (KvShare(instance=placement.master, span=to_come),)
        cuts = (
            replace(it, span=it.span.intersection(Span(0, self.stop)))
            for it in (*placement.shares, *answer)
        )
        return tuple(it for it in cuts if it.span.length)

    def transfers(self) -> Iterator[Transfer]:
        """What changes its instance, in the order in which every member sees it."""
        for source in self.shares_of(self.before):
            for target in self.shares_of(self.after):
                span = source.span.intersection(target.span)
                if source.instance != target.instance and span.length:
                    yield Transfer(source.instance, target.instance, span)


@dataclass(frozen=True)
class Transfer:
    """Positions whose KV goes from one instance to another."""

    source: int
    target: int
    span: Span

    def part(self, rows: slice) -> Transfer:
        """Some of the positions, by their numbers; none where there are no more."""
        positions = self.span.positions[rows]
        return replace(self, span=self.span.part(rows) if positions else Span(0, 0))

    def within(self, span: Span) -> Transfer:
        """Those of the positions that a span has."""
        return replace(self, span=self.span.intersection(span))


@dataclass(frozen=True, kw_only=True)
class RowMoved:
    """`moved`, from each rank of a move's members: the row goes on at its new place, and what it
    has left here is free."""

    rid: int
    rank: int
    tokens: int
    """Whose KV has come here."""
    sent_bytes: int
    seconds: float
    """That the move took this rank, without what it did in between."""
