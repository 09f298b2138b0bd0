"""What the ranks are told about a step and its sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csps.protocols.csa import CsaPlan
from csps.protocols.gang_client import GangClient
from csps.protocols.messages import Reserve
from csps.protocols.options import parse_option
from csps.protocols.placement import KvShare
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.schema import pack
from csps.services.router.running import Running
from csps.services.router.sequences import LiveSequence
from csps.services.scheduling import commands
from csps.services.scheduling.ids import InstanceId, index_of
from csps.services.scheduling.step_shares import rows_of


def reserve_messages(sequence: LiveSequence, *, epoch: str) -> list[dict[str, Any]]:
    """`reserve` for every rank of the decode gang, in rank order: the same, but for a rider's
    prompt, which only the ranks of its master need."""
    command, running = sequence.command, sequence.running
    csa = running.generation.csa
    common = Reserve(
        rid=sequence.id,
        epoch=epoch,
        shares=kv_shares(command.shares),
        master=index_of(command.master),
        prompt_length=command.prompt_tokens,
        drawn=token_bytes(running.drawn_tokens),
        sampling=running.generation.sampling,
        prompt_tokens=_penalized_tokens(running),
        answer=kv_shares(command.answer),
        stays=command.stays,
        kept_only=csa is not None and csa.decode_kept_only,
        trace=running.carrier,
    )
    messages = [pack(common)] * sequence.decode.world_size
    if command.rides:
        to_compute = known_tokens(running)[command.cached :]
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
    pieces = list(zip(command.pieces, sequences, strict=True))
    common = PrefillJob(
        job_id=command.step,
        group=group,
        bounds=command.bounds,
        pieces=tuple(
            _piece(piece, sequence, history)
            for (piece, sequence), history in zip(pieces, command.history, strict=True)
        ),
        strategy=parse_option(command.strategy).strategy,
        csa=csa,
        urgent=command.urgent,
        trace=sequences[0].running.carrier,
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
    tokens: dict[InstanceId, list[NDArray[np.int32]]] = {it: [] for it in command.group}
    for rows, sequence in zip(rows_of(command), sequences, strict=True):
        known = known_tokens(sequence.running)
        for share in rows:
            tokens[share.instance].append(known[share.start : share.stop : share.step])
    nothing = np.empty(0, np.int32)
    return {it: np.concatenate(parts) if parts else nothing for it, parts in tokens.items()}


def known_tokens(running: Running) -> NDArray[np.int32]:
    """All that is computed before the next token is drawn: the prompt, and what was drawn before a
    fault."""
    tokens = running.generation.prompt
    if running.drawn_tokens.size:
        tokens = np.concatenate((tokens, running.drawn_tokens))
    return tokens


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def kv_shares(shares: tuple[commands.Share, ...]) -> tuple[KvShare, ...]:
    """Shares as ranks are told of them: an instance by its place in its gang."""
    return tuple(
        KvShare(instance=index_of(it.instance), span=it.span, origin=it.origin or None)
        for it in shares
    )


def _piece(
    piece: commands.Piece, sequence: LiveSequence, history: tuple[commands.Share, ...]
) -> PrefillPiece:
    running, stop = sequence.running, piece.start + piece.length
    return PrefillPiece(
        rid=sequence.id,
        start=piece.start,
        length=piece.length,
        rows=kv_shares(piece.rows),
        history=kv_shares(history),
        placement=kv_shares(piece.keep),
        stays=piece.stays,
        destinations=kv_shares(_destinations(sequence.command)),
        last=stop == sequence.command.prompt_tokens,
        drawn=token_bytes(running.drawn_tokens),
        sampling=running.generation.sampling,
        prompt_tokens=_penalized_tokens(running),
    )


def _destinations(command: commands.Reserve) -> tuple[commands.Share, ...]:
    """Where a prompt's KV goes. Nothing is sent where nothing is decoded behind it, but what goes
    nowhere would stay where it was computed."""
    return command.shares or (commands.Share(command.master, 0, command.prompt_tokens),)


def _penalized_tokens(running: Running) -> bytes:
    """Distinct prompt tokens. Only the repetition penalty looks at the prompt."""
    generation = running.generation
    if generation.sampling.repetition_penalty == 1.0:
        return b""
    return token_bytes(np.unique(generation.prompt))
