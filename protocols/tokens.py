"""Tokens that ranks have drawn, as they travel to the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
