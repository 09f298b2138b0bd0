"""Messages to the ranks about steps, reservations and moves, lowered from scheduler commands.

The scheduler leaves open what depends on a step's group: CSA levels and micro-partitions
(`lower_csa`), the tokens of each rank (`prefill_messages`), and the chunks of sequences that were
cancelled before the step was sent (`without_cancelled`). `explained_plan` is what clients see.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from csps.protocols.attention.csa import CsaPlan, CsaSettings
from csps.protocols.attention.plan import LEVELS, PIGGYBACKED, AttentionPlan, parse_option
from csps.protocols.core.placement import KvSlice, bounds_of, tokens_on
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import FirstTokenSampler
from csps.protocols.gang.step_messages import (
    MoveSequence,
    PrefillChunk,
    PrefillStep,
    SequencePlacement,
)
from csps.protocols.rpc.schema import pack
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.live_sequences import LiveMove, LiveSequence, PendingRanks, token_bytes
from csps.services.scheduling.deciding.step_layout import rows_of
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of
from csps.services.scheduling.state.ledger import decode_slots

NOTHING = np.empty(0, np.int32)
"""No tokens."""


def prefill_messages(
    step: PrefillStep, sequences: list[LiveSequence], gang: GangClient, csa: CsaPlan | None
) -> list[dict[str, Any]]:
    """Return `prefill` for every rank of the gang, in rank order, each with its rows' tokens.

    Args:
        sequences: those of the step's chunks, in the order of the chunks.
        csa: lowered plan of sparse attention, if any.

    Raises:
        ConfigError: no group can run the step.
    """
    common = msgspec.structs.replace(
        step,
        group=tuple(map(index_of, step.group)),
        chunks=tuple(map(_chunk_in_gang, step.chunks)),
        strategy=parse_option(step.strategy).strategy,
        csa=csa,
        prompt_logprobs=_wanted_logprobs(step, sequences),
        trace=sequences[0].handle.carrier,
    )
    common.check()
    packed = pack(common)
    messages = [packed] * gang.world_size
    known = [known_tokens(sequence.handle) for sequence in sequences]
    next_tokens: dict[InstanceId, NDArray[np.int32]] = {}
    if common.prompt_logprobs:
        behind = [_next_tokens(sequence, common.prompt_logprobs) for sequence in sequences]
        next_tokens = _of_rows(step, behind)
    for member, tokens in _of_rows(step, known).items():
        message = packed | {
            "tokens": token_bytes(tokens),
            "next_tokens": token_bytes(next_tokens.get(member, NOTHING)),
        }
        for rank in gang.ranks_of(index_of(member)):
            messages[rank] = message
    return messages


def first_token_samplers(
    step: PrefillStep, sequences: list[LiveSequence], gang: GangClient
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `sampler` for every sequence whose first token the step samples, with the rank that
    does: the first one of the instance that computes the prompt's last token."""
    for chunk, sequence, rows in zip(step.chunks, sequences, rows_of(step), strict=True):
        if chunk.last:
            samples = next(row for row in rows if chunk.span.stop - 1 in row.span.positions)
            message = FirstTokenSampler(sequence_id=sequence.id, inputs=sequence.sampler)
            yield gang.ranks_of(index_of(samples.instance))[0], pack(message)


def _chunk_in_gang(chunk: PrefillChunk) -> PrefillChunk:
    return msgspec.structs.replace(
        chunk,
        rows=in_gang(chunk.rows),
        history=in_gang(chunk.history),
        placement=in_gang(chunk.placement),
        destinations=in_gang(chunk.destinations),
        near_to=None if chunk.near_to is None else index_of(chunk.near_to),
    )


def _of_rows(
    step: PrefillStep, by_position: list[NDArray[np.int32]]
) -> dict[InstanceId, NDArray[np.int32]]:
    """Return what belongs to the positions that each member of the group computes, in the order of
    its rows.

    Args:
        by_position: one number for each position, by chunk.
    """
    tokens: dict[InstanceId, list[NDArray[np.int32]]] = {instance: [] for instance in step.group}
    for rows, known in zip(rows_of(step), by_position, strict=True):
        for kv_slice in rows:
            tokens[kv_slice.instance].append(known[kv_slice.start : kv_slice.stop : kv_slice.step])
    return {
        instance: np.concatenate(rows) if rows else NOTHING for instance, rows in tokens.items()
    }


def _wanted_logprobs(step: PrefillStep, sequences: list[LiveSequence]) -> dict[SequenceId, int]:
    """Return the sequences of which the step yields log-probabilities of the prompt, with the
    number of likeliest tokens that each wants."""
    return {
        sequence.id: sequence.handle.prompt_logprobs.count
        for chunk, sequence in zip(step.chunks, sequences, strict=True)
        if sequence.handle.prompt_logprobs is not None
        if sequence.handle.prompt_logprobs.missing
        # A retry computes tokens of the answer as well, whose log-probabilities are known.
        if chunk.start < sequence.handle.spec.prompt.size - 1
    }


def _next_tokens(sequence: LiveSequence, wanted: Container[SequenceId]) -> NDArray[np.int32]:
    """Return the token of the prompt behind each position; -1 where none is wanted."""
    prompt = sequence.handle.spec.prompt
    behind = np.full(known_tokens(sequence.handle).size, -1, np.int32)
    if sequence.id in wanted:
        behind[: prompt.size - 1] = prompt[1:]
    return behind


def without_cancelled(
    step: PrefillStep,
    cancelled: Container[SequenceId],
    *,
    placements: dict[SequenceId, tuple[KvSlice, ...]],
) -> tuple[PrefillStep, list[InstanceId]]:
    """Return the step without cancelled sequences; every other token stays on its instance.

    Args:
        cancelled: sequences to drop.
        placements: where the KV of sequences that decode in place is stored.

    Returns:
        The step, and the instances that no longer take part in it.
    """
    remaining = tuple(chunk for chunk in step.chunks if chunk.sequence_id not in cancelled)
    if len(remaining) == len(step.chunks):
        return step, []
    rows = tokens_on(
        row
        for chunk, rows in zip(step.chunks, rows_of(step), strict=True)
        if chunk.sequence_id not in cancelled
        for row in rows
    )
    involved = {**rows, **dict.fromkeys(_holders(remaining, placements))}
    group = tuple(instance for instance in step.group if instance in involved)
    bounds = bounds_of([rows.get(instance, 0) for instance in group])
    rest = msgspec.structs.replace(step, group=group, bounds=bounds, chunks=remaining)
    return rest, [instance for instance in step.group if instance not in involved]


def _holders(
    chunks: Iterable[PrefillChunk], placements: dict[SequenceId, tuple[KvSlice, ...]]
) -> Iterable[InstanceId]:
    """Yield the instances that hold or will store KV of chunks."""
    for chunk in chunks:
        for kv_slice in (*chunk.history, *chunk.placement):
            yield kv_slice.instance
        for kv_slice in placements.get(chunk.sequence_id, ()):
            if kv_slice.span.intersection(chunk.span).length:
                yield kv_slice.instance


EXACT_AT_LOCATIONS = CsaSettings(levels=1)
"""Exact attention, with the locations that hierarchical collectives use."""
EXACT_WITH_LEVELS = CsaSettings()
"""Exact attention in as many levels as the locations distinguish."""


def lower_csa(step: PrefillStep, spec: RequestSpec, gang: GangClient) -> CsaPlan | None:
    """Return the CSA plan of a step for its group; None if it attends without levels.

    Args:
        spec: of any request in the step; all are of one class.
    """
    settings = csa_settings_of(step, spec)
    if settings is None:
        return None
    locations = gang.locations
    return settings.for_group(
        [locations[index_of(instance)] for instance in step.group],
        layers=gang.descriptions[0].layers,
        longest_spt=max(stop - start for start, stop in pairwise(step.bounds)),
        every_query=parse_option(step.strategy).strategy.startswith("sp_tp"),
    )


def csa_settings_of(step: PrefillStep, spec: RequestSpec) -> CsaSettings | None:
    """Return the CSA settings of a step: those of its option, or else of its requests.

    Args:
        spec: of any request in the step; all are of one class.
    """
    strategy, chosen = parse_option(step.strategy)
    if chosen is not None:
        return chosen
    if spec.csa is not None:
        return spec.csa
    if strategy == LEVELS:
        return EXACT_WITH_LEVELS
    return EXACT_AT_LOCATIONS if strategy.startswith("sp_tp") else None


def explained_plan(
    step: PrefillStep, spec: RequestSpec, csa: CsaPlan | None, why: str, loss: float | None
) -> AttentionPlan:
    """Return the plan that `explain` shows for a step.

    Args:
        csa: the step's lowered CSA plan, if any.
        why: reason for the step's option.
        loss: predicted accuracy loss of the option; None if it was not predicted.
    """
    settings = csa_settings_of(step, spec)
    strategy = parse_option(step.strategy).strategy
    lossless = settings is None or settings.lossless
    if spec.csa is None and lossless:
        return AttentionPlan(
            strategy=strategy,
            csa=csa,
            predicted_accuracy_loss=0.0,
            reason=f"{_why_exact(spec)}; {why}",
        )
    assert settings is not None, f"step {step.step_id}: sparse attention without settings"
    assert csa is not None, f"step {step.step_id}: sparse attention without a lowered plan"
    wish = "sparse attention within the bounds" if spec.open else "sparse attention"
    reasons = [f"the client asked for {wish}; {why}"]
    if not lossless and loss is None:
        reasons.append("its accuracy loss was not predicted")
    return AttentionPlan(
        attention="csa",
        strategy=strategy,
        csa=csa,
        predicted_accuracy_loss=0.0 if lossless or csa.levels == 1 else loss,
        reason="; ".join((*reasons, *settings.shortfalls(csa))),
    )


def piggyback_plan(spec: RequestSpec, budget: int) -> AttentionPlan:
    """Return the plan that `explain` shows for a piggybacked prefill."""
    chunks = f"computed in chunks beside decoding, {budget} tokens an iteration"
    return AttentionPlan(
        strategy=PIGGYBACKED,
        predicted_accuracy_loss=0.0,
        reason=f"{_why_exact(spec)}; {chunks}",
    )


def _why_exact(spec: RequestSpec) -> str:
    if spec.attention == "exact":
        return "the client asked for exact attention"
    return "exact attention loses nothing"


def reserve_messages(sequence: LiveSequence, *, epoch: str) -> list[dict[str, Any]]:
    """Return `reserve` for every rank of the decode gang, in rank order.

    The messages are equal, except that the master's ranks get what they need to sample, and the
    prompt of a piggybacked prefill.
    """
    command, handle = sequence.command, sequence.handle
    csa, reserved = handle.spec.csa, command.message
    common = msgspec.structs.replace(
        reserved,
        epoch=epoch,
        slices=in_gang(reserved.slices),
        master=index_of(reserved.master),
        first_index=sequence.first_index,
        answer=in_gang(reserved.answer),
        kept_only=csa is not None and csa.decode_kept_only,
        trace=handle.carrier,
    )
    messages = [pack(common)] * sequence.decode.world_size
    to_compute = known_tokens(handle)[command.cached :] if command.piggybacked else NOTHING
    at_master = messages[0] | {"sampler": sequence.sampler, "prompt": token_bytes(to_compute)}
    for rank in sequence.decode.ranks_of(common.master):
        messages[rank] = at_master
    return messages


def move_messages(
    move: MoveSequence, sequence: LiveSequence, gang: GangClient
) -> list[dict[str, Any]]:
    """Record a sequence's move and return `move` for every rank of its gang, in rank order. The
    ranks of a new master get what they need to sample."""
    sequence.move = LiveMove(move, PendingRanks(gang, move.instances))
    # New instances report as well when they free their slots.
    known = decode_slots(move.before, 0)
    sequence.pending_free.expect(member for member in move.instances if member not in known)
    message = msgspec.structs.replace(
        move,
        before=_placement_in_gang(move.before),
        after=_placement_in_gang(move.after),
        trace=sequence.handle.carrier,
    )
    messages = [pack(message)] * gang.world_size
    if message.after.master != message.before.master:
        at_master = messages[0] | {"sampler": sequence.sampler}
        for rank in gang.ranks_of(message.after.master):
            messages[rank] = at_master
    return messages


def _placement_in_gang(placement: SequencePlacement) -> SequencePlacement:
    return SequencePlacement(
        slices=in_gang(placement.slices),
        master=index_of(placement.master),
        answer=in_gang(placement.answer),
    )


def known_tokens(handle: RequestHandle) -> NDArray[np.int32]:
    """Return the tokens before the next one to sample: the prompt and what was generated before a
    fault."""
    tokens = handle.spec.prompt
    if handle.generated_tokens.size:
        tokens = np.concatenate((tokens, handle.generated_tokens))
    return tokens


def in_gang(slices: tuple[KvSlice, ...]) -> tuple[KvSlice, ...]:
    """Return slices as ranks read them: an instance by its index in its gang."""
    return tuple(
        msgspec.structs.replace(kv_slice, instance=index_of(kv_slice.instance))
        for kv_slice in slices
    )
