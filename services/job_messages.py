"""What the ranks are told about a job and its requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csps.protocols.csa import CsaPlan
from csps.protocols.messages import PrefillJob, PrefillPiece, Reserve
from csps.protocols.schema import pack
from csps.services.attempts import Attempt, Job
from csps.services.scheduling.shares import shares_of


def reserve_message(attempt: Attempt) -> dict[str, Any]:
    """`reserve`, the same for every rank of the decode gang."""
    generation = attempt.running.generation
    return pack(
        Reserve(
            rid=attempt.rid,
            epoch=attempt.link.epoch,
            shares=attempt.placement.shares,
            master=attempt.placement.master,
            prompt_length=generation.prompt.size,
            sampling=generation.sampling,
            prompt_tokens=_penalized_tokens(attempt),
            kept_only=_decodes_kept_only(attempt),
            trace=attempt.running.carrier,
        )
    )


def csa_plan(job: Job) -> CsaPlan | None:
    """The job's sparse attention, now that it is known where the job runs and how it is cut."""
    gang, decision = job.link.prefill, job.decision
    if decision.csa is None:
        return None
    return decision.csa.for_group(
        [gang.locations[instance] for instance in decision.group],
        layers=gang.descriptions[0].layers,
        longest_spt=max(shares_of(decision.bounds)),
    )


def prefill_messages(job: Job, job_id: int, csa: CsaPlan | None) -> list[dict[str, Any]]:
    """`prefill` for every rank of the gang, in rank order, each with its share of the tokens."""
    gang, decision = job.link.prefill, job.decision
    prompts = [attempt.running.generation.prompt for attempt in job.attempts]
    tokens = np.concatenate(prompts) if len(prompts) > 1 else prompts[0]
    common = PrefillJob(
        job_id=job_id,
        group=decision.group,
        bounds=decision.bounds,
        pieces=tuple(_piece(attempt) for attempt in job.attempts),
        strategy=decision.strategy,
        csa=csa,
        urgent=decision.urgent,
        trace=job.attempts[0].running.carrier,
    )
    outside = pack(common)
    messages = [outside] * gang.world_size
    for member, instance in enumerate(decision.group):
        share = tokens[decision.bounds[member] : decision.bounds[member + 1]]
        message = pack(replace(common, tokens=token_bytes(share)))
        for rank in gang.ranks_of(instance):
            messages[rank] = message
    return messages


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def _piece(attempt: Attempt) -> PrefillPiece:
    generation = attempt.running.generation
    return PrefillPiece(
        rid=attempt.rid,
        start=0,
        length=generation.prompt.size,
        destinations=attempt.placement.shares,
        sampling=generation.sampling,
        prompt_tokens=_penalized_tokens(attempt),
    )


def _decodes_kept_only(attempt: Attempt) -> bool:
    plan = attempt.running.plan
    return plan is not None and plan.csa is not None and plan.csa.variant.decode_kept_only


def _penalized_tokens(attempt: Attempt) -> bytes:
    """Distinct prompt tokens. Only the repetition penalty looks at the prompt."""
    generation = attempt.running.generation
    if generation.sampling.repetition_penalty == 1.0:
        return b""
    return token_bytes(np.unique(generation.prompt))
