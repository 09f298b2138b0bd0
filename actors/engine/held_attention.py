"""Attention of an iteration's rows over what one rank holds of their sequences.

Shape suffixes: r query rows, n those of a piece, s slots, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.actors.engine.batch import Batch, HeldPiece
from csps.actors.engine.engine import Engine
from csps.kernels.attention import attention
from csps.kernels.merge import merge


def attend_held(
    engine: Engine,
    batch: Batch,
    layer: int,
    peer: int | None,
    q_rhd: Tensor,
    own: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Partial attention of one master's rows.

    Args:
        peer: whose rows they are; None for own ones.
        q_rhd: decode rows, then pieces.
        own: k_rgd and v_rgd of own rows, which own pieces see as far as they lie before them.

    Returns:
        fp32 out (r, h, d) and lse (r, h); -inf where nothing is seen.
    """
    held = batch.held.get(peer)
    first = len(held.requests) if held is not None else 0
    parts: list[tuple[Tensor, Tensor]] = []
    if held is not None:
        parts.append(engine.attend_rows(layer, q_rhd[:first], held))
    for piece in batch.held_pieces.get(peer, ()):
        rows = slice(first, first + piece.length)
        seen = [_history(engine, layer, q_rhd[rows], run) for run in piece.runs]
        if own is not None:
            seen.append(_causal(engine, q_rhd[rows], own[0][rows], own[1][rows]))
        parts.append(_merged(piece, seen))
        first = rows.stop
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _merged(piece: HeldPiece, seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    assert seen, f"{piece} is asked about where nothing is held"
    out_nhd, lse_hn = merge([out for out, _ in seen], [lse for _, lse in seen])
    return out_nhd, lse_hn.T


def _history(engine: Engine, layer: int, q_nhd: Tensor, run: range) -> tuple[Tensor, Tensor]:
    """Over a run of slots; all of it precedes every row, so that no positions are compared."""
    k_sgd, v_sgd = engine.pool.layer(layer)
    return attention(
        q_nhd,
        k_sgd[run.start : run.stop],
        v_sgd[run.start : run.stop],
        q_positions=None,
        k_positions=None,
        scale=engine.spec.scale,
    )


def _causal(engine: Engine, q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor) -> tuple[Tensor, Tensor]:
    """Of a piece over itself."""
    positions = range(len(q_nhd))
    return attention(
        q_nhd,
        k_ngd,
        v_ngd,
        q_positions=positions,
        k_positions=positions,
        scale=engine.spec.scale,
    )
