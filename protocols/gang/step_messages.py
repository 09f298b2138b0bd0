"""Steps: messages that have ranks prefill a batch of chunks, or move the KV of a sequence.

A `PrefillStep` is a batch of chunks on one group. A `MoveSequence` migrates a decoding sequence
(LoongServe's reactive migration): decoding continues during the transfer, and pauses only for the
KV of the tokens that were added meanwhile.

A step may also rebalance earlier KV before it attends to it (Tetris §4.1). A chunk names the
present holders of its history (`PrefillChunk.history`) and the holders from the step on
(`placement`, which may name earlier positions), so a group that has grown gets even parts of the
history. The KV of each layer moves before the layer is computed. Every rank derives the same moves
from the step alone, whether it is a member or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import msgspec

from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice, Span, SpanIndex, rests_of


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + length) of one sequence, computed by one step."""

    sequence_id: int
    start: int
    length: int
    rows: tuple[KvSlice, ...] = ()
    """Instance that computes each position, each position once, in the order of an instance's rows.

    Set in all chunks of a step or in none. Empty: the step's bounds say so. Not every strategy
    accepts such rows.
    """
    history: tuple[KvSlice, ...] = ()
    """Placement of the KV of all positions before the chunk, in any order; its holders know the
    slots.

    KV that other sequences have computed (`KvSlice.source`) has the lowest positions.
    """
    placement: tuple[KvSlice, ...] = ()
    """Holders of the KV of this chunk from this step on, and of earlier KV that moves. Empty: the
    instances that compute it, and nothing moves."""
    destinations: tuple[KvSlice, ...] = ()
    """Decode instances to send the chunk's KV to; empty keeps it here.

    The first chunk that the sequence computes also sends its history, which others have computed.
    Slices with a source are at their destination already.
    """
    near_to: int | None = None
    """Decode instance that gets the KV of layers with a window: that in the last window of the
    prompt, cached or not. None: it goes where that of other layers goes."""
    retain: bool = False
    """True if its KV stays after the transfer, until `retain`, `evict` or `cancel`.

    All chunks of a sequence agree. A gang that also decodes uses `ReserveKv.retain`.
    """
    last: bool = True
    """True if the prompt ends with this chunk, so that the first token is sampled."""
    decoded: bool = True
    """True if its KV is needed after the prompt: the first token is not the answer's last."""
    first_index: int = 0
    """Index in the answer of the token that is sampled: earlier attempts have sampled so many."""

    @property
    def span(self) -> Span:
        """Positions of the chunk."""
        return Span(self.start, self.start + self.length)

    @property
    def whole(self) -> bool:
        """True if the chunk is all of its prompt."""
        return self.start == 0 and self.last

    @property
    def begins(self) -> bool:
        """True if it is the first chunk that the sequence computes."""
        return all(kv_slice.source for kv_slice in self.history)


class PrefillStep(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill`: one variable-length batch on one ordered group of instances.

    The chunks are concatenated and cut at `bounds`: instance `group[i]` computes tokens [bounds[i],
    bounds[i+1]) of the concatenation. Chunks with `rows` instead give the instance that many
    tokens. Every rank of the gang receives every step: members prepare it, and the leader begins it
    by the gang's log (`csps.protocols.sequencer`).

    The scheduler makes the step, with instances numbered over all gangs and the name of an option
    as its strategy. The router adds what the scheduler does not know: `tokens`, `csa`, `samplers`,
    `prompt_logprobs`, `next_tokens` and `trace`.
    """

    step_id: int
    """Number of the step, new for every step of a router."""
    group: tuple[int, ...]
    bounds: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    strategy: str = "ulysses"
    high_priority: bool = False
    """True if it may preempt a low-priority step at a yield point."""
    tokens: bytes = b""
    """Tokens of the receiver's own rows, in their order, int32."""
    csa: CsaPlan | None = None
    """Plan of strategies that attend sparsely; "csa" needs one. "levels", which is exact, needs
    a plan that drops nothing."""
    samplers: dict[int, bytes] = {}
    """Packed `SamplerInputs` of the sequences whose first token the receiver samples.

    A router sends them ahead, each in a message of its own (`FirstTokenSampler`): the lists of many
    clients together would be too long for one. The receiver adds them to the step.
    """
    prompt_logprobs: dict[int, int] = {}
    """Sequences whose prompt's log-probabilities are wanted, with the number of likeliest tokens to
    report beside each."""
    next_tokens: bytes = b""
    """Token behind each of the receiver's own rows, int32; -1 where none is wanted. Only with
    `prompt_logprobs`."""
    trace: dict[str, str] = {}
    """W3C trace context of the first chunk's request."""

    @property
    def contiguous(self) -> bool:
        """True if rows are cut at the bounds."""
        return not any(chunk.rows for chunk in self.chunks)

    def with_samplers(self, samplers: dict[int, bytes]) -> PrefillStep:
        """Return the step with more sampler inputs."""
        return msgspec.structs.replace(self, samplers=self.samplers | samplers)

    # Not in `__post_init__`: the scheduler makes hundreds of steps in a round, after checks of its
    # own, and has no CSA plans yet.
    def check(self) -> None:
        """Check a step that the router has completed.

        Raises:
            ValueError: the step contradicts itself.
            ConfigError: its settings exclude each other.
        """
        if not self.contiguous:
            self._check_rows()
        if self.csa is None:
            if self.strategy in ("csa", "levels"):
                raise ValueError(f"step {self.step_id}: strategy '{self.strategy}' needs a CsaPlan")
            return
        if len(self.csa.locations) != len(self.group):
            raise ValueError(
                f"step {self.step_id}: {len(self.csa.locations)} locations for a group of "
                f"{len(self.group)}"
            )
        if self.csa.decode_kept_only and not all(chunk.whole for chunk in self.chunks):
            raise ConfigError(
                "decode_kept_only requires whole prompts: later chunks attend to all earlier "
                "tokens, so decode would see less KV than the end of the prompt did"
            )
        if self.strategy == "levels" and not self.csa.lossless:
            raise ValueError(
                f"step {self.step_id}: strategy 'levels' is exact, but its plan drops tokens"
            )
        if self.strategy.startswith("sp_tp"):
            self._check_sp_tp(self.csa)
        self.csa.check_tokens([stop - start for start, stop in pairwise(self.bounds)])

    def _check_rows(self) -> None:
        counts = dict.fromkeys(self.group, 0)
        for chunk in self.chunks:
            if not chunk.span.partitioned_by([row.span for row in chunk.rows]):
                raise ValueError(
                    f"step {self.step_id}: sequence {chunk.sequence_id} must have rows with its "
                    f"positions {chunk.span}, each once"
                )
            for row in chunk.rows:
                if row.instance not in counts:
                    raise ValueError(
                        f"step {self.step_id}: instance {row.instance} has rows, but is not in "
                        f"group {self.group}"
                    )
                counts[row.instance] += row.tokens
        if self.bounds != (0, *accumulate(counts.values())):
            raise ValueError(
                f"step {self.step_id}: bounds {self.bounds} do not match the rows, {counts}"
            )

    def _check_sp_tp(self, plan: CsaPlan) -> None:
        if plan.decode_kept_only:
            raise ConfigError(
                "decode_kept_only is not supported with SP-TP: a sender knows which tokens are "
                "kept only for its own heads"
            )
        if plan.nested:
            raise ConfigError(
                "nested levels are not supported with SP-TP, which attends to disjoint levels"
            )


class SequencePlacement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Placement of a decoding sequence: KV holders and master."""

    slices: tuple[KvSlice, ...]
    """Placement of the prompt's KV."""
    master: int
    answer: tuple[KvSlice, ...] = ()
    """Holders of the answer's positions; empty: the master."""

    @property
    def instances(self) -> frozenset[int]:
        """Instances that the sequence needs."""
        return frozenset(
            (self.master, *(kv_slice.instance for kv_slice in (*self.slices, *self.answer)))
        )


class MoveSequence(msgspec.Struct, frozen=True, kw_only=True):
    """`move`, to every rank of an elastic gang: move a sequence's KV, or change its master.

    It is a step without chunks, whose members are the instances that the sequence needs before or
    after. Each of their ranks answers with `moved`, unless the sequence leaves its batch first.
    """

    step_id: int
    """Number of the step, as `PrefillStep.step_id`."""
    sequence_id: int
    prompt_tokens: int
    stop: int
    """First position that never has KV."""
    before: SequencePlacement
    after: SequencePlacement
    sampler: bytes = b""
    """Packed `SamplerInputs`, sent only to the ranks of a new master."""
    trace: dict[str, str] = {}

    def __post_init__(self) -> None:
        for placement in (self.before, self.after):
            spans = [kv_slice.span for kv_slice in self.slices_of(placement)]
            if not Span(0, self.stop).partitioned_by(spans):
                raise ValueError(
                    f"move {self.step_id} of sequence {self.sequence_id}: a placement must have "
                    f"positions [0, {self.stop}), each once, not {placement}"
                )

    @property
    def instances(self) -> tuple[int, ...]:
        """Member instances, ascending."""
        return tuple(sorted(self.before.instances | self.after.instances))

    def slices_of(self, placement: SequencePlacement) -> tuple[KvSlice, ...]:
        """Return the holders of all positions that ever have KV."""
        to_come = Span(self.prompt_tokens, max(self.prompt_tokens, self.stop))
        answer = placement.answer or (KvSlice.of(placement.master, to_come),)
        cuts = (
            kv_slice.cut(kv_slice.span.intersection(Span(0, self.stop)))
            for kv_slice in (*placement.slices, *answer)
        )
        return tuple(cut for cut in cuts if cut.span.length)

    def transfers(self) -> Iterator[InstanceTransfer]:
        """Yield the transfers between instances, in the same order on every member."""
        for sender in self.slices_of(self.before):
            for receiver in self.slices_of(self.after):
                span = sender.span.intersection(receiver.span)
                if sender.instance != receiver.instance and span.length:
                    yield InstanceTransfer(sender.instance, receiver.instance, span)


@dataclass(frozen=True)
class InstanceTransfer:
    """Positions whose KV moves from one instance to another."""

    sender: int
    receiver: int
    span: Span

    def part(self, rows: slice) -> InstanceTransfer:
        """Return some of the positions, selected by index; none beyond the last."""
        positions = self.span.positions[rows]
        return replace(self, span=self.span.part(rows) if positions else Span(0, 0))

    def within(self, span: Span) -> InstanceTransfer:
        """Return those of the positions that are in a span."""
        return replace(self, span=self.span.intersection(span))


@dataclass(frozen=True, kw_only=True)
class SequenceMoved:
    """`moved`, from each rank of a move's members: decoding continues at the new placement, and
    what the sequence no longer has here is free."""

    sequence_id: int
    rank: int
    tokens: int
    """Tokens whose KV was moved to this rank."""
    sent_bytes: int
    seconds: float
    """Time that the move took this rank, interruptions excluded."""


@dataclass(frozen=True)
class RebalancedKv:
    """Positions of a sequence whose KV moves to another instance."""

    sequence_id: int
    span: Span
    sender: int
    receiver: int


def rebalanced_kv(chunk: PrefillChunk) -> Iterator[RebalancedKv]:
    """Yield the parts of a chunk's history that the step has to move, each position once."""
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
    """Return the step with its history as it is after the moves."""
    return msgspec.structs.replace(step, chunks=tuple(map(_rebalanced, step.chunks)))


def _rebalanced(chunk: PrefillChunk) -> PrefillChunk:
    moves = list(rebalanced_kv(chunk))
    if not moves:
        return chunk
    rests = rests_of((kv_slice.span for kv_slice in chunk.history), [move.span for move in moves])
    unmoved = (
        kv_slice.cut(rest)
        for kv_slice, left in zip(chunk.history, rests, strict=True)
        for rest in left
    )
    moved = (KvSlice.of(move.receiver, move.span) for move in moves)
    return msgspec.structs.replace(chunk, history=(*unmoved, *moved))


def stored_in_place(step: PrefillStep) -> PrefillStep:
    """Return the step with nothing to send: KV computed elsewhere than it is to lie moves there."""
    chunks = tuple(
        msgspec.structs.replace(
            chunk, placement=chunk.placement or _of_chunk(chunk), destinations=(), retain=False
        )
        for chunk in step.chunks
    )
    return msgspec.structs.replace(step, chunks=chunks)


def _of_chunk(chunk: PrefillChunk) -> tuple[KvSlice, ...]:
    """Return where the KV of a chunk is to lie. The first chunk of a sequence also places the KV
    that other sequences have computed of the prompt, unless it lies there."""
    start = 0 if chunk.begins else chunk.start
    positions = Span(start=start, stop=chunk.start + chunk.length)
    cuts = (
        KvSlice.of(destination.instance, destination.span.intersection(positions))
        for destination in chunk.destinations
        if not destination.source
    )
    return tuple(cut for cut in cuts if cut.span.length)
