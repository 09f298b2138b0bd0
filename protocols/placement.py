"""Which of a sequence's tokens lie, or are computed, on which instance.

Spans have a step, so that contiguous, zigzag, striped and round-robin layouts are a few spans each,
whatever their length. Who computes rows, who holds what they see and who keeps what they add are
three placements (`PrefillPiece.rows`, `history`, `placement`), each in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from csps.protocols.span import Span, SpanIndex

Layout = tuple[tuple[Span, ...], ...]
"""Of a chunk over the parts of a group: per part its spans, the chunk's first token at 0."""


@dataclass(frozen=True, kw_only=True)
class KvShare:
    """The instance that holds (or is to hold) the KV of one span of a request."""

    instance: int
    span: Span
    origin: int | None = None
    """The sequence that has computed it, and under whose rid it lies there; None: this one. What
    lies there already is read where it lies, neither computed again nor copied: whoever names it
    holds its slots from then on to its own end, whatever becomes of the origin."""


def contiguous(bounds: Sequence[int]) -> Layout:
    """Per part its spans: from each bound to the next one. Parts without tokens have none.

    Args:
        bounds: one more than there are parts, ascending.
    """
    assert all(a <= b for a, b in pairwise(bounds)), "bounds descend"
    return tuple(_spans(Span(a, b)) for a, b in pairwise(bounds))


def even(length: int, parts: int) -> Layout:
    """Per part its span: contiguous, as long as the others' give or take a token."""
    return contiguous([length * i // parts for i in range(parts + 1)])


def zigzag(length: int, parts: int) -> Layout:
    """Per part its spans: of 2·parts even chunks the i-th and the i-th from the end, so that under
    causal attention all parts have about as many pairs of tokens (Context Parallelism)."""
    cuts = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(parts))


def zigzag_of(tokens: Sequence[int]) -> Layout:
    """Zigzag whose parts have so many tokens each: half of a part's from the beginning on, half
    from the end. Of equal parts it is `zigzag`, give or take a token; of others whoever has fewer
    tokens also has fewer pairs."""
    late = [count // 2 for count in tokens]
    early = [count - half for count, half in zip(tokens, late, strict=True)]
    cuts = list(accumulate([*early, *reversed(late)], initial=0))
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(len(tokens)))


def striped(length: int, parts: int) -> Layout:
    """Per part its spans: every `parts`-th token (Striped Attention, LoongServe)."""
    return tuple(_spans(Span(i, max(i, length), parts)) for i in range(parts))


def striped_of(tokens: Sequence[int]) -> Layout:
    """Striped whose parts have so many tokens each: parts take turns, from the beginning on, until
    they have theirs. Of equal parts it is `striped`."""
    spans: list[list[Span]] = [[] for _ in tokens]
    start = reached = 0
    for count in sorted(set(tokens)):
        taking = [part for part, wanted in enumerate(tokens) if wanted >= count]
        stop = start + (count - reached) * len(taking)
        for turn, part in enumerate(taking):
            spans[part].append(Span(start + turn, max(start + turn, stop), len(taking)))
        start, reached = stop, count
    return tuple(_spans(*it) for it in spans)


RING_LAYOUTS: Mapping[str, Callable[[Sequence[int]], Layout]] = {
    "zigzag": zigzag_of,
    "striped": striped_of,
}
"""Those that share causal attention evenly, from how many tokens each part has."""

LAYOUTS: Mapping[str, Callable[[int, int], Layout]] = {
    "contiguous": even,
    "zigzag": zigzag,
    "striped": striped,
}
"""By the names of the papers: from the length of a chunk and the number of parts."""


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
    rest = _spans(span)
    for other in others:
        rest = tuple(part for it in rest for part in it.without(other))
    return rest


def rests_of(spans: Iterable[Span], others: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Of each span, the positions that none of the others has."""
    index = SpanIndex(others)
    for span in spans:
        yield rest_of(span, [others[it] for it in index.near(span)])


def _spans(*spans: Span) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.length)
