"""The sampling parameters of one request, and the state that they need between tokens.

That state is a function of the answer's tokens. So a retry, or another instance after a move,
rebuilds it from them (`TokenSampler.catch_up`).

Shape suffix: v = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csps.actors.sampling.grammar_mask import GrammarMask
from csps.kernels.sampling import Filters
from csps.models.tokenizers.grammar import Grammars, no_tokens
from csps.protocols.core.errors import CspsError, FaultError, InvalidRequest
from csps.protocols.gang.messages import SamplerInputs, Sampling
from csps.protocols.rpc.schema import decode

_GREEDY_BELOW = 1e-5  # as in vLLM


class BadLogits(FaultError):
    """No token can be sampled: the model's logits hold NaN or +inf, or are all -inf."""


class TokenSampler:
    """Sampling parameters of one request, prepared once for all its tokens, with what depends on
    the tokens so far: penalties' counts, bad words begun, the state of a grammar.

    All work that depends on the length of a request's lists happens here. So `sample_batch` costs
    other requests the same, whether this one names one stop token or all of them.

    Args:
        sampling: parameters of the request.
        vocab: size of the vocabulary.
        prompt_tokens: ids in the prompt, in any order; only a repetition penalty needs them.
        grammars: makes the states of grammars; None on ranks that sample nothing.

    Raises:
        InvalidRequest: `logit_bias` names a token outside the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        prompt_tokens: Sequence[int] | npt.NDArray[np.int64] | Tensor = (),
        grammars: Grammars | None = None,
    ) -> None:
        _check(sampling, vocab)
        self.sampling, self._vocab = sampling, vocab
        self.answered: list[int] = []
        """Tokens of the answer so far, where its next one depends on them (`remembers`)."""
        self._failure: CspsError | None = None
        self.filters = Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.greedy = sampling.temperature < _GREEDY_BELOW
        # A stop id outside the vocabulary is legal, as tokenizers may know more tokens than the
        # model; it is never sampled.
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._stops_v = _stop_mask(sampling, vocab)
        self.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._forbidden_v = _forbidden_mask(sampling, vocab)
        self.penalties: Penalties | None = None
        if _has_penalties(sampling):
            self.penalties = Penalties(sampling, vocab, prompt_tokens)
        self._mask: GrammarMask | None = None
        if sampling.grammar and grammars is not None:
            self._mask = GrammarMask(grammars, sampling.grammar, self._stop_ids)

    @property
    def remembers(self) -> bool:
        """Return whether a token depends on those before it by more than the logits."""
        sampling = self.sampling
        return bool(self.penalties or sampling.bad_words or sampling.grammar)

    def observe(self, token: int) -> None:
        """Count the next token of the answer."""
        if not self.remembers:
            return
        self.answered.append(token)
        if self.penalties is not None:
            self.penalties.counts_v[token] += 1
        if self._mask is not None:
            self._mask.observe(token)

    def catch_up(self, answered: Sequence[int]) -> None:
        """Count the tokens that the answer has got elsewhere.

        Args:
            answered: all tokens of the answer.
        """
        for token in answered[len(self.answered) :]:
            self.observe(token)

    def edits(self, index: int) -> bool:
        """Return whether anything changes the logits of token `index`."""
        biased = len(self.bias_ids) > 0 or self._forbidden_v is not None
        return biased or self.remembers or self.forbids_stop(index)

    def grammar_mask(self, until: float) -> Tensor | None:
        """Return bits, uint8 on the CPU: bit t % 8 of byte t // 8 is 1 if the grammar allows token
        t next; None without a grammar. If nobody knows them, no token can be sampled.

        Args:
            until: time (`time.monotonic()`) until which this waits for the grammar to compile.
        """
        if self._mask is None:
            return None
        bits = self._mask.after_answer(until)
        if isinstance(bits, CspsError):
            self._failure = bits
            return torch.from_numpy(no_tokens(self._vocab))
        return bits

    def forbid(self, scores_v: Tensor) -> None:
        """Replace the scores of tokens that the request forbids next by minus infinity."""
        if self._forbidden_v is not None:
            self._forbidden_v = self._forbidden_v.to(scores_v.device)
            scores_v.masked_fill_(self._forbidden_v, -math.inf)
        for word in self.sampling.bad_words:
            *begun, last = word
            if last < len(scores_v) and self.answered[len(self.answered) - len(begun) :] == begun:
                scores_v[last] = -math.inf

    def forbids_stop(self, index: int) -> bool:
        """Return whether token `index` must not be a stop token."""
        return index < self.sampling.min_tokens and self._stops_v is not None

    def stops(self, device: torch.device) -> Tensor:
        """Return (v,) bool: the stop tokens."""
        assert self._stops_v is not None
        self._stops_v = self._stops_v.to(device)
        return self._stops_v

    def finish_reason(self, token: int, index: int) -> Literal["stop", "length"] | None:
        """Return the reason if the answer ends with `token` at `index`, else None."""
        if index + 1 >= self.sampling.min_tokens and token in self._stop_ids:
            return "stop"
        return "length" if index + 1 >= self.sampling.max_tokens else None

    def error_at(self, peak: float, index: int) -> CspsError:
        """Return why nothing can be sampled from scores whose maximum is `peak`."""
        if self._failure is not None:
            return self._failure
        if peak == -math.inf and self._mask is not None:
            return InvalidRequest("the grammar allows no token that may be sampled here")
        if peak == -math.inf and self.forbids_stop(index):
            # The client's mistake: no other attempt and no other rank can do better.
            return InvalidRequest(
                "every token is forbidden: stop_token_ids leave none to sample before min_tokens",
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
        """Move the counts to the device of the logits."""
        self.counts_v = self.counts_v.to(device)
        self.in_prompt_v = self.in_prompt_v.to(device)
        return self


def _has_penalties(s: Sampling) -> bool:
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def _forbidden_mask(sampling: Sampling, vocab: int) -> Tensor | None:
    """Return (v,) bool: tokens that are never allowed; None if there are none."""
    words = [word[0] for word in sampling.bad_words if len(word) == 1 and word[0] < vocab]
    if not sampling.allowed_token_ids and not words:
        return None
    forbidden_v = torch.zeros(vocab, dtype=torch.bool)
    if sampling.allowed_token_ids:
        forbidden_v[:] = True
        forbidden_v[torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)] = False
    forbidden_v[torch.tensor(words, dtype=torch.int64)] = True
    return forbidden_v


def _stop_mask(sampling: Sampling, vocab: int) -> Tensor | None:
    """Return (v,) bool: the stop tokens that a minimum length forbids; None if there are none."""
    if sampling.min_tokens == 0:
        return None
    ids_v = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
    known = ids_v[(ids_v >= 0) & (ids_v < vocab)]
    return torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True) if len(known) else None


def _check(s: Sampling, vocab: int) -> None:
    for param, tokens in (
        ("logit_bias", tuple(s.logit_bias)),
        ("allowed_token_ids", s.allowed_token_ids),
    ):
        outside = [token for token in tokens if not 0 <= token < vocab]
        if outside:
            raise InvalidRequest(
                f"{param} names token {outside[0]}; the vocabulary has {vocab} tokens", param=param
            )
    # The API refuses the rest before it gets here.
    assert 0.0 <= s.temperature < math.inf, s
    assert 0.0 <= s.top_p <= 1.0, s
    assert 0.0 <= s.min_p <= 1.0, s
    assert 0.0 < s.repetition_penalty < math.inf, s
    assert s.max_tokens >= 1, s


def compile_ahead(packed: bytes, grammars: Grammars | None) -> None:
    """Begin to compile the grammar of packed `SamplerInputs`, before their sampler is needed.

    Raises:
        ProtocolError: these are no sampler inputs.
    """
    if grammars is not None and (grammar := decode(SamplerInputs, packed).sampling.grammar):
        grammars.compiled(grammar)


def sampler_of(packed: bytes, vocab: int, grammars: Grammars | None) -> TokenSampler:
    """Return the sampler for packed `SamplerInputs`. It has counted the tokens of an earlier
    attempt.

    Args:
        grammars: makes the states of grammars; None on ranks that sample nothing.

    Raises:
        ProtocolError: these are no sampler inputs.
        InvalidRequest: the sampling parameters do not fit the model.
    """
    inputs = decode(SamplerInputs, packed)
    prompt = np.frombuffer(inputs.prompt_tokens, dtype="<i4").astype(np.int64)
    sampler = TokenSampler(inputs.sampling, vocab, prompt, grammars)
    sampler.catch_up(np.frombuffer(inputs.generated_tokens, dtype="<i4").tolist())
    return sampler
