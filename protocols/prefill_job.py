"""What ranks that prefill are told: a step, which is a batch of chunks on one group."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from csps.protocols.csa import CsaPlan
from csps.protocols.errors import ConfigError
from csps.protocols.placement import KvShare
from csps.protocols.sampling import Sampling
from csps.protocols.span import Span
from csps.protocols.tokens import TOKEN_BYTES


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
    sampling: Sampling = field(default_factory=Sampling)
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
