"""Which of a sequence's tokens lie, or are computed, on which instance.

Spans have a step, so that contiguous, zigzag, striped and round-robin layouts are a few spans each,
whatever their length. Who computes rows, who holds what they see and who keeps what they add are
three placements (`PrefillPiece.rows`, `history`, `placement`), each in any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from csps.protocols.messages import KvShare, Span


def contiguous(bounds: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
    """Per part its spans: from each bound to the next one. Parts without tokens have none.

    Args:
        bounds: one more than there are parts, ascending.
    """
    assert all(a <= b for a, b in pairwise(bounds)), "bounds descend"
    return tuple(_spans(Span(a, b)) for a, b in pairwise(bounds))


def zigzag(length: int, parts: int) -> tuple[tuple[Span, ...], ...]:
    """Per part its spans: of 2·parts even chunks the i-th and the i-th from the end, so that under
    causal attention all parts have about as many pairs of tokens (Context Parallelism)."""
    cuts = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(parts))


def striped(length: int, parts: int) -> tuple[tuple[Span, ...], ...]:
    """Per part its spans: every `parts`-th token (Striped Attention, LoongServe)."""
    return tuple(_spans(Span(i, max(i, length), parts)) for i in range(parts))


def round_robin(start: int, stop: int, instances: Sequence[int]) -> dict[int, Span]:
    """Which instance keeps which of the tokens decoded from `start` to `stop`: in turn, the first
    instance that at `start`."""
    step = len(instances)
    return {
        instance: Span(start + i, max(start + i, stop), step)
        for i, instance in enumerate(instances)
    }


def place(
    instances: Sequence[int], layout: Sequence[Sequence[Span]], *, start: int = 0
) -> tuple[KvShare, ...]:
    """Tokens from `start` on, on instances, part by part of a layout of as many tokens."""
    return tuple(
        KvShare(instance=instance, span=span.shifted(start))
        for instance, spans in zip(instances, layout, strict=True)
        for span in spans
    )


def rest_of(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """Positions that none of the others has."""
    rest: tuple[Span, ...] = (span,)
    for other in others:
        rest = tuple(part for it in rest for part in it.without(other))
    return rest


def _spans(*spans: Span) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.length)
