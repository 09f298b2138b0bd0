"""How the next token of a request is drawn.

Tokens that ranks have drawn, as they travel to the router.

What the router and the ranks say to each other over MessagePack-RPC.

Messages are grouped by recipient; steps of prefill are in `prefill_job`, drawn tokens in `tokens`.
Every class is a frozen dataclass that `protocols.schema`
packs and unpacks strictly. Token ids travel as little-endian int32 bytes, because a million
MessagePack integers would take the event loop a tenth of a second to build.

Vocabulary
----------
rid        the router's integer for one *attempt* at one request; a retry gets a new one
rank       a process of a gang, 0 .. instances * tp - 1; instance i owns ranks [i*tp, (i+1)*tp)
instance   one copy of the weights, the unit that policies place work on
span       token positions of one request, from a first one to a last one in equal steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from csps.protocols.core.placement import EVERYTHING, KvSlice, Span


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token of a request is drawn; names and defaults are the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the likeliest tokens to report with the drawn one's log-probability; 0 reports
    only that, None nothing."""
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ends of sequence included, unless the request ignores them."""


TOKEN_BYTES = 4
"""Of an id in a message, little-endian."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token id under the model's own distribution: the log-softmax of the
    logits before bias, penalties, temperature and filters."""

    token: int
    logprob: float


@dataclass(slots=True, kw_only=True)  # frozen ones take twice as long to make, at every token
class SampledToken:
    """One token of a request, in order of `index` (0 is prefill's): a row of `SampledTokens`."""

    sequence_id: int
    index: int
    token: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """What `Sampling.logprobs` asks for of one drawn token."""

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """`tokens`: all that a master drew in one iteration, or a prefill job at its end.

    One message and not one for each token, and in columns, because a router reads thousands of
    tokens a second: 64 of them in one frame cost a tenth of what 64 messages do.
    """

    sequence_ids: tuple[int, ...]
    indices: tuple[int, ...]
    """Numbers of the tokens in their answers."""
    tokens: tuple[int, ...]
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    """By row, of the answers that end."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By row, of the requests that asked for them."""

    def __post_init__(self) -> None:
        rows = len(self.sequence_ids)
        if not rows == len(self.indices) == len(self.tokens):
            raise ValueError(f"{rows} rids, {len(self.indices)} indices, {len(self.tokens)} tokens")
        for row in (*self.finish_reasons, *self.logprobs):
            if not 0 <= row < rows:
                raise ValueError(f"there is no row {row} among {rows}")

    @classmethod
    def of(cls, sampled: Sequence[SampledToken]) -> SampledTokens:
        """Lay rows out in columns."""
        rows = list(enumerate(sampled))
        return cls(
            sequence_ids=tuple(it.sequence_id for it in sampled),
            indices=tuple(it.index for it in sampled),
            tokens=tuple(it.token for it in sampled),
            finish_reasons={row: it.finish_reason for row, it in rows if it.finish_reason},
            logprobs={
                row: Logprobs(logprob=it.logprob, top=it.top_logprobs)
                for row, it in rows
                if it.logprob is not None
            },
        )

    def each(self) -> Iterator[SampledToken]:
        """The rows, in order."""
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
    """`attach`: a router takes the rank over; whatever an earlier router left is dropped.
    `may_attach` asks whether it could, and changes nothing. `protocols.fence` has the rules; the
    holder sends `keep_alive`, without a payload, every `KEEP_ALIVE_S`.
    """

    router_id: str
    """New for each attachment, so that ranks drop what they still do for an earlier one."""
    generation: int
    """Larger than that of every router before this one."""


@dataclass(frozen=True, kw_only=True)
class RankDescription:
    """What `describe` and `attach` answer."""

    gang_id: str
    role: Role
    rank: int
    world_size: int
    tp: int
    location: str
    """Rack-Server-GPU id, for instance "0-3-1"."""
    kv_slots: int
    kv_bytes_per_token: int
    layers: int
    model: str
    model_fingerprint: str
    """Digest of the model's configuration, type and weights as they were loaded; gangs that differ
    must not exchange KV."""
    max_positions: int
    store_host: str
    store_port: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class ConnectKv:
    """`connect_kv`: join the process group that spans a prefill and a decode gang."""

    epoch: str
    """Names the pair of gangs; carried by every KV header, so that a stale one is refused."""
    store_host: str
    store_port: int
    prefill_ranks: int
    decode_ranks: int
    prefill_tp: int
    decode_tp: int


@dataclass(frozen=True, kw_only=True)
class CancelSequence:
    """`cancel`: stop working for a request and free what it holds, at any stage."""

    sequence_id: int


@dataclass(frozen=True, kw_only=True)
class RetainKv:
    """`keep`, to rank 0: a sequence that `retain` is over, and of its KV only this is kept under its
    rid. Where it is a row it leaves. Each rank of the gang answers with `kept`, or `freed` if it
    has nothing left of it; it may be told more than once."""

    sequence_id: int
    spans: tuple[Span, ...] = EVERYTHING
    """Of those the rank has some; no others than the sequence itself has computed."""

    @property
    def released(self) -> tuple[Span, ...]:
        """All others."""
        rest = EVERYTHING
        for span in self.spans:
            rest = tuple(part for it in rest for part in it.without(span))
        return rest


@dataclass(frozen=True, kw_only=True)
class EvictKv:
    """`release`, to rank 0: free some of what was kept of a sequence, which is over. Answered as
    `keep`. Slots that others hold meanwhile (`KvSlice.source`) come back with the last of them; who
    counts on those that were told to be free releases nothing that somebody still reads."""

    sequence_id: int
    spans: tuple[Span, ...] = EVERYTHING


# --- to decode ranks -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReserveKv:
    """`reserve`: set KV slots aside and expect the prompt's KV from a prefill gang; or, with
    `prompt`, a sequence that computes its prompt in the stream in which it is decoded."""

    sequence_id: int
    epoch: str
    slices: tuple[KvSlice, ...]
    """The whole prompt's KV placement over the gang's instances. What has an origin lies there
    already, and is the prompt's beginning; an instance that has no other share tells of none that
    has landed."""
    master: int
    """Instance that embeds the request's tokens and draws the next one."""
    prompt_length: int
    """Tokens to be prefilled, those of `generated_tokens` included."""
    sampling: Sampling
    prompt: bytes = b""
    """Of a sequence that rides (`protocols.iteration`): all tokens to be computed, int32, only to
    the ranks of its master; those before them, whose KV is here, may come as well. Empty: steps
    compute the prompt, and its KV is sent here."""
    prompt_tokens: bytes = b""
    generated_tokens: bytes = b""
    """As in `PrefillChunk`."""
    answer: tuple[KvSlice, ...] = ()
    """Who keeps the KV of which of the answer's positions, each of them once; several may take
    turns. Empty: the master keeps it. Positions that the answer never has do not matter."""
    kept_only: bool = False
    """Layers may come without the tokens that they dropped (`CsaPlan.decode_kept_only`)."""
    retain: bool = False
    """Its KV is not freed when the answer ends, but lies here until `keep`, `release` or
    `cancel`."""
    trace: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reused = [kv_slice.span for kv_slice in self.slices if kv_slice.source is not None]
        if not Span(0, self.reused).partitioned_by(reused):
            raise ValueError(
                f"what request {self.sequence_id} reuses is not its prompt's beginning"
            )
        if self.reused and self.kept_only:
            raise ValueError(
                f"request {self.sequence_id} reuses whole KV, and is to have some of its own"
            )

    @property
    def reused(self) -> int:
        """Positions before this one have KV here that others have computed."""
        return sum(kv_slice.span.length for kv_slice in self.slices if kv_slice.source is not None)


@dataclass(frozen=True, kw_only=True)
class JoinBatch:
    """`join`, to rank 0: decode the request. Its KV has landed everywhere, or it rides."""

    sequence_id: int
    first_token: int | None
    """None: it rides, and its first token comes as a row of `Tokens` like any other."""
    budget: int = 0
    """Tokens that an iteration of the stream may compute on each master, with riders
    (`iteration.fill`). The last one that was told counts."""
    instances: tuple[int, ...] = ()
    """Whom the row concerns: who draws its tokens, and who holds or is to keep its KV. Rows without
    a common one are iterated apart. Empty: all of the gang."""


# --- to the router (notifications on the router's own connection) ---------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillProgress:
    """`prefill_progress`, from a rank with a job to do, about once a second: it gets on."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """`prefill_done`, from each rank of a job's group: computed, and all KV sent and freed."""

    step_id: int
    rank: int
    cancelled: bool
    queue_s: float
    compute_s: float
    communication_s: float
    """Waiting for exchanges inside the group."""
    transfer_s: float
    yielded_s: float
    exchange_s: float = 0.0
    """Exchanges inside the group were under way, hidden behind computing or not."""
    bytes_sent: tuple[int, ...] = ()
    """To each rank of the gang, in rank order; empty where nothing was computed."""
    placed_bytes: int = 0
    """Of them, new KV that is kept elsewhere than it was computed."""
    placing_s: float = 0.0
    """What that took the rank, storing of what came by anyway included."""
    placing_stored_s: float = 0.0
    """Of that, storing of what came by anyway."""
    placing_waited_s: float = 0.0
    """Of that, waiting for what did not."""
    last_layer_s: float = 0.0
    """Of computing and communication, the last layer, in which nothing comes by."""


@dataclass(frozen=True, kw_only=True)
class RankKvReceived:
    """`landed`, from a decode rank: its whole share of the prompt's KV is in its pool."""

    sequence_id: int
    rank: int
    tokens: int
    seconds: float
    """Since slots were reserved for it."""
    receiving_s: float = 0.0
    """Since the first of it arrived."""
    received_bytes: int = 0
    """Nothing of KV that lay here already."""
    waited: float = 0.0
    """Seconds that one of its senders has waited for its turn (`ReceivingBackends`), at most."""


@dataclass(frozen=True, kw_only=True)
class LinkBroken:
    """`link_broken`: a rank of the other gang cannot be reached over the KV-transfer connection."""

    epoch: str
    rank: int
    """Which tells."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlotsFreed:
    """`freed`: the rank holds nothing of the request any more."""

    sequence_id: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class KvRetained:
    """`kept`: what the rank holds of a sequence after a `keep` or `release`, if anything."""

    sequence_id: int
    rank: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestFailed:
    """`failed`: the rank cannot serve the request; `code` names an error of the tree."""

    sequence_id: int
    rank: int
    code: str
    message: str
    param: str | None = None
    """The field of the client's request at fault, where one is."""


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """What `stats` answers: for metrics, health and the tests' leak checks."""

    rank: int
    kv_slots: int
    kv_used: int
    requests: int
    running: int
    waiting: int
    iterations: int
    """Of decoding, since the rank exists."""
    iterating_s: float = 0.0
    """Seconds that they took."""
    exchange_s: float = 0.0
    """Of them, queries of the rank's rows were under way to others, or answers to them."""
    communication_s: float = 0.0
    """Of that, the rank stood still."""
