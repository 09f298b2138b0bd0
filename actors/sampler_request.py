"""The sampler that a message asks for, with what an earlier attempt has drawn remembered."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from csps.actors.token_sampler import TokenSampler
from csps.protocols.sampling import Sampling
from csps.protocols.tokens import TOKEN_BYTES


class SamplerRequest(Protocol):
    """`Reserve` or `PrefillPiece`."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def prompt_tokens(self) -> bytes: ...
    @property
    def drawn(self) -> bytes: ...


def sampler_of(request: SamplerRequest, vocab: int) -> TokenSampler:
    """Draws the tokens of the request from number `drawn_before(request.drawn)` on.

    Raises:
        InvalidRequest: the sampling parameters do not fit the model.
    """
    prompt = np.frombuffer(request.prompt_tokens, dtype="<i4").astype(np.int64)
    sampler = TokenSampler(request.sampling, vocab, prompt)
    for token in np.frombuffer(request.drawn, dtype="<i4").tolist():
        sampler.observe(token)
    return sampler


def drawn_before(drawn: bytes) -> int:
    """How many tokens of the answer an earlier attempt has drawn."""
    return len(drawn) // TOKEN_BYTES
