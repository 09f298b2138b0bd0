"""Moved definitions.

Levels and micro-partitions of a step, now that it is known where it runs and how it is cut.

A step without the pieces that were withdrawn before it was sent.

What the ranks are told about a step and its sequences.
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
from csps.services.scheduling.events.commands import MoveKv, PlacedSlice, RunStep
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of, instance_id
from csps.services.scheduling.events.slices import bounds_of, tokens_on
from csps.services.scheduling.state.ledger import HasPlacement, decode_slots


def begin_move(command: MoveKv, sequence: LiveSequence, gang: GangClient) -> MoveSequence:
    """A row is to be moved. Returns the message to every rank of its gang."""
    reserved = sequence.command
    message = MoveSequence(
        step_id=command.step_id,
        sequence_id=sequence.id,
        prompt_length=reserved.prompt_tokens,
        stop=reserved.prompt_tokens + max(0, reserved.output_tokens - 1),
        before=row_placement(sequence.placement),
        after=row_placement(command),
        trace=sequence.handle.carrier,
    )
    members = [instance_id(command.gang, instance) for instance in message.instances]
    sequence.move = LiveMove(command, sequence.placement, InstanceRanks(gang, members))
    # Whichever it comes to tells as well when it holds nothing of it any more.
    known = decode_slots(sequence.placement, 0)
    sequence.pending_free.expect(member for member in members if member not in known)
    return message


def row_placement(placement: HasPlacement) -> SequencePlacement:
    """Where a row is decoded, as ranks are told of it."""
    return SequencePlacement(
        slices=kv_slices(placement.slices),
        master=index_of(placement.master),
        answer=kv_slices(placement.answer),
    )


EXACT_OVER_PLACES = CsaSettings(levels=1)
"""Exact attention, with the locations that hierarchical collectives go by."""
EXACT_WITH_LEVELS = CsaSettings()
"""Exact attention, as many levels as the locations tell apart."""


def csa_settings_of(command: RunStep, spec: RequestSpec) -> CsaSettings | None:
    """Of a step by parts: what its option says, or else what was asked for.

    Args:
        generation: of one of its pieces, which are of one class.
    """
    strategy, chosen = parse_option(command.strategy)
    if chosen is not None:
        return chosen
    if spec.csa is not None:
        return spec.csa
    if strategy == LEVELS:
        return EXACT_WITH_LEVELS
    return EXACT_OVER_PLACES if strategy.startswith("sp_tp") else None


def lower_csa(command: RunStep, spec: RequestSpec, gang: GangClient) -> CsaPlan | None:
    """How a step attends by parts; None if it does not.

    Args:
        generation: of one of its pieces, which are of one class.
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


def explained_plan(
    command: RunStep, spec: RequestSpec, csa: CsaPlan | None, why: str, loss: float | None
) -> AttentionPlan:
    """What `explain` answers.

    Args:
        why: this option.
        loss: predicted for it; None if it was not.
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
    assert settings is not None, "sparse attention without settings"
    assert csa is not None, "sparse attention without a plan"
    wish = "sparse attention within the bounds" if spec.open else "sparse attention"
    reasons = [f"the client asked for {wish}; {why}"]
    if not lossless and loss is None:
        reasons.append("what it loses of accuracy was not predicted")
    return AttentionPlan(
        attention="csa",
        strategy=strategy,
        csa=csa,
        predicted_accuracy_loss=0.0 if lossless or csa.levels == 1 else loss,
        reason="; ".join((*reasons, *settings.shortfalls(csa))),
    )


def piggyback_plan(spec: RequestSpec, budget: int) -> AttentionPlan:
    """What `explain` answers about a prompt that no step computes."""
    chunks = f"in pieces beside rows that decode, {budget} tokens an iteration"
    return AttentionPlan(
        strategy=PIGGYBACKED,
        predicted_accuracy_loss=0.0,
        reason=f"{_why_exact(spec)}; {chunks}",
    )


def _why_exact(spec: RequestSpec) -> str:
    if spec.attention == "exact":
        return "the client asked for exact attention"
    return "exact attention loses nothing"


def without_cancelled(
    command: RunStep,
    cancelled: Container[SequenceId],
    *,
    placements: dict[SequenceId, tuple[PlacedSlice, ...]],
) -> tuple[RunStep, list[InstanceId]]:
    """The step without these sequences; every other token stays on its instance.

    Args:
        placed: where the KV of sequences is to lie that are decoded in place.

    Returns:
        The step, and the instances that have nothing to do with it any more.
    """
    remaining = [
        index for index, it in enumerate(command.chunks) if it.sequence_id not in cancelled
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
    command: RunStep, remaining: list[int], placements: dict[SequenceId, tuple[PlacedSlice, ...]]
) -> Iterable[InstanceId]:
    """Who has or gets KV of the pieces that are left."""
    for index in remaining:
        chunk = command.chunks[index]
        span = span_of(chunk)
        for kv_slice in (*command.history[index], *chunk.placement):
            yield kv_slice.instance
        for kv_slice in placements.get(chunk.sequence_id, ()):
            if kv_slice.span.intersection(span).length:
                yield kv_slice.instance


def reserve_messages(sequence: LiveSequence, *, epoch: str) -> list[dict[str, Any]]:
    """`reserve` for every rank of the decode gang, in rank order: the same, but for a rider's
    prompt, which only the ranks of its master need."""
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


def prefill_messages(
    command: commands.RunStep,
    sequences: list[LiveSequence],
    gang: GangClient,
    csa: CsaPlan | None,
) -> list[dict[str, Any]]:
    """`prefill` for every rank of the gang, in rank order, each with the tokens of its rows.

    Args:
        sequences: of the step's pieces, in their order.
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


def _tokens_of_rows(
    command: commands.RunStep, sequences: list[LiveSequence]
) -> dict[InstanceId, NDArray[np.int32]]:
    """What each member of a step's group computes, in the order of its rows."""
    tokens: dict[InstanceId, list[NDArray[np.int32]]] = {instance: [] for instance in command.group}
    for rows, sequence in zip(rows_of(command), sequences, strict=True):
        known = known_tokens(sequence.handle)
        for kv_slice in rows:
            tokens[kv_slice.instance].append(known[kv_slice.start : kv_slice.stop : kv_slice.step])
    nothing = np.empty(0, np.int32)
    return {it: np.concatenate(parts) if parts else nothing for it, parts in tokens.items()}


def known_tokens(handle: RequestHandle) -> NDArray[np.int32]:
    """All that is computed before the next token is drawn: the prompt, and what was drawn before a
    fault."""
    tokens = handle.spec.prompt
    if handle.generated_tokens.size:
        tokens = np.concatenate((tokens, handle.generated_tokens))
    return tokens


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def kv_slices(slices: tuple[commands.PlacedSlice, ...]) -> tuple[KvSlice, ...]:
    """Shares as ranks are told of them: an instance by its place in its gang."""
    return tuple(
        KvSlice(
            instance=index_of(kv_slice.instance), span=kv_slice.span, source=kv_slice.source or None
        )
        for kv_slice in slices
    )


def _chunk(
    chunk: commands.Chunk, sequence: LiveSequence, history: tuple[commands.PlacedSlice, ...]
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


def _destinations(command: commands.Reserve) -> tuple[commands.PlacedSlice, ...]:
    """Where a prompt's KV goes. Nothing is sent where nothing is decoded behind it, but what goes
    nowhere would stay where it was computed."""
    return command.slices or (commands.PlacedSlice(command.master, 0, command.prompt_tokens),)


def _penalized_tokens(handle: RequestHandle) -> bytes:
    """Distinct prompt tokens. Only the repetition penalty looks at the prompt."""
    spec = handle.spec
    if spec.sampling.repetition_penalty == 1.0:
        return b""
    return token_bytes(np.unique(spec.prompt))
