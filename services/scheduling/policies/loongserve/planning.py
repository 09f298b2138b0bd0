"""From batches and where their KV is kept to what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from csps.protocols.placement import striped
from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.jobs import Elastic, Prompt
from csps.services.scheduling.policies.loongserve.scaling import Kept
from csps.services.scheduling.shares import laid_out, tokens_on

ALONE, RING = "ulysses", "ring_kv"
"""How one instance attends, and how several do: KV comes by all members of a ring, so that those of
the smaller group keep what the plan gives them (§4.1)."""


def start(
    prompts: Sequence[Prompt], group: Sequence[Elastic], kept: Sequence[Kept], predicted_ns: int
) -> StartPlan:
    """One prefill iteration, and the scale-down within it.

    Args:
        prompts: of the batch.
        group: its instances.
        kept: of each prompt, where its KV is to lie.
        predicted_ns: what the iteration takes.
    """
    members = [it.id for it in sorted(group, key=lambda it: it.order)]
    ring = len(members) > 1
    pieces = tuple(
        PlannedPiece(
            it.id,
            0,
            it.tokens,
            rows=laid_out(members, striped(it.tokens, len(members))) if ring else (),
        )
        for it in prompts
    )
    counts = dict.fromkeys(members, 0)
    for piece in pieces:
        for instance, tokens in tokens_on(piece.rows).items():
            counts[instance] += tokens
    bounds = (0, *accumulate(counts.values())) if ring else (0, sum(it.tokens for it in prompts))
    step = PlannedStep(
        group=tuple(members),
        bounds=bounds,
        pieces=pieces,
        strategy=RING if ring else ALONE,
        predicted_ns=predicted_ns,
    )
    decode = tuple(_placement(it, where) for it, where in zip(prompts, kept, strict=True))
    return StartPlan(steps=(step,), decode=decode)


def _placement(prompt: Prompt, kept: Kept) -> DecodePlacement:
    shares = tuple(_laid(kept.prompt, 0))
    return DecodePlacement(
        prompt.id, shares, kept.master, answer=tuple(_laid(kept.answer, prompt.tokens))
    )


def _laid(parts: Sequence[tuple[InstanceId, int]], start: int) -> list[Share]:
    """Positions from `start` on, part by part."""
    shares = []
    for instance, tokens in parts:
        shares.append(Share(instance, start, start + tokens))
        start += tokens
    return shares
