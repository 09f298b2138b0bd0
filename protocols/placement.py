"""Which of a sequence's tokens lie, or are computed, on which instance.

Spans have a step, so that contiguous, zigzag, striped and round-robin layouts are a few spans each,
whatever their length. A span of tokens names the sequence that computed them, its origin: KV that
another sequence takes over needs neither new names nor copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Positions start, start + step, … below stop. Of equal positions there is one span only:
    `stop` follows the last one, a span of one has step 1, an empty one is (0, 0, 1)."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        assert self.start >= 0
        assert self.step >= 1
        n = max(0, -(-(self.stop - self.start) // self.step))
        if n < 2:
            object.__setattr__(self, "step", 1)
        if n == 0:
            object.__setattr__(self, "start", 0)
        object.__setattr__(self, "stop", self.start + (n - 1) * self.step + 1 if n else 0)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __contains__(self, position: object) -> bool:
        return position in self.positions

    @property
    def positions(self) -> range:
        """All of them, ascending."""
        return range(self.start, self.stop, self.step)

    def intersection(self, other: TokenSpan) -> TokenSpan:
        """Positions of both.

        They solve two congruences, start + i·step = other.start + j·other.step, which by the
        Chinese remainder theorem leaves one residue modulo the steps' least common multiple, or
        none.
        """
        common = gcd(self.step, other.step)
        apart = other.start - self.start
        if not self or not other or apart % common:
            return EMPTY
        modulus = other.step // common
        turns = apart // common * pow(self.step // common, -1, modulus) % modulus
        step, first = self.step * modulus, self.start + turns * self.step
        # `first` is the least solution from `self.start` on; the other span may begin later.
        start = first + max(0, -(-(other.start - first) // step)) * step
        return TokenSpan(start, max(start, min(self.stop, other.stop)), step)

    def shifted(self, tokens: int) -> TokenSpan:
        """The span `tokens` further on."""
        return TokenSpan(self.start + tokens, self.stop + tokens, self.step) if self else EMPTY


EMPTY = TokenSpan(0, 0)


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Tokens that a sequence has computed, or will compute, on an instance."""

    origin: int
    """The sequence that computed them."""
    instance: int
    span: TokenSpan


Placement = tuple[KvSpan, ...]
"""Spans in any order. Those of one origin do not overlap, except where tokens lie twice."""


def contiguous(bounds: Sequence[int]) -> tuple[tuple[TokenSpan, ...], ...]:
    """Per part its spans: from each bound to the next one. Parts without tokens have none.

    Args:
        bounds: one more than there are parts, ascending.
    """
    assert all(a <= b for a, b in pairwise(bounds)), "bounds descend"
    return tuple(_spans(TokenSpan(a, b)) for a, b in pairwise(bounds))


def zigzag(length: int, parts: int) -> tuple[tuple[TokenSpan, ...], ...]:
    """Per part its spans: of 2·parts even chunks the i-th and the i-th from the end, so that under
    causal attention all parts have about as many pairs of tokens (Context Parallelism)."""
    cuts = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    chunks = [TokenSpan(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(parts))


def striped(length: int, parts: int) -> tuple[tuple[TokenSpan, ...], ...]:
    """Per part its spans: every `parts`-th token (Striped Attention, LoongServe)."""
    return tuple(_spans(TokenSpan(i, max(i, length), parts)) for i in range(parts))


def round_robin(start: int, stop: int, instances: Sequence[int]) -> dict[int, TokenSpan]:
    """Which instance keeps which of the tokens decoded from `start` to `stop`: in turn, the first
    instance that at `start`."""
    step = len(instances)
    return {
        instance: TokenSpan(start + i, max(start + i, stop), step)
        for i, instance in enumerate(instances)
    }


def place(
    origin: int, instances: Sequence[int], layout: Sequence[Sequence[TokenSpan]]
) -> Placement:
    """A sequence's tokens on instances, part by part of a layout."""
    return tuple(
        KvSpan(origin, instance, span)
        for instance, spans in zip(instances, layout, strict=True)
        for span in spans
    )


def on_instance(placement: Placement, instance: int) -> Placement:
    """What of a placement lies on an instance."""
    return tuple(kv for kv in placement if kv.instance == instance)


def _spans(*spans: TokenSpan) -> tuple[TokenSpan, ...]:
    return tuple(span for span in spans if span)
