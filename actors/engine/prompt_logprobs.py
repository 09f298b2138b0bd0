"""Log-probabilities of a prompt's tokens, which the last layer of a step yields for those who ask.

Each member computes those of its own rows, in blocks: the logits of a whole prompt would take more
memory than its KV. The token behind a row may be another member's, so the router names them all
(`PrefillStep.next_tokens`).

Shape suffixes: t rows of a block, d hidden, v vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.step_points import logits_rows
from csps.actors.comm.layout import LocalChunk
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import PromptLogprobs

ReportLogprobs = Callable[[PromptLogprobs], None]


def report_prompt_logprobs(
    engine: Engine,
    group: SpGroup,
    x_td: Tensor,
    report: ReportLogprobs,
    passed: Callable[[], None],
) -> None:
    """Report the log-probabilities of the tokens behind own rows, where they are wanted.

    Args:
        x_td: residual stream of the own rows behind the last layer.
        passed: called after each block.
    """
    if engine.tp_rank:  # the first rank of an instance has the whole vocabulary
        return
    wanted, step = group.step.prompt_logprobs, group.step
    next_tokens = torch.from_numpy(np.frombuffer(step.next_tokens, dtype="<i4").astype(np.int64))
    assert len(next_tokens) == len(x_td), (
        f"step {step.step_id} brings {len(next_tokens)} next tokens for {len(x_td)} rows"
    )
    rows = logits_rows(engine.spec.vocab)
    for part in group.local:
        count = wanted.get(part.chunk.sequence_id)
        if count is None:
            continue
        behind = next_tokens[part.rows]
        behind = behind[behind >= 0]  # none behind the prompt's last token, which is last here too
        for begin in range(0, len(behind), rows):
            if group.is_active(part.chunk):
                block = slice(begin, min(begin + rows, len(behind)))
                span = part.span.part(block)
                x_bd = x_td[part.rows][block]
                report(_block(engine, part, span, x_bd, behind[block], count))
            passed()


def _block(
    engine: Engine, part: LocalChunk, span: Span, x_td: Tensor, tokens_t: Tensor, count: int
) -> PromptLogprobs:
    logits_tv = engine.network.logits(x_td)
    own_t1 = logits_tv.gather(1, tokens_t.to(logits_tv.device)[:, None])
    total_t1 = logits_tv.logsumexp(-1, keepdim=True)
    top_tk, ids_tk = logits_tv.topk(min(count, logits_tv.shape[1]))
    return PromptLogprobs(
        sequence_id=part.chunk.sequence_id,
        start=span.start,
        step=span.step,
        logprobs=_packed(own_t1 - total_t1, "<f4"),
        ranks=_packed((logits_tv >= own_t1).sum(-1), "<i4"),
        top_tokens=_packed(ids_tk, "<i4"),
        top_logprobs=_packed(top_tk - total_t1, "<f4"),
    )


def _packed(values: Tensor, dtype: str) -> bytes:
    return values.cpu().numpy().astype(dtype, copy=False).tobytes()
