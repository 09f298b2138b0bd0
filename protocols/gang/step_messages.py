"""What ranks that prefill are told: a step, which is a batch of chunks on one group.

Moving the KV of a row that decodes, and where it goes on then: LoongServe's reactive migration.

The row goes on where it is while its KV is on the way: only the last tokens, which it has added
meanwhile, travel while it stands still.

Earlier KV that a step moves before it attends to it (Tetris §4.1).

Of a piece it is said where its history lies (`PrefillChunk.history`) and who keeps what from the
step on (`placement`), which may name earlier positions: so a group that has grown gets even parts
of the history. Each layer's travels before the layer is computed. All ranks derive the same moves
from the step alone, members or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice, Span, SpanIndex, rests_of
from csps.protocols.gang.messages import TOKEN_BYTES, Sampling


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A chunk of one request inside a job: positions [start, start + length)."""

    sequence_id: int
    start: int
    length: int
    rows: tuple[KvSlice, ...] = ()
    """Which instance computes what, each position once, in the order of an instance's rows; empty
    cuts at the bounds of the job. Not every strategy takes such rows."""
    history: tuple[KvSlice, ...] = ()
    """Where the KV of all positions before the chunk lies, in any order; the slots are known to its
    holders. What other sequences have computed (`KvSlice.source`) comes first of all positions."""
    placement: tuple[KvSlice, ...] = ()
    """Who keeps the KV of this chunk; empty keeps it where it is computed."""
    destinations: tuple[KvSlice, ...] = ()
    """Decode instances to stream the chunk's KV to; empty keeps it here. The first chunk that the
    sequence computes sends its history as well, which others have computed. Shares with an origin
    are there already."""
    retain: bool = False
    """Its KV is not freed when all of it has landed, but lies here until `keep`, `release` or
    `cancel`. Of all chunks of a sequence, or of none; a gang that decodes goes by
    `Reserve.retain`."""
    last: bool = True
    """The prompt ends with this chunk: draw the first token."""
    sampling: Sampling = field(default_factory=Sampling)
    prompt_tokens: bytes = b""
    """Distinct prompt tokens, int32; sent only when a repetition penalty needs them."""
    generated_tokens: bytes = b""
    """Tokens of the answer that an earlier attempt has drawn, int32: the last ones of what is
    prefilled. The token to draw is the next of the answer."""

    def __post_init__(self) -> None:
        if not self.rows:
            return
        chunk = Span(self.start, self.start + self.length)
        if not chunk.partitioned_by([row.span for row in self.rows]):
            raise ValueError(
                f"rows of request {self.sequence_id} are not its positions {chunk}, each once"
            )

    @property
    def whole(self) -> bool:
        """The chunk is all of its prompt."""
        return self.start == 0 and self.last

    @property
    def begins(self) -> bool:
        """It is the first one that the sequence computes."""
        return all(kv_slice.source is not None for kv_slice in self.history)

    @property
    def decoded(self) -> bool:
        """Its KV is needed after the prompt: the first token is not the answer's last."""
        return self.sampling.max_tokens - len(self.generated_tokens) // TOKEN_BYTES > 1


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """`prefill`: one variable-length batch on one ordered group of instances.

    The pieces are laid end to end and cut at `bounds`: instance `group[i]` computes tokens
    [bounds[i], bounds[i+1]) of the concatenation; or as many of all pieces, those that their
    `rows` give it. Every rank of the gang receives every job: members prepare it, and the leader
    has it begin by the gang's log (`sequencer`). `tokens` holds only the receiver's own share, in
    the order of its rows.
    """

    step_id: int
    """The step's number, new for every step of a router."""
    group: tuple[int, ...]
    bounds: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    tokens: bytes = b""
    strategy: str = "ulysses"
    csa: CsaPlan | None = None
    """How strategies that attend sparsely do so; "csa" needs it. "levels", which is exact, needs
    one that drops nothing."""
    high_priority: bool = False
    """May run inside a running job that is not urgent, between two of its parts."""
    trace: dict[str, str] = field(default_factory=dict)
    """W3C trace context of the first piece's request."""

    @property
    def contiguous(self) -> bool:
        """Rows are cut at the bounds."""
        return not any(chunk.rows for chunk in self.chunks)

    def __post_init__(self) -> None:
        if not self.contiguous:
            self._check_rows()
        if self.csa is None:
            if self.strategy in ("csa", "levels"):
                raise ValueError(f"strategy '{self.strategy}' without a plan")
            return
        if len(self.csa.locations) != len(self.group):
            raise ValueError(
                f"{len(self.csa.locations)} locations for a group of {len(self.group)}"
            )
        if self.csa.decode_kept_only and not all(chunk.whole for chunk in self.chunks):
            raise ConfigError(
                "decode_kept_only takes whole prompts: a later chunk's tokens see all of the "
                "earlier ones, so that decode would see less than the prompt's end has seen"
            )
        if self.strategy == "levels" and not self.csa.lossless:
            raise ValueError("strategy 'levels' is exact, and its plan drops tokens")
        if self.strategy.startswith("sp_tp"):
            self._check_sp_tp(self.csa)
        self.csa.check_tokens([stop - start for start, stop in pairwise(self.bounds)])

    def _check_rows(self) -> None:
        counts = dict.fromkeys(self.group, 0)
        for kv_slice in (kv_slice for chunk in self.chunks for kv_slice in chunk.rows):
            if kv_slice.instance not in counts:
                raise ValueError(f"instance {kv_slice.instance} has rows and is not in the group")
            counts[kv_slice.instance] += kv_slice.span.length
        if not all(chunk.rows or not chunk.length for chunk in self.chunks):
            raise ValueError("some pieces say who computes their rows, and others do not")
        if self.bounds != (0, *accumulate(counts.values())):
            raise ValueError(f"bounds {self.bounds} are not those of the rows, {counts}")

    def _check_sp_tp(self, plan: CsaPlan) -> None:
        if plan.decode_kept_only:
            raise ConfigError(
                "decode_kept_only is for SP-NTP; in SP-TP who sends a token's keys and values on "
                "knows only of its own heads whether they keep it"
            )
        if plan.nested:
            raise ConfigError("nested levels are for SP-NTP; SP-TP attends to disjoint levels")


@dataclass(frozen=True, kw_only=True)
class SequencePlacement:
    """Where the KV of a row lies, and who draws its tokens."""

    slices: tuple[KvSlice, ...]
    """Of the prompt's KV."""
    master: int
    answer: tuple[KvSlice, ...] = ()
    """Who keeps which of the answer's positions; empty: the master."""

    @property
    def instances(self) -> frozenset[int]:
        """Whom the row concerns."""
        return frozenset(
            (self.master, *(kv_slice.instance for kv_slice in (*self.slices, *self.answer)))
        )


@dataclass(frozen=True, kw_only=True)
class MoveSequence:
    """`move`, to every rank of an elastic gang: have a row's KV lie elsewhere, or its tokens drawn
    elsewhere. A step without pieces (`sequencer`): whoever the row concerns, before or after, is a
    member. Each of their ranks answers with `moved`, unless the row leaves before."""

    step_id: int
    """The step's number, as `PrefillStep.step_id`."""
    sequence_id: int
    prompt_length: int
    stop: int
    """No position from here on ever has KV."""
    before: SequencePlacement
    after: SequencePlacement
    trace: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for placement in (self.before, self.after):
            if not Span(0, self.stop).partitioned_by([it.span for it in self.slices_of(placement)]):
                raise ValueError(
                    f"row {self.sequence_id} does not have each position once in {placement}"
                )

    @property
    def instances(self) -> tuple[int, ...]:
        """Members, ascending."""
        return tuple(sorted(self.before.instances | self.after.instances))

    def slices_of(self, placement: SequencePlacement) -> tuple[KvSlice, ...]:
        """Of all positions that ever have KV."""
        to_come = Span(self.prompt_length, max(self.prompt_length, self.stop))
        answer = placement.answer or (KvSlice(instance=placement.master, span=to_come),)
        cuts = (
            replace(kv_slice, span=kv_slice.span.intersection(Span(0, self.stop)))
            for kv_slice in (*placement.slices, *answer)
        )
        return tuple(cut for cut in cuts if cut.span.length)

    def transfers(self) -> Iterator[InstanceTransfer]:
        """What changes its instance, in the order in which every member sees it."""
        for sender in self.slices_of(self.before):
            for receiver in self.slices_of(self.after):
                span = sender.span.intersection(receiver.span)
                if sender.instance != receiver.instance and span.length:
                    yield InstanceTransfer(sender.instance, receiver.instance, span)


@dataclass(frozen=True)
class InstanceTransfer:
    """Positions whose KV goes from one instance to another."""

    sender: int
    receiver: int
    span: Span

    def part(self, rows: slice) -> InstanceTransfer:
        """Some of the positions, by their numbers; none where there are no more."""
        positions = self.span.positions[rows]
        return replace(self, span=self.span.part(rows) if positions else Span(0, 0))

    def within(self, span: Span) -> InstanceTransfer:
        """Those of the positions that a span has."""
        return replace(self, span=self.span.intersection(span))


@dataclass(frozen=True, kw_only=True)
class SequenceMoved:
    """`moved`, from each rank of a move's members: the row goes on at its new place, and what it
    has left here is free."""

    sequence_id: int
    rank: int
    tokens: int
    """Whose KV has come here."""
    sent_bytes: int
    seconds: float
    """That the move took this rank, without what it did in between."""


@dataclass(frozen=True)
class RebalancedKv:
    """Positions of a sequence whose KV changes its instance."""

    sequence_id: int
    span: Span
    sender: int
    receiver: int


def rebalanced_kv(chunk: PrefillChunk) -> Iterator[RebalancedKv]:
    """History of a piece that lies elsewhere than it is to be kept, each position once."""
    targets = [kv_slice for kv_slice in chunk.placement if kv_slice.span.start < chunk.start]
    index = SpanIndex(target.span for target in targets)
    for stored in chunk.history:
        for position in index.near(stored.span):
            target_slice = targets[position]
            common = stored.span.intersection(target_slice.span)
            if common.length and target_slice.instance != stored.instance:
                yield RebalancedKv(
                    chunk.sequence_id, common, stored.instance, target_slice.instance
                )


def rebalanced(step: PrefillStep) -> PrefillStep:
    """The step with its history where it is once it has been moved."""
    return replace(step, chunks=tuple(map(_rebalanced, step.chunks)))


def _rebalanced(chunk: PrefillChunk) -> PrefillChunk:
    moves = list(rebalanced_kv(chunk))
    if not moves:
        return chunk
    rests = rests_of((it.span for it in chunk.history), [move.span for move in moves])
    staying = (
        replace(kv_slice, span=rest)
        for kv_slice, left in zip(chunk.history, rests, strict=True)
        for rest in left
    )
    arrived = (KvSlice(instance=move.receiver, span=move.span) for move in moves)
    return replace(chunk, history=(*staying, *arrived))
