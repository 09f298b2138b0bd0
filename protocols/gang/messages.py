"""Messages between the router and the ranks over MessagePack-RPC, grouped by recipient.

Prefill and move steps are in `step_messages`. Every class is a frozen dataclass that
`csps.protocols.rpc.schema` packs and unpacks strictly. Token ids travel as little-endian int32
bytes: a million MessagePack integers would take the event loop a tenth of a second to build.

Vocabulary
----------
sequence_id  the router's integer for one *attempt* at a request; a retry gets a new one
rank         a process of a gang, 0 .. instances * tp - 1; instance i owns [i*tp, (i+1)*tp)
instance     one copy of the weights, the unit on which policies place work
span         token positions of one sequence, from a first to a last one with a stride
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

import msgspec

from csps.protocols.core.errors import CspsError, RequestError, from_wire
from csps.protocols.core.placement import KvSlice, Span

Notify = Callable[[str, Any], None]
"""Function that a rank calls, from any thread, with a notification's name and message; the router
gets them in this order."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request; names and defaults are the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 means the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of likeliest tokens to report beside the sampled one's log-probability.

    0 reports only that log-probability, None nothing.
    """
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer: ends of sequence included, unless the request ignores them."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens of which the answer consists; empty: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer must not contain."""
    grammar: str = ""
    """Grammar that the answer follows (`models.tokenizers.grammar`); empty: none."""


@dataclass(frozen=True, kw_only=True)
class SamplerInputs:
    """What a rank needs to sample a sequence's tokens, besides logits.

    Its lists may be as long as the vocabulary. So it is packed once, and travels as bytes to the
    ranks that sample and to no others.
    """

    sampling: Sampling
    prompt_tokens: bytes = b""
    """Distinct prompt tokens, int32; sent only when a repetition penalty needs them."""
    generated_tokens: bytes = b""
    """Tokens of the answer that an earlier attempt has sampled, int32: the last tokens of what is
    prefilled."""


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token id under the model's own distribution: the log-softmax of the
    logits before bias, penalties, temperature and filters."""

    token: int
    logprob: float


@dataclass(slots=True, kw_only=True)  # a frozen one takes twice as long to create, at every token
class SampledToken:
    """One token of a request, in order of `index` (0 is the first token): a row of
    `SampledTokens`."""

    sequence_id: int
    index: int
    token: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities that a request asked for, of one sampled token."""

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


# One message in columns, because a router reads thousands of tokens a second: 64 tokens in one
# frame cost a tenth of 64 messages.
@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """`tokens`: all tokens that a master sampled in one iteration, or at the end of a prefill
    step."""

    sequence_ids: tuple[int, ...]
    indices: tuple[int, ...]
    """Indices of the tokens in their answers."""
    tokens: tuple[int, ...]
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    """Finish reason by row, for answers that end."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """Log-probabilities by row, for requests that asked for them."""

    def __post_init__(self) -> None:
        rows = len(self.sequence_ids)
        if not rows == len(self.indices) == len(self.tokens):
            raise ValueError(
                f"SampledTokens: columns differ in length: {rows} sequence ids, "
                f"{len(self.indices)} indices, {len(self.tokens)} tokens"
            )
        for row in (*self.finish_reasons, *self.logprobs):
            if not 0 <= row < rows:
                raise ValueError(f"SampledTokens: row {row} of {rows} rows")

    @classmethod
    def of(cls, sampled: Sequence[SampledToken]) -> SampledTokens:
        """Convert sampled tokens to columns."""
        rows = list(enumerate(sampled))
        return cls(
            sequence_ids=tuple(token.sequence_id for token in sampled),
            indices=tuple(token.index for token in sampled),
            tokens=tuple(token.token for token in sampled),
            finish_reasons={row: token.finish_reason for row, token in rows if token.finish_reason},
            logprobs={
                row: Logprobs(logprob=token.logprob, top=token.top_logprobs)
                for row, token in rows
                if token.logprob is not None
            },
        )

    def each(self) -> Iterator[SampledToken]:
        """Yield the rows, in order."""
        reasons, logprobs = self.finish_reasons, self.logprobs
        columns = zip(self.sequence_ids, self.indices, self.tokens, strict=True)
        for row, (sequence_id, index, token) in enumerate(columns):
            known = logprobs.get(row)
            yield SampledToken(
                sequence_id=sequence_id,
                index=index,
                token=token,
                finish_reason=reasons.get(row),
                logprob=known.logprob if known else None,
                top_logprobs=known.top if known else (),
            )


Role = Literal["prefill", "decode", "elastic"]


# --- to every rank -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attach:
    """`attach`: a router takes the rank over; the rank drops the work of an earlier router.

    `may_attach` asks whether the router could attach, and changes nothing. `members.Fence` has the
    rules. The attached router sends `keep_alive`, without a payload, every `KEEP_ALIVE_S`.
    """

    router_id: str
    """New id for each attachment, by which ranks drop the work of an earlier one."""
    generation: int
    """Number larger than that of every router before this one."""


@dataclass(frozen=True, kw_only=True)
class RankDescription:
    """Answer to `describe` and `attach`."""

    gang_id: str
    role: Role
    rank: int
    world_size: int
    tp: int
    location: str
    """Rack-Server-GPU id, for instance "0-3-1"."""
    kv_slots: int
    window: int = 0
    """Positions that layers with slots of their own see; 0: the rank has none."""
    window_slots: int = 0
    """Slots in these layers."""
    kv_bytes_per_token: int
    layers: int
    model: str
    model_fingerprint: str
    """Digest of the model's configuration, type and weights as they were loaded. Gangs with
    different fingerprints must not exchange KV."""
    max_positions: int
    store_host: str
    store_port: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class ConnectKv:
    """`connect_kv`: join the process group that spans a prefill and a decode gang."""

    epoch: str
    """Name of the pair of gangs. Every KV header carries it, so that a stale one is refused."""
    store_host: str
    store_port: int
    prefill_ranks: int
    decode_ranks: int
    prefill_tp: int
    decode_tp: int


@dataclass(frozen=True, kw_only=True)
class CancelSequence:
    """`cancel`: stop working for a sequence and free what it holds, at any stage."""

    sequence_id: int


EVERY_POSITION = 1 << 62
"""Stop of positions that have all of a sequence."""


class RetainKv(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`retain`, to rank 0: a sequence with `retain` has ended; keep only these positions of its KV,
    those that it shares with other sequences included.

    The sequence leaves its decode batch, if it is in one. Each rank of the gang answers with
    `retained`, or with `freed` if nothing is left. The message may come more than once.
    """

    sequence_id: int
    start: int = 0
    stop: int = EVERY_POSITION

    @property
    def released(self) -> tuple[Span, ...]:
        """All other positions."""
        return Span(0, EVERY_POSITION).without(Span(self.start, max(self.start, self.stop)))


class EvictKv(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`evict`, to rank 0: free some retained KV of a sequence that has ended. Answered as `retain`.

    Slots that other sequences share (`KvSlice.source`) are freed with the last of them.
    """

    sequence_id: int
    start: int = 0
    stop: int = EVERY_POSITION

    @property
    def released(self) -> tuple[Span, ...]:
        """Positions to free."""
        return (Span(self.start, self.stop),) if self.start < self.stop else ()


# --- to prefill ranks ----------------------------------------------------------------------


class SavedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run of a prompt's blocks whose KV the ranks of a gang have in files, each its own part."""

    start: int
    """Position of the first token."""
    hashes: tuple[bytes, ...]
    """Chain hashes of its blocks: they cover all tokens before it as well."""
    slices: tuple[KvSlice, ...]
    """Placement of its positions, each once."""

    def __post_init__(self) -> None:
        if not self.hashes or not self.slices:
            raise ValueError("a saved run has no blocks")
        _check_placed_once("a saved run", self.start, self.stop, self.slices)

    @property
    def name(self) -> str:
        """Name of its files: different wherever tokens or placement differ."""
        identity = (self.start, self.hashes[-1], self.slices)
        return blake2b(msgspec.msgpack.encode(identity), digest_size=16).hexdigest()

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return max(kv_slice.stop for kv_slice in self.slices)


class SaveKv(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`save`, to every rank: write a run of a sequence's retained KV to files, if there is room and
    the KV is still here. A rank that has written its part sends `saved`."""

    sequence_id: int
    run: SavedRun
    tenant: int = 0
    """Scheduler's number of the tenant who pays for it; the router names the owner."""
    owner: str = ""
    """Name under which its bytes are counted; empty: no API keys."""
    permille: int = 1000
    """Share of the files' limit that the owner may fill."""


class SavedPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, stop) of a saved run."""

    name: str
    """Name of the run (`SavedRun.name`)."""
    start: int
    stop: int


class RestoreKv(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`restore`, to every rank: read positions of saved runs into slots, under the name of a new
    sequence, as if it had retained them. Every rank answers with `restored`.

    Slots stay taken until `evict`, also where reading has failed.
    """

    sequence_id: int
    parts: tuple[SavedPart, ...]
    """Parts to read, in order and without gaps."""
    slices: tuple[KvSlice, ...]
    """Placement of all these positions."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"sequence {self.sequence_id}: nothing to restore")
        for before, after in pairwise(self.parts):
            if before.stop != after.start:
                raise ValueError(f"sequence {self.sequence_id}: a gap in what is to be restored")
        what, start, stop = f"sequence {self.sequence_id}", self.parts[0].start, self.parts[-1].stop
        _check_placed_once(what, start, stop, self.slices)


def _check_placed_once(what: str, start: int, stop: int, slices: tuple[KvSlice, ...]) -> None:
    if not Span(start, stop).partitioned_by([kv_slice.span for kv_slice in slices]):
        raise ValueError(f"{what}: slices must have positions [{start}, {stop}), each once")


@dataclass(frozen=True, kw_only=True)
class FirstTokenSampler:
    """`sampler`, before the step that samples a sequence's first token, to the rank that will."""

    sequence_id: int
    inputs: bytes
    """Packed `SamplerInputs`."""


# --- to decode ranks -----------------------------------------------------------------------


class ReserveKv(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`reserve`: reserve KV slots and expect the prompt's KV from a prefill gang.

    With `prompt`, the sequence computes its prompt in its decode batch (piggybacked prefill).
    """

    sequence_id: int
    epoch: str = ""
    """Name of the link over which the prompt's KV comes (`ConnectKv`)."""
    slices: tuple[KvSlice, ...]
    """Placement of the whole prompt's KV over the gang's instances. Empty if nothing is decoded:
    the only token is sampled by a step, and no rank is asked.

    Slices with a source are resident already, and are the prompt's beginning. An instance without
    any other slice does not report that KV was received.
    """
    master: int
    """Instance that embeds the sequence's tokens and samples the next one."""
    prompt_tokens: int
    """Tokens to prefill, those generated by an earlier attempt included."""
    output_tokens: int
    """Most tokens that may still be generated."""
    first_index: int = 0
    """Index in the answer of the first token that it generates."""
    sampler: bytes = b""
    """Packed `SamplerInputs`, sent only to the ranks of its master."""
    prompt: bytes = b""
    """All tokens that a piggybacked prefill computes, int32, sent only to the ranks of its master.

    Earlier tokens, whose KV is resident, may be included. Empty: steps compute the prompt, and its
    KV is sent to the gang.
    """
    answer: tuple[KvSlice, ...] = ()
    """Holders of the KV of the answer's positions, each position once; several may alternate.

    Empty: the master stores all. Positions that the answer never reaches do not matter.
    """
    kept_only: bool = False
    """True if layers may arrive without the tokens that they dropped
    (`CsaPlan.decode_kept_only`)."""
    retain: bool = False
    """True if its KV stays when the answer ends, until `retain`, `evict` or `cancel`."""
    trace: dict[str, str] = {}

    def __post_init__(self) -> None:
        reused = [kv_slice.span for kv_slice in self.slices if kv_slice.source]
        if not Span(0, self.reused).partitioned_by(reused):
            raise ValueError(
                f"sequence {self.sequence_id}: reused KV must be positions [0, {self.reused}), "
                f"each once"
            )
        if self.reused and self.kept_only:
            raise ValueError(
                f"sequence {self.sequence_id}: prefix reuse cannot be combined with "
                "decode_kept_only"
            )

    def moved(self, **fields: Any) -> ReserveKv:
        """Return the reservation of a sequence that has another master or placement now."""
        return msgspec.structs.replace(self, **fields)

    @property
    def reused(self) -> int:
        """Number of positions, from 0 on, whose KV other sequences have computed on this gang."""
        return sum(kv_slice.tokens for kv_slice in self.slices if kv_slice.source)


class JoinBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`join`, to rank 0: decode the sequence. Its KV was received on all ranks, or is
    piggybacked."""

    sequence_id: int
    first_token: int | None = None
    """First token of the answer. None: piggybacked prefill, whose first token comes in
    `SampledTokens`."""
    budget: int = 0
    """Tokens that an iteration of the batch may compute on each master, piggybacked prefill
    included (`decode_batches.chunk_lengths`). The newest value counts."""
    instances: tuple[int, ...] = ()
    """Instances that the sequence needs: its master and all present and future holders of its KV.

    Sequences without a common instance are iterated separately. Empty: all of the gang.
    """


# --- to the router (notifications on the router's own connection) ---------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillProgress:
    """`prefill_progress`, about once a second from a rank that works on a step, for each step."""

    rank: int
    step_id: int | None = None
    """Step that advanced; None: a piggybacked prompt did."""
    computed: float = 0.0
    """Fraction of the step's yield points that the rank has passed."""


@dataclass(frozen=True, kw_only=True)
class DroppedMass:
    """Attention mass that sparse attention dropped of a sequence's chunk, as one rank saw it.

    The sums of all ranks of a group are those of the chunk; the share is `dropped` by `total`.
    """

    sequence_id: int
    layers: tuple[int, ...]
    """Layers that may have dropped tokens; the others dropped none."""
    first_kv_head: int
    """Number in the model of the first KV head."""
    dropped: bytes
    """Estimated mass of dropped tokens, fp32, by layer and KV head."""
    total: bytes
    """Estimated mass of all tokens, likewise."""


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """`prefill_done`, from each rank of a step's group: computed, and all KV sent and freed."""

    step_id: int
    rank: int
    cancelled: bool
    queue_s: float
    compute_s: float
    communication_s: float
    """Time spent waiting for exchanges inside the group."""
    transfer_s: float
    yielded_s: float
    exchange_s: float = 0.0
    """Time during which exchanges inside the group were in progress, whether or not computing
    hid them."""
    bytes_sent: tuple[int, ...] = ()
    """Bytes sent to each rank of the gang, in rank order; empty where nothing was computed."""
    placed_bytes: int = 0
    """Portion of `bytes_sent` that was new KV stored elsewhere than it was computed."""
    placing_s: float = 0.0
    """Time that placing KV took this rank, including storing KV that exchanges delivered anyway."""
    placing_stored_s: float = 0.0
    """Portion of `placing_s` for storing KV that exchanges delivered anyway."""
    placing_waited_s: float = 0.0
    """Portion of `placing_s` spent waiting for other KV."""
    last_layer_s: float = 0.0
    """Computing and communication time of the last layer, whose exchanges deliver no KV."""
    dropped_mass: tuple[DroppedMass, ...] = ()
    """Masses of the step's sequences; empty where no layer dropped tokens."""


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """`prompt_logprobs`, from a rank that computes a step: log-probabilities of some tokens of a
    prompt, under the model's own distribution, before the rank's `prefill_done`."""

    sequence_id: int
    start: int
    """First position that was computed: the log-probability is that of the token behind it."""
    step: int
    """Distance of two positions."""
    logprobs: bytes
    """Log-probabilities of the tokens, float32."""
    ranks: bytes
    """Numbers of tokens that are at least as likely, their own included, int32."""
    top_tokens: bytes
    """Likeliest tokens at each position, best first, int32."""
    top_logprobs: bytes
    """Their log-probabilities, float32."""


@dataclass(frozen=True, kw_only=True)
class RankKvReceived:
    """`received`, from a decode rank: its whole slice of the prompt's KV is in its pool."""

    sequence_id: int
    rank: int
    tokens: int
    seconds: float
    """Time since slots were reserved."""
    receiving_s: float = 0.0
    """Time since the first bytes arrived."""
    received_bytes: int = 0
    """Bytes received; KV that was resident already counts nothing."""
    waited: float = 0.0
    """Longest time in seconds that one of its senders waited for a backend
    (`ReceivingBackends`)."""


@dataclass(frozen=True, kw_only=True)
class LinkBroken:
    """`link_broken`: a rank of the other gang cannot be reached over the KV-transfer connection."""

    epoch: str
    rank: int
    """Rank that reports."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlotsFreed:
    """`freed`: the rank holds nothing of the sequence any more."""

    sequence_id: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class KvRetained:
    """`retained`: tokens of a sequence that the rank holds after a `retain` or `evict`, if any."""

    sequence_id: int
    rank: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class KvSaved:
    """`saved`: runs of which the rank has its part in files. It sends one when it has written a
    run, and all that it has after `list_saved`, in one or several."""

    rank: int
    runs: tuple[SavedRun, ...]
    bytes_per_s: int
    """Speed at which the rank read files last, or wrote them if it has read none; 0: unknown."""
    written: bool
    """True if it has written them just now."""
    listed: bool = False
    """True in the last one after `list_saved`."""


@dataclass(frozen=True, kw_only=True)
class KvRestored:
    """`restored`: the rank has read what `restore` named into its slots."""

    sequence_id: int
    rank: int
    tokens: int
    """Tokens that it has read; -1 if it could not read all that it was to."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RequestFailed:
    """`failed`: the rank cannot serve the sequence; `code` names an error of the tree."""

    sequence_id: int
    rank: int
    code: str
    message: str
    param: str | None = None
    """Field of the client's request that is at fault, if there is one."""

    @classmethod
    def of(cls, sequence_id: int, rank: int, error: CspsError) -> RequestFailed:
        """Return an error of a rank as the message to the router."""
        param = error.param if isinstance(error, RequestError) else None
        return cls(
            sequence_id=sequence_id,
            rank=rank,
            code=type(error).__name__,
            message=str(error),
            param=param,
        )

    @property
    def error(self) -> CspsError:
        """Error that the rank has met."""
        wire: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.param is not None:
            wire["data"] = {"message": self.message, "param": self.param}
        return from_wire(wire)


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """Answer to `stats`, for metrics, health and the tests' leak checks."""

    rank: int
    kv_slots: int
    kv_used: int
    window_used: int = 0
    """Slots in use in layers with a window, if these have slots of their own."""
    requests: int
    running: int
    waiting: int
    iterations: int
    """Number of decode iterations since the rank started."""
    iterating_s: float = 0.0
    """Time that the iterations took, in seconds."""
    exchange_s: float = 0.0
    """Portion of `iterating_s` with queries, or answers to them, in transfer to or from other
    ranks."""
    communication_s: float = 0.0
    """Portion of `exchange_s` during which the rank was blocked."""
