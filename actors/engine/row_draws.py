"""The tokens of an iteration: drawn at every master, told to the router and to the instance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from csps.actors.announce import Notify, request_failed, token_drawn
from csps.actors.engine.engine import Engine
from csps.actors.engine.rows import Row
from csps.actors.mesh import ControlTag
from csps.actors.process_group import PEER_DEADLINE
from csps.actors.sampling import Draw, draw_batch
from csps.protocols.errors import CspsError
from csps.protocols.tokens import TokenDrawn, Tokens


def draw_rows(engine: Engine, notify: Notify, mine: Sequence[Row], logits_rv: Tensor) -> list[int]:
    """Draw on the instance's first rank and tell the others; the rows that are finished."""
    if not mine:
        return []
    words = torch.zeros(len(mine), 2, dtype=torch.int64)
    if engine.tp_rank == 0:
        words = _drawn(engine, notify, mine, logits_rv)
    _share_tokens(engine, words)
    finished = []
    for row, (token, done) in zip(mine, words.tolist(), strict=True):
        row.token = token
        if done:
            row.over = True
            finished.append(row.rid)
    return finished


def _drawn(engine: Engine, notify: Notify, mine: Sequence[Row], logits_rv: Tensor) -> Tensor:
    """(rows, 2) int64: each row's token, and whether it is finished by it."""
    words = torch.zeros(len(mine), 2, dtype=torch.int64)
    heard = [(at, row) for at, row in enumerate(mine) if not row.over]
    samplers = [row.sampler for _, row in heard if row.sampler is not None]
    if len(heard) < len(mine):
        logits_rv = logits_rv[[at for at, _ in heard]]
    # Rows have been counted on already.
    draws = draw_batch(samplers, logits_rv, [row.index - 1 for _, row in heard])
    announced = _announce(engine, notify, [row for _, row in heard], draws)
    if announced:
        words[[at for at, _ in heard]] = torch.tensor(announced, dtype=torch.int64)
    return words


def _announce(
    engine: Engine, notify: Notify, rows: list[Row], draws: Sequence[Draw | CspsError]
) -> list[tuple[int, int]]:
    """Tell the router; returns each row's token and whether it is finished."""
    drawn: list[TokenDrawn] = []
    words: list[tuple[int, int]] = []
    for row, draw in zip(rows, draws, strict=True):
        if isinstance(draw, CspsError):
            notify("failed", request_failed(row.rid, engine.rank, draw))
            words.append((0, 1))
            continue
        drawn.append(token_drawn(row.rid, row.index - 1, draw))
        words.append((draw.token, int(draw.finish_reason is not None)))
    if drawn:
        notify("tokens", Tokens.of(drawn))
    return words


def _share_tokens(engine: Engine, words: Tensor) -> None:
    if engine.layout.tp == 1:
        return
    if engine.tp_rank:
        engine.mesh.hear(words, _peer_at(engine, 0), ControlTag.DECODE_TOKEN).wait(PEER_DEADLINE)
        return
    for tp_rank in range(1, engine.layout.tp):
        engine.mesh.tell(words, _peer_at(engine, tp_rank), ControlTag.DECODE_TOKEN).wait(
            PEER_DEADLINE
        )


def _peer_at(engine: Engine, tp_rank: int) -> int:
    return engine.layout.rank_of(engine.instance, tp_rank)
