"""Requests of a workload, as load tests and the simulator read them, and conversations.

Each turn of a conversation begins with the text of all turns before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from csps.protocols.core.errors import ConfigError, nearest

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's `hash_ids` stands for."""


@dataclass(frozen=True, kw_only=True)
class RequestObjective:
    """The objective of a request, as in the `csps` object of the API."""

    objective: str | None = None
    """`ttft` or `accuracy`."""
    max_accuracy_loss: float | None = None
    """Share of accuracy that may be lost, 0 to 1."""
    max_ttft_ms: float | None = None

    def body(self) -> dict[str, str | float]:
        """Return the fields that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def allows_loss(self) -> bool:
        """Return whether an answer may be less accurate than with exact attention."""
        return self.objective == "accuracy" or bool(self.max_accuracy_loss)

    @property
    def label(self) -> str:
        """Return the name in results: `ttft max_accuracy_loss=0.01`."""
        bounds = [f"{name}={value:g}" for name, value in vars(self).items() if _number(value)]
        return " ".join([self.objective or "default", *bounds])


def _number(value: object) -> bool:
    return isinstance(value, int | float)


METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds on a request's latencies in milliseconds; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """Parse words like `ttft:2000 tpot:50`.

        Raises:
            ConfigError: a word is no metric with a number.
        """
        bounds: dict[str, float] = {}
        for word in words:
            name, _, milliseconds = word.partition(":")
            if name not in METRICS:
                raise ConfigError(f"unknown goodput metric '{name}'{nearest(name, METRICS)}")
            try:
                bounds[name] = float(milliseconds)
            except ValueError:
                raise ConfigError(f"goodput: expected {name}:MILLISECONDS, got '{word}'") from None
        return cls(**bounds)

    def body(self) -> dict[str, float]:
        """Return the bounds that are set."""
        return {name: bound for name, bound in vars(self).items() if bound is not None}

    def __bool__(self) -> bool:
        return any(bound is not None for bound in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """A request of a workload and its arrival time."""

    arrival_ns: int
    """Nanoseconds from the start of the run. A later turn of a conversation comes no earlier."""
    input_length: int
    """Tokens of the prompt without special tokens."""
    output_length: int
    """Tokens of the answer: at most, or exactly if end-of-sequence tokens are ignored."""
    hash_ids: tuple[int, ...] = ()
    """One id for every `HASH_BLOCK_TOKENS` tokens of the prompt. Equal ids at the start of two
    prompts are equal text. Empty: the prompt shares no text.
    """
    prompt: str | None = None
    """Text of the prompt. A later turn of a conversation has only its added text."""
    answer: str | None = None
    """The one right answer, if the prompt has one."""
    objective: RequestObjective | None = None
    conversation: str | None = None
    """Name of the conversation. Its turns follow each other: each prompt starts with the one before
    and its answer, and `input_length` counts them too.
    """
    tenant: str = ""
    """Name of the client, whom the simulator's scheduler treats as the holder of an API key; empty:
    the clients without a name are one."""
    priority: int = 0
    """Client's priority; lower ones come first."""
    delay_ns: int = 0
    """Nanoseconds from the end of the previous turn to this one."""
    slo: Slo | None = None
    """The request's own bounds on its latencies. None: those of the run."""
    max_tokens: int | None = None
    """Token limit that the client states to the scheduler. None: `output_length`."""
    cls: str = ""
    """The scheduler's name of its class, if it asked for attention of its own; empty: its objective
    says all."""
    leaves_after_ns: int | None = None
    """Nanoseconds after which the client gives up, if it does."""

    def __post_init__(self) -> None:
        if min(self.arrival_ns, self.delay_ns, self.leaves_after_ns or 0) < 0:
            raise ValueError(f"times of a request start at 0: {self.arrival_ns}, {self.delay_ns}")
        if min(self.input_length, self.output_length) < 1:
            lengths = f"{self.input_length} in and {self.output_length} out"
            raise ValueError(f"a request has at least one token in and one out, not {lengths}")


@dataclass(frozen=True, kw_only=True)
class FittedRequests:
    """Requests that fit into a model's positions."""

    requests: tuple[WorkloadRequest, ...]
    cut: int
    """Number of requests whose prompt was cut."""


def fit(requests: Sequence[WorkloadRequest], positions: int) -> FittedRequests:
    """Cut prompts so that prompt and answer fit; answers keep their length.

    A prompt with text is not cut, because its token boundaries are unknown here. Give the requests
    text after fitting them.

    Raises:
        ValueError: an answer alone takes all positions, or a text does not fit.
    """
    fitted = tuple(_fit(request, positions) for request in requests)
    cut = sum(a is not b for a, b in zip(fitted, requests, strict=True))
    return FittedRequests(requests=fitted, cut=cut)


def _fit(request: WorkloadRequest, positions: int) -> WorkloadRequest:
    room = positions - request.output_length
    if request.input_length <= room:
        return request
    if room < 1 or request.prompt is not None:
        total = f"{request.input_length} + {request.output_length} tokens"
        raise ValueError(f"{total} do not fit into {positions} positions and cannot be cut")
    blocks = -(-room // HASH_BLOCK_TOKENS)
    return replace(request, input_length=room, hash_ids=request.hash_ids[:blocks])


_BLOCKS_OF_ONE = 1 << 32
"""Range of hash ids for each conversation."""
_PARTIAL = 1 << 31
"""Offset of the ids of partial last blocks. The next turn fills such a block, which then has
another id.
"""


@dataclass(frozen=True, kw_only=True)
class ConversationTurns:
    """Later turns of a conversation."""

    count: int = 1
    """Turns of a conversation, the first one included."""
    added_tokens: int = 128
    """Tokens of each later turn's own text."""
    delay_ns: int = 1_000_000_000
    """Time from the end of an answer to the next turn."""


def converse(
    first_turns: Sequence[WorkloadRequest], turns: ConversationTurns
) -> list[WorkloadRequest]:
    """Make each request the first turn of a conversation."""
    if turns.count == 1:
        return list(first_turns)
    return [
        turn for number, first in enumerate(first_turns) for turn in _turns(number, first, turns)
    ]


def _turns(
    number: int, first: WorkloadRequest, turns: ConversationTurns
) -> Iterator[WorkloadRequest]:
    length = first.input_length
    for turn in range(turns.count):
        yield replace(
            first,
            input_length=length,
            hash_ids=_hash_ids(number, turn, length),
            conversation=str(number),
            delay_ns=turns.delay_ns if turn else 0,
        )
        length += first.output_length + turns.added_tokens


def _hash_ids(number: int, turn: int, length: int) -> tuple[int, ...]:
    whole, rest = divmod(length, HASH_BLOCK_TOKENS)
    base = (number + 1) * _BLOCKS_OF_ONE
    last = (base + _PARTIAL + turn,) if rest else ()
    return (*range(base, base + whole), *last)
