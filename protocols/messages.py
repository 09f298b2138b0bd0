"""What the router and the ranks say to each other over MessagePack-RPC.

Messages are grouped by recipient. Every class is a frozen dataclass that `protocols.schema`
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
from itertools import accumulate, combinations, pairwise
from math import gcd
from typing import Literal

from csps.protocols.csa import CsaPlan
from csps.protocols.errors import ConfigError

TOKEN_BYTES = 4
"""Of an id in a message, little-endian."""
SCHEMA_VERSION = 4

Role = Literal["prefill", "decode", "elastic"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Span:
    """Token positions of one request: start, start + step, … below stop.

    Of equal positions there is one span only: `stop` follows the last one, a span of one has step
    1, an empty one is (0, 0). So contiguous, zigzag, striped and round-robin layouts are a few
    spans each, whatever their length (`protocols.placement`).
    """

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or self.step < 1:
            raise ValueError(
                f"span [{self.start}, {self.stop}) in steps of {self.step} is not a range of "
                "positions"
            )
        n = self.length
        if n < 2:
            object.__setattr__(self, "step", 1)
        if n == 0:
            object.__setattr__(self, "start", 0)
        object.__setattr__(self, "stop", self.start + (n - 1) * self.step + 1 if n else 0)

    @property
    def length(self) -> int:
        """Tokens in the span."""
        return -(-(self.stop - self.start) // self.step)

    @property
    def positions(self) -> range:
        """All of them, ascending."""
        return range(self.start, self.stop, self.step)

    def intersection(self, other: Span) -> Span:
        """Positions of both.

        They solve two congruences, start + i·step = other.start + j·other.step, which by the
        Chinese remainder theorem leaves one residue modulo the steps' least common multiple, or
        none.
        """
        common = gcd(self.step, other.step)
        apart = other.start - self.start
        if not self.length or not other.length or apart % common:
            return Span(0, 0)
        modulus = other.step // common
        turns = apart // common * pow(self.step // common, -1, modulus) % modulus
        step, first = self.step * modulus, self.start + turns * self.step
        # `first` is the least solution from `self.start` on; the other span may begin later.
        start = first + max(0, -(-(other.start - first) // step)) * step
        return Span(start, max(start, min(self.stop, other.stop)), step)

    def without(self, other: Span) -> tuple[Span, ...]:
        """Positions that the other one does not have, in as few spans as it takes."""
        cut = self.intersection(other)
        if not cut.length:
            return (self,) if self.length else ()
        behind = cut.stop - 1 + self.step
        rest = [
            Span(self.start, cut.start, self.step),
            *(
                Span(start, cut.stop, cut.step)
                for start in range(cut.start, cut.stop, self.step)[1 : cut.step // self.step]
            ),
            Span(behind, max(behind, self.stop), self.step),
        ]
        return tuple(span for span in rest if span.length)

    def parted_by(self, parts: Sequence[Span]) -> bool:
        """Whether the parts have each of its positions once, and no others."""
        return (
            sum(it.length for it in parts) == self.length
            and all(it.intersection(self) == it for it in parts)
            and not any(a.intersection(b).length for a, b in combinations(parts, 2))
        )

    def shifted(self, tokens: int) -> Span:
        """The span `tokens` further on."""
        return Span(self.start + tokens, self.stop + tokens, self.step) if self.length else self

    def part(self, rows: slice) -> Span:
        """Some of the positions, by their numbers in the span."""
        chosen = self.positions[rows]
        return Span(chosen.start, chosen.stop, chosen.step)

    def rows_of(self, part: Span) -> slice:
        """The numbers that the positions of a part have in this span."""
        if not part.length:
            return slice(0, 0)
        first, step = (part.start - self.start) // self.step, max(1, part.step // self.step)
        return slice(first, first + (part.length - 1) * step + 1, step)


@dataclass(frozen=True, kw_only=True)
class KvShare:
    """The instance that holds (or is to hold) the KV of one span of a request."""

    instance: int
    span: Span
    origin: int | None = None
    """The sequence that has computed it, and under whose rid it lies there; None: this one. What
    lies there already is read where it lies, neither computed again nor copied: whoever names it
    holds its slots from then on to its own end, whatever becomes of the origin."""


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


# --- to prefill ranks ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillPiece:
    """A chunk of one request inside a job: positions [start, start + length)."""

    rid: int
    start: int
    length: int
    rows: tuple[KvShare, ...] = ()
    """Which instance computes what, each position once, in the order of an instance's rows; empty
    cuts at the bounds of the job. Not every strategy takes such rows."""
    history: tuple[KvShare, ...] = ()
    """Where the KV of all positions before the chunk lies, in any order; the slots are known to its
    holders. What other sequences have computed (`KvShare.origin`) comes first of all positions."""
    placement: tuple[KvShare, ...] = ()
    """Who keeps the KV of this chunk; empty keeps it where it is computed."""
    destinations: tuple[KvShare, ...] = ()
    """Decode instances to stream the chunk's KV to; empty keeps it here. The first chunk that the
    sequence computes sends its history as well, which others have computed. Shares with an origin
    are there already."""
    stays: bool = False
    """Its KV is not freed when all of it has landed, but lies here until `keep`, `release` or
    `cancel`. Of all chunks of a sequence, or of none; a gang that decodes goes by
    `Reserve.stays`."""
    last: bool = True
    """The prompt ends with this chunk: draw the first token."""
    sampling: Sampling = Sampling()
    prompt_tokens: bytes = b""
    """Distinct prompt tokens, int32; sent only when a repetition penalty needs them."""
    drawn: bytes = b""
    """Tokens of the answer that an earlier attempt has drawn, int32: the last ones of what is
    prefilled. The token to draw is the next of the answer."""

    def __post_init__(self) -> None:
        if not self.rows:
            return
        chunk = Span(self.start, self.start + self.length)
        if not chunk.parted_by([it.span for it in self.rows]):
            raise ValueError(f"rows of request {self.rid} are not its positions {chunk}, each once")

    @property
    def whole(self) -> bool:
        """The chunk is all of its prompt."""
        return self.start == 0 and self.last

    @property
    def begins(self) -> bool:
        """It is the first one that the sequence computes."""
        return all(it.origin is not None for it in self.history)

    @property
    def decoded(self) -> bool:
        """Its KV is needed after the prompt: the first token is not the answer's last."""
        return self.sampling.max_tokens - len(self.drawn) // TOKEN_BYTES > 1


@dataclass(frozen=True, kw_only=True)
class PrefillJob:
    """`prefill`: one variable-length batch on one ordered group of instances.

    The pieces are laid end to end and cut at `bounds`: instance `group[i]` computes tokens
    [bounds[i], bounds[i+1]) of the concatenation; or as many of all pieces, those that their
    `rows` give it. Every rank of the gang receives every job: members prepare it, and the leader
    has it begin by the gang's log (`conductor`). `tokens` holds only the receiver's own share, in
    the order of its rows.
    """

    job_id: int
    """The step's number, new for every step of a router."""
    group: tuple[int, ...]
    bounds: tuple[int, ...]
    pieces: tuple[PrefillPiece, ...]
    tokens: bytes = b""
    strategy: str = "ulysses"
    csa: CsaPlan | None = None
    """How strategies that attend sparsely do so; "csa" needs it. "levels", which is exact, needs
    one that drops nothing."""
    urgent: bool = False
    """May run inside a running job that is not urgent, between two of its parts."""
    trace: dict[str, str] = field(default_factory=dict)
    """W3C trace context of the first piece's request."""

    @property
    def contiguous(self) -> bool:
        """Rows are cut at the bounds."""
        return not any(piece.rows for piece in self.pieces)

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
        if self.csa.decode_kept_only and not all(piece.whole for piece in self.pieces):
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
        for share in (share for piece in self.pieces for share in piece.rows):
            if share.instance not in counts:
                raise ValueError(f"instance {share.instance} has rows and is not in the group")
            counts[share.instance] += share.span.length
        if not all(piece.rows or not piece.length for piece in self.pieces):
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
        if plan.importance_layer == "same":
            raise ConfigError(
                "importance_layer 'same' is for SP-NTP; in SP-TP the last queries arrive when most "
                "keys have been attended to, so only the previous layer can judge"
            )


@dataclass(frozen=True, kw_only=True)
class CancelRequest:
    """`cancel`: stop working for a request and free what it holds, at any stage."""

    rid: int


EVERYTHING: tuple[Span, ...] = (Span(0, 2**62),)
"""All positions that a sequence has."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """`keep`, to rank 0: a sequence that `stays` is over, and of its KV only this is kept under its
    rid. Where it is a row it leaves. Each rank of the gang answers with `kept`, or `freed` if it
    has nothing left of it; it may be told more than once."""

    rid: int
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
class Release:
    """`release`, to rank 0: free some of what was kept of a sequence, which is over. Answered as
    `keep`. Slots that others hold meanwhile (`KvShare.origin`) come back with the last of them; who
    counts on those that were told to be free releases nothing that somebody still reads."""

    rid: int
    spans: tuple[Span, ...] = EVERYTHING


# --- to decode ranks -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """`reserve`: set KV slots aside and expect the prompt's KV from a prefill gang; or, with
    `prompt`, a sequence that computes its prompt in the stream in which it is decoded."""

    rid: int
    epoch: str
    shares: tuple[KvShare, ...]
    """The whole prompt's KV placement over the gang's instances. What has an origin lies there
    already, and is the prompt's beginning; an instance that has no other share tells of none that
    has landed."""
    master: int
    """Instance that embeds the request's tokens and draws the next one."""
    prompt_length: int
    """Tokens to be prefilled, those of `drawn` included."""
    sampling: Sampling
    prompt: bytes = b""
    """Of a sequence that rides (`protocols.iteration`): all tokens to be computed, int32, only to
    the ranks of its master; those before them, whose KV is here, may come as well. Empty: steps
    compute the prompt, and its KV is sent here."""
    prompt_tokens: bytes = b""
    drawn: bytes = b""
    """As in `PrefillPiece`."""
    answer: tuple[KvShare, ...] = ()
    """Who keeps the KV of which of the answer's positions, each of them once; several may take
    turns. Empty: the master keeps it. Positions that the answer never has do not matter."""
    kept_only: bool = False
    """Layers may come without the tokens that they dropped (`CsaPlan.decode_kept_only`)."""
    stays: bool = False
    """Its KV is not freed when the answer ends, but lies here until `keep`, `release` or
    `cancel`."""
    trace: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reused = [it.span for it in self.shares if it.origin is not None]
        prefix = Span(0, self.reused)
        once = not any(a.intersection(b).length for a, b in combinations(reused, 2))
        if not once or not all(it.intersection(prefix) == it for it in reused):
            raise ValueError(f"what request {self.rid} reuses is not its prompt's beginning")
        if self.reused and self.kept_only:
            raise ValueError(f"request {self.rid} reuses whole KV, and is to have some of its own")

    @property
    def reused(self) -> int:
        """Positions before this one have KV here that others have computed."""
        return sum(it.span.length for it in self.shares if it.origin is not None)


@dataclass(frozen=True, kw_only=True)
class JoinBatch:
    """`join`, to rank 0: decode the request. Its KV has landed everywhere, or it rides."""

    rid: int
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
class TokenLogprob:
    """Log-probability of one token id under the model's own distribution: the log-softmax of the
    logits before bias, penalties, temperature and filters."""

    token: int
    logprob: float


@dataclass(slots=True, kw_only=True)  # frozen ones take twice as long to make, at every token
class TokenDrawn:
    """One token of a request, in order of `index` (0 is prefill's): a row of `Tokens`."""

    rid: int
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
class Tokens:
    """`tokens`: all that a master drew in one iteration, or a prefill job at its end.

    One message and not one for each token, and in columns, because a router reads thousands of
    tokens a second: 64 of them in one frame cost a tenth of what 64 messages do.
    """

    rids: tuple[int, ...]
    indices: tuple[int, ...]
    """Numbers of the tokens in their answers."""
    tokens: tuple[int, ...]
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    """By row, of the answers that end."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By row, of the requests that asked for them."""

    def __post_init__(self) -> None:
        rows = len(self.rids)
        if not rows == len(self.indices) == len(self.tokens):
            raise ValueError(f"{rows} rids, {len(self.indices)} indices, {len(self.tokens)} tokens")
        for row in (*self.finish_reasons, *self.logprobs):
            if not 0 <= row < rows:
                raise ValueError(f"there is no row {row} among {rows}")

    @classmethod
    def of(cls, drawn: Sequence[TokenDrawn]) -> Tokens:
        """Lay rows out in columns."""
        rows = list(enumerate(drawn))
        return cls(
            rids=tuple(it.rid for it in drawn),
            indices=tuple(it.index for it in drawn),
            tokens=tuple(it.token for it in drawn),
            finish_reasons={row: it.finish_reason for row, it in rows if it.finish_reason},
            logprobs={
                row: Logprobs(logprob=it.logprob, top=it.top_logprobs)
                for row, it in rows
                if it.logprob is not None
            },
        )

    def each(self) -> Iterator[TokenDrawn]:
        """The rows, in order."""
        reasons, logprobs = self.finish_reasons, self.logprobs
        columns = zip(self.rids, self.indices, self.tokens, strict=True)
        for row, (rid, index, token) in enumerate(columns):
            known = logprobs.get(row)
            yield TokenDrawn(
                rid=rid,
                index=index,
                token=token,
                finish_reason=reasons.get(row),
                logprob=known.logprob if known else None,
                top_logprobs=known.top if known else (),
            )


@dataclass(frozen=True, kw_only=True)
class PrefillProgress:
    """`prefill_progress`, from a rank with a job to do, about once a second: it gets on."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """`prefill_done`, from each rank of a job's group: computed, and all KV sent and freed."""

    job_id: int
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


@dataclass(frozen=True, kw_only=True)
class KvLanded:
    """`landed`, from a decode rank: its whole share of the prompt's KV is in its pool."""

    rid: int
    rank: int
    tokens: int
    seconds: float


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

    rid: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class KvKept:
    """`kept`: what the rank holds of a sequence after a `keep` or `release`, if anything."""

    rid: int
    rank: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestFailed:
    """`failed`: the rank cannot serve the request; `code` names an error of the tree."""

    rid: int
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
