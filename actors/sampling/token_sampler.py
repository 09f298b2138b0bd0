"""What a request asks of its next token.

Shape suffix: v = vocabulary.

The sampler that a message asks for, with what an earlier attempt has drawn remembered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csps.kernels.sampling import Filters
from csps.protocols.core.errors import CspsError, FaultError, InvalidRequest
from csps.protocols.gang.messages import TOKEN_BYTES, Sampling

_GREEDY_BELOW = 1e-5  # as in vLLM


class BadLogits(FaultError):
    """No token can be drawn: the model's logits hold NaN or +inf, or are all -inf."""


class TokenSampler:
    """What one request asks for, laid out once for all its draws, and its penalties' memory.

    Everything that the length of a request's lists decides happens here: `sample_batch` costs the
    others the same, whether a request names one stop token or all of them.

    Args:
        sampling: What the request asks for.
        vocab: Size of the vocabulary.
        prompt_tokens: Ids in the prompt, in any order; only a repetition penalty needs them.

    Raises:
        InvalidRequest: `logit_bias` names a token outside the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        prompt_tokens: Sequence[int] | npt.NDArray[np.int64] | Tensor = (),
    ) -> None:
        _check(sampling, vocab)
        self.sampling = sampling
        self.filters = Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.greedy = sampling.temperature < _GREEDY_BELOW
        # A stop id outside the vocabulary is legal, as tokenizers may know more tokens than the
        # model; it is never drawn.
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._stops_v = _stop_mask(sampling, vocab)
        self.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self.penalties: Penalties | None = None
        if _penalises(sampling):
            self.penalties = Penalties(sampling, vocab, prompt_tokens)

    def observe(self, token: int) -> None:
        """Remembers a token of the answer that was drawn elsewhere."""
        if self.penalties is not None:
            self.penalties.counts_v[token] += 1

    def edits(self, index: int) -> bool:
        """Whether bias, minimum length or penalties change the logits of token `index`."""
        biased = len(self.bias_ids) > 0
        return biased or self.penalties is not None or self.forbids_stop(index)

    def forbids_stop(self, index: int) -> bool:
        """Whether token `index` must not be a stop token."""
        return index < self.sampling.min_tokens and self._stops_v is not None

    def stops(self, device: torch.device) -> Tensor:
        """(v,) bool: the stop tokens."""
        assert self._stops_v is not None
        self._stops_v = self._stops_v.to(device)
        return self._stops_v

    def finish_reason(self, token: int, index: int) -> Literal["stop", "length"] | None:
        """Whether the answer ends with `token` as its number `index`."""
        if index + 1 >= self.sampling.min_tokens and token in self._stop_ids:
            return "stop"
        return "length" if index + 1 >= self.sampling.max_tokens else None

    def error_at(self, peak: float, index: int) -> CspsError:
        """Why nothing can be drawn from scores whose maximum is `peak`."""
        if peak == -math.inf and self.forbids_stop(index):
            # The client's mistake, which no other attempt and no other rank can mend.
            return InvalidRequest(
                "every token is forbidden: stop_token_ids leave none to draw before min_tokens",
                param="stop_token_ids",
            )
        if peak == -math.inf:
            return BadLogits(f"all logits of token {index} are -inf")
        kind = "NaN" if math.isnan(peak) else "+inf"
        return BadLogits(f"the logits of token {index} hold {kind}")


class Penalties:
    """Repetition penalty (Keskar et al. 2019), frequency and presence penalty (OpenAI).

    Dense over the vocabulary: applying them costs the same however long the answer gets.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        prompt_tokens: Sequence[int] | npt.NDArray[np.int64] | Tensor,
    ) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self.counts_v = torch.zeros(vocab)
        self.in_prompt_v = torch.zeros(vocab, dtype=torch.bool)
        self.in_prompt_v[torch.as_tensor(prompt_tokens, dtype=torch.int64)] = True

    def to(self, device: torch.device) -> Penalties:
        """Where the logits are."""
        self.counts_v = self.counts_v.to(device)
        self.in_prompt_v = self.in_prompt_v.to(device)
        return self


def _penalises(s: Sampling) -> bool:
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def _stop_mask(sampling: Sampling, vocab: int) -> Tensor | None:
    """(v,) bool: the stop tokens that a minimum length forbids; None if there are none."""
    if sampling.min_tokens == 0:
        return None
    ids_v = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
    known = ids_v[(ids_v >= 0) & (ids_v < vocab)]
    return torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True) if len(known) else None


def _check(s: Sampling, vocab: int) -> None:
    outside = [token for token in s.logit_bias if not 0 <= token < vocab]
    if outside:
        raise InvalidRequest(
            f"logit_bias names token {outside[0]}; the vocabulary has {vocab} tokens",
            param="logit_bias",
        )
    # The API refuses the rest before it gets here.
    assert 0.0 <= s.temperature < math.inf, s
    assert 0.0 <= s.top_p <= 1.0, s
    assert 0.0 <= s.min_p <= 1.0, s
    assert 0.0 < s.repetition_penalty < math.inf, s
    assert s.max_tokens >= 1, s


class SamplerRequest(Protocol):
    """`Reserve` or `PrefillChunk`."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def prompt_tokens(self) -> bytes: ...
    @property
    def generated_tokens(self) -> bytes: ...


def sampler_of(request: SamplerRequest, vocab: int) -> TokenSampler:
    """Draws the tokens of the request from number `drawn_before(request.drawn)` on.

    Raises:
        InvalidRequest: the sampling parameters do not fit the model.
    """
    prompt = np.frombuffer(request.prompt_tokens, dtype="<i4").astype(np.int64)
    sampler = TokenSampler(request.sampling, vocab, prompt)
    for token in np.frombuffer(request.generated_tokens, dtype="<i4").tolist():
        sampler.observe(token)
    return sampler


def generated_before(generated_tokens: bytes) -> int:
    """How many tokens of the answer an earlier attempt has drawn."""
    return len(generated_tokens) // TOKEN_BYTES
