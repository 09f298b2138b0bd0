"""List what `csps profile` measures, short runs first, so that an interrupted profile can be
fitted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from csps.protocols.attention.plan import RINGS, Ring

PROMPTS = (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
QUICK_PROMPTS = (128, 512, 2_048, 8_192)
CHAINS = ((512, 8), (2_048, 4), (2_048, 8), (4_096, 4))
"""Pairs (tokens of a chunk, chunks): each chunk has the ones before it as history."""
QUICK_CHAINS = ((512, 4), (2_048, 4))
BATCHES = ((128, 4), (512, 4), (256, 16), (2_048, 4))
"""Pairs (tokens of a prompt, prompts in one step)."""
QUICK_BATCHES = ((256, 8),)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
DECODE_CONTEXTS = (64, 1_024, 4_096, 16_384)
QUICK_DECODE_BATCHES = (1, 4, 16)
QUICK_DECODE_CONTEXTS = (64, 2_048)
DECODE_TOKENS = 65_536
"""Most context of a batch, even if more fits: filling the cache takes most of the time."""


RING_CHUNK_DIVISORS = (1, 1, 2, 4, 8, 16, 32)
"""Divisors of the first chunk's length, one per chunk, in a profile of rings."""
RING_FIRST = (256, 512, 1_024, 2_048, 4_096, 8_192)
QUICK_RING_FIRST = (512, 2_048)


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    """Prompts that are prefilled side by side, chunk after chunk; every chunk is a measurement."""

    sp: int
    tokens: int
    """Tokens of a chunk of one prompt."""
    chunks: int = 1
    batch: int = 1

    @property
    def longest(self) -> int:
        """Tokens of a prompt when its last chunk is done."""
        return self.tokens * self.chunks


@dataclass(frozen=True, kw_only=True)
class RingRun:
    """A prompt in ever shorter chunks, each of which is a measurement.

    The cached fraction of the context grows from 0 to 99 %, and no chunk is computed only to be
    history.
    """

    sp: int
    first: int
    """Tokens of the first chunk."""
    strategy: Ring

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return tuple(self.first // divisor for divisor in RING_CHUNK_DIVISORS)

    @property
    def longest(self) -> int:
        """Tokens of the prompt when its last chunk is done."""
        return sum(self.chunks)


@dataclass(frozen=True, kw_only=True)
class DecodeRun:
    """Requests that decode together; an iteration is the measurement."""

    sp: int
    """Instances that store their KV and sample their tokens."""
    context: int
    """Prompt tokens of each request."""
    batch: int


@dataclass(frozen=True, kw_only=True)
class GangLimits:
    """Capacity of a gang."""

    instances: int
    kv_slots: int
    """Slots of one instance."""
    max_positions: int
    """Positions of one request."""
    masters: int = sys.maxsize
    """Requests that one instance can sample, by its slots in layers with a window."""


def prefill_runs(limits: GangLimits, *, quick: bool) -> list[PrefillRun]:
    """Return all runs that fit, for every group size."""
    prompts = QUICK_PROMPTS if quick else PROMPTS
    chains = QUICK_CHAINS if quick else CHAINS
    batches = QUICK_BATCHES if quick else BATCHES
    runs = [
        run
        for sp in group_sizes(limits.instances)
        for run in (
            *(PrefillRun(sp=sp, tokens=tokens) for tokens in prompts),
            *(PrefillRun(sp=sp, tokens=tokens, chunks=chunks) for tokens, chunks in chains),
            *(PrefillRun(sp=sp, tokens=tokens, batch=batch) for tokens, batch in batches),
        )
        if run.longest < limits.max_positions
        and run.tokens >= sp
        # Instances get equal slices, rounded up.
        and run.longest * run.batch + sp * run.chunks <= sp * limits.kv_slots
    ]
    return sorted(runs, key=lambda run: (run.longest * run.batch, run.sp, run.chunks, run.tokens))


def ring_runs(limits: GangLimits, *, quick: bool) -> list[RingRun]:
    """Return all runs that fit, with both variants one after the other, for groups of several."""
    runs = [
        RingRun(sp=sp, first=first, strategy=strategy)
        for sp in group_sizes(limits.instances)
        for first in (QUICK_RING_FIRST if quick else RING_FIRST)
        for strategy in RINGS
        if sp > 1
    ]
    fitting = [
        run
        for run in runs
        if run.longest < limits.max_positions
        and run.chunks[-1] >= run.sp
        and run.longest + run.sp * len(run.chunks) <= run.sp * limits.kv_slots
    ]
    return sorted(fitting, key=lambda run: (run.first, run.sp))


def decode_runs(
    limits: GangLimits, *, quick: bool, answer: int, max_batch: int, max_prompt: int
) -> list[DecodeRun]:
    """Return all runs that fit, for every group size.

    Args:
        answer: tokens that each request samples.
        max_batch: requests that decode at the same time.
        max_prompt: tokens that the prefill gang has slots for.
    """
    contexts = QUICK_DECODE_CONTEXTS if quick else DECODE_CONTEXTS
    batches = QUICK_DECODE_BATCHES if quick else DECODE_BATCHES
    runs = [
        DecodeRun(sp=sp, context=context, batch=batch)
        for sp in group_sizes(limits.instances)
        for context in contexts
        for batch in batches
        if batch <= max_batch
        and context <= max_prompt
        and context + answer < limits.max_positions
        and batch * context <= DECODE_TOKENS
        # Every instance stores a slice of every prompt, and the answers whose master it is.
        and batch * -(-context // sp) + -(-batch // sp) * answer <= limits.kv_slots
        and -(-batch // sp) <= limits.masters
    ]
    return sorted(runs, key=lambda run: (run.context * run.batch, run.sp, run.batch))


def group_sizes(instances: int) -> list[int]:
    """Return powers of two up to `instances`, and `instances` itself."""
    return sorted({*_powers(instances), instances})


def _powers(instances: int) -> Iterator[int]:
    size = 1
    while size <= instances:
        yield size
        size *= 2
