"""Messages to the ranks about steps, reservations and moves, lowered from scheduler commands.

The scheduler leaves open what depends on a step's group: CSA levels and micro-partitions
(`lower_csa`), the tokens of each rank (`prefill_messages`), and the chunks of sequences that were
cancelled before the step was sent (`without_cancelled`). `explained_plan` is what clients see.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from csps.protocols.attention.csa import CsaPlan, CsaSettings
from csps.protocols.attention.plan import LEVELS, PIGGYBACKED, AttentionPlan, parse_option
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import ReserveKv
from csps.protocols.gang.step_messages import (
    MoveSequence,
    PrefillChunk,
    PrefillStep,
    SequencePlacement,
)
from csps.protocols.rpc.schema import pack
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.live_sequences import InstanceRanks, LiveMove, LiveSequence
from csps.services.scheduling.deciding.step_layout import rows_of, span_of
from csps.services.scheduling.events import commands
from csps.services.scheduling.events.commands import MoveKv, RunStep
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of, instance_id
from csps.services.scheduling.events.slices import bounds_of, tokens_on
from csps.services.scheduling.state.ledger import HasPlacement, decode_slots


def prefill_messages(
    command: commands.RunStep,
    sequences: list[LiveSequence],
    gang: GangClient,
    csa: CsaPlan | None,
) -> list[dict[str, Any]]:
    """Return `prefill` for every rank of the gang, in rank order, each with its rows' tokens.

    Args:
        sequences: those of the step's chunks, in the order of the chunks.
        csa: lowered plan of sparse attention, if any.
    """
    group = tuple(index_of(instance) for instance in command.group)
    chunks = list(zip(command.chunks, sequences, strict=True))
    common = PrefillStep(
        step_id=command.step_id,
        group=group,
        bounds=command.bounds,
        chunks=tuple(
            _chunk(chunk, sequence, history)
            for (chunk, sequence), history in zip(chunks, command.history, strict=True)
        ),
        strategy=parse_option(command.strategy).strategy,
        csa=csa,
        high_priority=command.high_priority,
        trace=sequences[0].handle.carrier,
    )
    messages = [pack(common)] * gang.world_size
    tokens = _tokens_of_rows(command, sequences)
    for member in command.group:
        instance = index_of(member)
        message = pack(replace(common, tokens=token_bytes(tokens[member])))
        for rank in gang.ranks_of(instance):
            messages[rank] = message
    return messages


def _chunk(
    chunk: commands.Chunk, sequence: LiveSequence, history: tuple[KvSlice, ...]
) -> PrefillChunk:
    handle, stop = sequence.handle, chunk.start + chunk.length
    return PrefillChunk(
        sequence_id=sequence.id,
        start=chunk.start,
        length=chunk.length,
        rows=kv_slices(chunk.rows),
        history=kv_slices(history),
        placement=kv_slices(chunk.placement),
        retain=chunk.retain,
        destinations=kv_slices(_destinations(sequence.command)),
        last=stop == sequence.command.prompt_tokens,
        generated_tokens=token_bytes(handle.generated_tokens),
        sampling=handle.spec.sampling,
        prompt_tokens=_penalized_tokens(handle),
    )


def _destinations(command: commands.Reserve) -> tuple[KvSlice, ...]:
    """Return the slices to which a prompt's KV is sent.

    A sequence without slices decodes nothing, so nothing is sent; but KV without a destination
    would be retained where it was computed.
    """
    return command.slices or (KvSlice(command.master, 0, command.prompt_tokens),)


def _tokens_of_rows(
    command: commands.RunStep, sequences: list[LiveSequence]
) -> dict[InstanceId, NDArray[np.int32]]:
    """Return the tokens that each member of the group computes, in the order of its rows."""
    tokens: dict[InstanceId, list[NDArray[np.int32]]] = {instance: [] for instance in command.group}
    for rows, sequence in zip(rows_of(command), sequences, strict=True):
        known = known_tokens(sequence.handle)
        for kv_slice in rows:
            tokens[kv_slice.instance].append(known[kv_slice.start : kv_slice.stop : kv_slice.step])
    nothing = np.empty(0, np.int32)
    return {
        instance: np.concatenate(rows) if rows else nothing for instance, rows in tokens.items()
    }


def without_cancelled(
    command: RunStep,
    cancelled: Container[SequenceId],
    *,
    placements: dict[SequenceId, tuple[KvSlice, ...]],
) -> tuple[RunStep, list[InstanceId]]:
    """Return the step without cancelled sequences; every other token stays on its instance.

    Args:
        cancelled: sequences to drop.
        placements: where the KV of sequences that decode in place is stored.

    Returns:
        The step, and the instances that no longer take part in it.
    """
    remaining = [
        index for index, chunk in enumerate(command.chunks) if chunk.sequence_id not in cancelled
    ]
    if len(remaining) == len(command.chunks):
        return command, []
    all_rows = list(rows_of(command))
    rows = tokens_on(kv_slice for index in remaining for kv_slice in all_rows[index])
    involved = {**rows, **dict.fromkeys(_holders(command, remaining, placements))}
    group = tuple(instance for instance in command.group if instance in involved)
    rest = msgspec.structs.replace(
        command,
        group=group,
        bounds=bounds_of([rows.get(instance, 0) for instance in group]),
        chunks=tuple(command.chunks[index] for index in remaining),
        history=tuple(command.history[index] for index in remaining),
    )
    return rest, [instance for instance in command.group if instance not in involved]


def _holders(
    command: RunStep, remaining: list[int], placements: dict[SequenceId, tuple[KvSlice, ...]]
) -> Iterable[InstanceId]:
    """Yield the instances that hold or will store KV of the remaining chunks."""
    for index in remaining:
        chunk = command.chunks[index]
        span = span_of(chunk)
        for kv_slice in (*command.history[index], *chunk.placement):
            yield kv_slice.instance
        for kv_slice in placements.get(chunk.sequence_id, ()):
            if kv_slice.span.intersection(span).length:
                yield kv_slice.instance


EXACT_AT_LOCATIONS = CsaSettings(levels=1)
"""Exact attention, with the locations that hierarchical collectives use."""
EXACT_WITH_LEVELS = CsaSettings()
"""Exact attention in as many levels as the locations distinguish."""


def lower_csa(command: RunStep, spec: RequestSpec, gang: GangClient) -> CsaPlan | None:
    """Return the CSA plan of a step for its group; None if it attends without levels.

    Args:
        spec: of any request in the step; all are of one class.
    """
    settings = csa_settings_of(command, spec)
    if settings is None:
        return None
    locations = gang.locations
    return settings.for_group(
        [locations[index_of(instance)] for instance in command.group],
        layers=gang.descriptions[0].layers,
        longest_spt=max(stop - start for start, stop in pairwise(command.bounds)),
        every_query=parse_option(command.strategy).strategy.startswith("sp_tp"),
    )


def csa_settings_of(command: RunStep, spec: RequestSpec) -> CsaSettings | None:
    """Return the CSA settings of a step: those of its option, or else of its requests.

    Args:
        spec: of any request in the step; all are of one class.
    """
    strategy, chosen = parse_option(command.strategy)
    if chosen is not None:
        return chosen
    if spec.csa is not None:
        return spec.csa
    if strategy == LEVELS:
        return EXACT_WITH_LEVELS
    return EXACT_AT_LOCATIONS if strategy.startswith("sp_tp") else None


def explained_plan(
    command: RunStep, spec: RequestSpec, csa: CsaPlan | None, why: str, loss: float | None
) -> AttentionPlan:
    """Return the plan that `explain` shows for a step.

    Args:
        csa: the step's lowered CSA plan, if any.
        why: reason for the step's option.
        loss: predicted accuracy loss of the option; None if it was not predicted.
    """
    settings = csa_settings_of(command, spec)
    strategy = parse_option(command.strategy).strategy
    lossless = settings is None or settings.lossless
    if spec.csa is None and lossless:
        return AttentionPlan(
            strategy=strategy,
            csa=csa,
            predicted_accuracy_loss=0.0,
            reason=f"{_why_exact(spec)}; {why}",
        )
    assert settings is not None, f"step {command.step_id}: sparse attention without settings"
    assert csa is not None, f"step {command.step_id}: sparse attention without a lowered plan"
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

    The messages are equal, except that the ranks of a piggybacked prefill's master get its prompt.
    """
    command, handle = sequence.command, sequence.handle
    csa = handle.spec.csa
    common = ReserveKv(
        sequence_id=sequence.id,
        epoch=epoch,
        slices=kv_slices(command.slices),
        master=index_of(command.master),
        prompt_length=command.prompt_tokens,
        generated_tokens=token_bytes(handle.generated_tokens),
        sampling=handle.spec.sampling,
        prompt_tokens=_penalized_tokens(handle),
        answer=kv_slices(command.answer),
        retain=command.retain,
        kept_only=csa is not None and csa.decode_kept_only,
        trace=handle.carrier,
    )
    messages = [pack(common)] * sequence.decode.world_size
    if command.piggybacked:
        to_compute = known_tokens(handle)[command.cached :]
        message = pack(replace(common, prompt=token_bytes(to_compute)))
        for rank in sequence.decode.ranks_of(common.master):
            messages[rank] = message
    return messages


def begin_move(command: MoveKv, sequence: LiveSequence, gang: GangClient) -> MoveSequence:
    """Record a sequence's move and return the message to every rank of its gang."""
    reserved = sequence.command
    message = MoveSequence(
        step_id=command.step_id,
        sequence_id=sequence.id,
        prompt_length=reserved.prompt_tokens,
        stop=reserved.prompt_tokens + max(0, reserved.output_tokens - 1),
        before=_sequence_placement(sequence.placement),
        after=_sequence_placement(command),
        trace=sequence.handle.carrier,
    )
    members = [instance_id(command.gang, instance) for instance in message.instances]
    sequence.move = LiveMove(command, sequence.placement, InstanceRanks(gang, members))
    # New instances report as well when they free their slots.
    known = decode_slots(sequence.placement, 0)
    sequence.pending_free.expect(member for member in members if member not in known)
    return message


def _sequence_placement(placement: HasPlacement) -> SequencePlacement:
    """Return a placement as ranks read it."""
    return SequencePlacement(
        slices=kv_slices(placement.slices),
        master=index_of(placement.master),
        answer=kv_slices(placement.answer),
    )


def _penalized_tokens(handle: RequestHandle) -> bytes:
    """Return the distinct prompt tokens, which only the repetition penalty needs; else none."""
    spec = handle.spec
    if spec.sampling.repetition_penalty == 1.0:
        return b""
    return token_bytes(np.unique(spec.prompt))


def known_tokens(handle: RequestHandle) -> NDArray[np.int32]:
    """Return the tokens before the next one to sample: the prompt and what was generated before a
    fault."""
    tokens = handle.spec.prompt
    if handle.generated_tokens.size:
        tokens = np.concatenate((tokens, handle.generated_tokens))
    return tokens


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Return token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def kv_slices(slices: tuple[KvSlice, ...]) -> tuple[KvSlice, ...]:
    """Return slices as ranks read them: an instance by its index in its gang."""
    return tuple(
        msgspec.structs.replace(kv_slice, instance=index_of(kv_slice.instance))
        for kv_slice in slices
    )
