"""Sampling of a whole batch's tokens.

The logits pass through, in this order: logit bias, what is allowed (token ids, bad words, a
grammar), minimum length, repetition penalty, frequency and presence penalties, temperature, top-k,
top-p, min-p. That is the order of vLLM and of
transformers, except that vLLM applies min-p before top-k.

A sample depends on nothing but the logits, the request's parameters, its earlier tokens where there
are penalties, bad words or a grammar, and the token's index: the random number is a hash of seed
and index, not the state of a generator. The rank that finishes a prefill samples token 0 and decode
ranks sample the others. Neither the batch, nor the rank, nor a retry changes what is drawn from the
same logits. The logits may differ in their last bits, because sums over the KV are cut by group and
placement, and on a GPU by what else is in the batch (`triton_attention.split_length`) and by the
card.

Shape suffixes: b = batch, e = rows that are edited, v = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from csps.actors.sampling.grammar_mask import COMPILE_WAIT_S
from csps.actors.sampling.token_sampler import Penalties, TokenSampler
from csps.kernels.sampling import row_blocks, sample
from csps.protocols.core.errors import CspsError
from csps.protocols.gang.messages import SampledToken, TokenLogprob

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sampled token."""

    token: int
    logprob: float | None = None
    """Log-probability of the token under the model's own distribution, the log-softmax of the
    logits before bias, penalties, temperature and filters, as OpenAI and vLLM report it; None
    unless the request asks for log-probabilities."""
    top: tuple[TokenLogprob, ...] = ()
    """Likeliest tokens of that distribution, best first, as many as the request asks for. The
    sampled token is among them only if it is that likely."""
    finish_reason: Literal["stop", "length"] | None = None

    def message(self, sequence_id: int, index: int) -> SampledToken:
        """Return the token as part of the message to the router."""
        return SampledToken(
            sequence_id=sequence_id,
            index=index,
            token=self.token,
            finish_reason=self.finish_reason,
            logprob=self.logprob,
            top_logprobs=self.top,
        )


def sample_batch(
    samplers: Sequence[TokenSampler], logits_bv: Tensor, indices: Sequence[int]
) -> list[Sample | CspsError]:
    """Sample one token for each request: row i of `logits_bv` is token `indices[i]` of sampler i.

    A row from which nothing can be sampled gets its error instead of a sample, because the others'
    tokens are sampled and counted all the same. The host waits for the device once, up to three
    times more if rows are sampled at random (to learn whether a top-k has ties, and whether a top-p
    takes more than the highest values), and twice for each number of log-probabilities asked for.
    """
    assert len(samplers) == len(indices) == len(logits_bv)
    if not samplers:
        return []
    scores_bv = edited(samplers, logits_bv, indices)
    peaks_b, best_b = scores_bv.max(dim=-1)  # the first of equals
    peaks, tokens = peaks_b.tolist(), best_b.tolist()
    possible = [row for row, peak in enumerate(peaks) if math.isfinite(peak)]
    for row, token in _sampled_at_random(samplers, scores_bv, indices, possible):
        tokens[row] = token
    reports = _logprobs(samplers, logits_bv, tokens, possible)
    return [
        _observed_sample(sampler, index, tokens[row], *reports.get(row, (None, ())))
        if math.isfinite(peaks[row])
        else sampler.error_at(peaks[row], index)
        for row, (sampler, index) in enumerate(zip(samplers, indices, strict=True))
    ]


def _sampled_at_random(
    samplers: Sequence[TokenSampler], scores_bv: Tensor, indices: Sequence[int], rows: list[int]
) -> Iterable[tuple[int, int]]:
    """Sample those of `rows` that do not take the likeliest token; return (row, token) pairs."""
    rows = [row for row in rows if not samplers[row].greedy]
    if not rows:
        return ()
    sampled_b = sample(
        scores_bv if len(rows) == len(samplers) else scores_bv[rows],
        [samplers[row].filters for row in rows],
        [uniform(samplers[row].sampling.seed, indices[row]) for row in rows],
    )
    return zip(rows, sampled_b.tolist(), strict=True)


def _observed_sample(
    sampler: TokenSampler,
    index: int,
    token: int,
    logprob: float | None,
    top: tuple[TokenLogprob, ...],
) -> Sample:
    sampler.observe(token)
    finish_reason = sampler.finish_reason(token, index)
    return Sample(token=token, logprob=logprob, top=top, finish_reason=finish_reason)


def edited(samplers: Sequence[TokenSampler], logits_bv: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the logits in fp32, with bias, penalties and minus infinity for tokens that are not
    allowed; `logits_bv` is unchanged."""
    scores_bv = logits_bv.float()
    rows = [row for row, sampler in enumerate(samplers) if sampler.edits(indices[row])]
    if not rows:
        return scores_bv
    own = [samplers[row] for row in rows]
    until = time.monotonic() + COMPILE_WAIT_S
    masks = [sampler.grammar_mask(until) for sampler in own]
    scores_ev = _masked(scores_bv if len(rows) == len(samplers) else scores_bv[rows], masks)
    _add_bias(scores_ev, own)
    for row, sampler, scores_v in zip(rows, own, scores_ev.unbind(), strict=True):
        sampler.forbid(scores_v)
        if sampler.forbids_stop(indices[row]):
            scores_v.masked_fill_(sampler.stops(scores_v.device), -math.inf)
    penalties = {
        place: sampler.penalties
        for place, sampler in enumerate(own)
        if sampler.penalties is not None
    }
    for block in row_blocks(list(penalties), scores_ev):
        placed = [penalties[place].to(scores_ev.device) for place in block]
        scores_ev[block] = _penalize(scores_ev[block], placed)
    if len(rows) == len(samplers):
        return scores_ev
    return scores_bv.index_copy(0, torch.tensor(rows, device=scores_bv.device), scores_ev)


def _masked(scores_ev: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Return a copy with minus infinity for the tokens that have no bit in their row's mask."""
    if all(mask is None for mask in masks):
        return scores_ev.clone()
    # A sum, because replacing values where a mask is True takes a core eight times as long.
    masked_ev = torch.empty_like(scores_ev)
    addends_b8 = _addends(scores_ev.device)
    for masked_v, scores_v, bits in zip(masked_ev, scores_ev, masks, strict=True):
        if bits is None:
            masked_v.copy_(scores_v)
        else:
            mask_v = addends_b8.index_select(0, bits.to(scores_v.device).int()).view(-1)
            torch.add(scores_v, mask_v[: len(scores_v)], out=masked_v)
    return masked_ev


@cache
def _addends(device: torch.device) -> Tensor:
    """Return (256, 8) fp32: in row i 0 for each bit of i that is 1, otherwise minus infinity."""
    bits_b8 = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill_(bits_b8 == 0, -math.inf).to(device)


def _add_bias(scores_ev: Tensor, samplers: Sequence[TokenSampler]) -> None:
    vocab, device = scores_ev.shape[1], scores_ev.device
    biased = [(row, sampler) for row, sampler in enumerate(samplers) if len(sampler.bias_ids)]
    if biased:
        ids = torch.cat([sampler.bias_ids + row * vocab for row, sampler in biased])
        biases = torch.cat([sampler.bias for _, sampler in biased])
        scores_ev.view(-1).index_add_(0, ids.to(device), biases.to(device))


def _penalize(scores_ev: Tensor, penalties: Sequence[Penalties]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=scores_ev.device)[:, None]

    counts_ev = torch.stack([penalty.counts_v for penalty in penalties])
    in_prompt_ev = torch.stack([penalty.in_prompt_v for penalty in penalties])
    in_answer_ev = counts_ev > 0
    if any(penalty.repetition != 1.0 for penalty in penalties):
        factor_e1 = column([penalty.repetition for penalty in penalties])
        lowered_ev = torch.where(scores_ev > 0, scores_ev / factor_e1, scores_ev * factor_e1)
        scores_ev = torch.where(in_prompt_ev | in_answer_ev, lowered_ev, scores_ev)
    frequency_e1 = column([penalty.frequency for penalty in penalties])
    presence_e1 = column([penalty.presence for penalty in penalties])
    return scores_ev - frequency_e1 * counts_ev - presence_e1 * in_answer_ev


def _logprobs(
    samplers: Sequence[TokenSampler], logits_bv: Tensor, tokens: list[int], rows: list[int]
) -> dict[int, tuple[float, tuple[TokenLogprob, ...]]]:
    """Return by row the sampled token's log-probability and the likeliest tokens', where asked
    for."""
    asking: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        if (count := samplers[row].sampling.logprobs) is not None:
            asking[min(count, logits_bv.shape[1])].append(row)
    # Rows that ask for equally many go together: which of equally likely tokens are reported
    # depends on that number, and must not depend on the others in the batch.
    return {
        row: report
        for count, same in asking.items()
        for row, report in zip(
            same, _likeliest(logits_bv[same], [tokens[row] for row in same], count), strict=True
        )
    }


def _likeliest(
    logits_bv: Tensor, tokens: list[int], count: int
) -> list[tuple[float, tuple[TokenLogprob, ...]]]:
    logprobs_bv = logits_bv.float().log_softmax(-1)
    own_b1 = logprobs_bv.gather(1, torch.tensor(tokens, device=logits_bv.device)[:, None])
    values_bc, ids_bc = logprobs_bv.topk(count)
    both = torch.cat([own_b1, values_bc], 1).tolist()  # one copy to the host, and one for the ids
    return [
        (
            own,
            tuple(
                TokenLogprob(token=token, logprob=logprob)
                for token, logprob in zip(ids, values, strict=True)
            ),
        )
        for (own, *values), ids in zip(both, ids_bc.tolist(), strict=True)
    ]


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for token `index`: step `index` of SplitMix64 at
    hash(seed).

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014. It has 52 bits
    and not 53, so that no product with a total is rounded up to the total.
    """
    state = _mix64(seed & _MASK64) + (index + 1) * 0x9E3779B97F4A7C15
    return (_mix64(state & _MASK64) >> 12) * 2.0**-52


def _mix64(x: int) -> int:
    """Apply the finalizer of SplitMix64, a bijection of 64-bit integers that scatters their
    bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
