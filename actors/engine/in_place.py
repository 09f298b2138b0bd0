"""Steps of a gang that decodes what it prefills: KV is adopted where it was computed."""

from __future__ import annotations

from dataclasses import replace

from csps.protocols.placement import KvShare
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span


def kept_in_place(job: PrefillJob) -> PrefillJob:
    """The step with nothing to send: what is computed elsewhere than it is to lie moves there."""
    pieces = tuple(
        replace(it, placement=it.placement or _of_chunk(it), destinations=(), stays=False)
        for it in job.pieces
    )
    return replace(job, pieces=pieces)


def _of_chunk(piece: PrefillPiece) -> tuple[KvShare, ...]:
    """Where the KV of a chunk is to lie; the first one that a sequence computes brings along what
    others have computed of the prompt, unless it lies there."""
    start = 0 if piece.begins else piece.start
    chunk = Span(start=start, stop=piece.start + piece.length)
    cuts = (
        KvShare(instance=it.instance, span=it.span.intersection(chunk))
        for it in piece.destinations
        if it.origin is None
    )
    return tuple(cut for cut in cuts if cut.span.length)
