"""The tokens that a grammar allows next, found while the network computes.

A thread takes each sampled token into the grammar's state and finds the tokens that may follow.
Another one compiles grammars, which takes it up to a second. llguidance lets go of the interpreter
meanwhile, so a mask costs an iteration nothing unless it takes longer than the forward pass.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unfinished

import numpy as np
import torch
from torch import Tensor

from csps.models.network.checkpoint_json import InvalidTextError
from csps.models.tokenizers.grammar import Grammars, GrammarState, GrammarThread
from csps.protocols.core.errors import CspsError, DeadlineExceeded, InvalidRequest

MASK_S = 10.0
"""Limit of the wait for a mask. It takes 0.1 ms, and some 20 ms at the limits of a grammar."""
COMPILE_WAIT_S = 0.25
"""How long a batch waits for grammars that are being compiled, all of its rows together. Compiling
has begun when the step arrived, so most are done. A request whose grammar is not is tried again,
and finds it done: its attempt costs others this time, and not the whole."""

_MASKS = GrammarThread("grammar-masks")


class GrammarMask:
    """The tokens that one answer may go on with.

    Args:
        ends: tokens that end the answer.
    """

    def __init__(self, grammars: Grammars, grammar: str, ends: frozenset[int]) -> None:
        self._grammars, self._ends = grammars, ends
        self._compiled = grammars.compiled(grammar)
        self._tokens: list[int] = []
        self._taken = 0
        """Tokens that the state has taken."""
        self._state: GrammarState | None = None
        self._next: Future[Tensor | None] | None = None
        """Mask after the tokens so far; None before the grammar is compiled."""

    def observe(self, token: int) -> None:
        """Take the answer's next token."""
        self._tokens.append(token)
        self._next = self._begun() if self._compiled.done() else None

    def after_answer(self, until: float) -> Tensor | CspsError:
        """Return (vocab,) fp32 on the CPU: 0 for tokens that may come next, otherwise minus
        infinity; or why nobody knows.

        Args:
            until: time (`time.monotonic()`) until which this waits for the grammar to compile.
        """
        try:
            self._compiled.result(max(0.0, until - time.monotonic()))
        except Unfinished:
            return DeadlineExceeded("compiling a grammar", COMPILE_WAIT_S)
        self._next = self._next or self._begun()
        try:
            mask_v = self._next.result(MASK_S)
        except InvalidTextError as error:
            return InvalidRequest(str(error))
        except Unfinished:
            return DeadlineExceeded("the mask of a grammar", MASK_S)
        assert mask_v is not None, "a mask that later tokens have made useless"
        return mask_v

    def _begun(self) -> Future[Tensor | None]:
        tokens = len(self._tokens)
        return _MASKS.submit(lambda: self._after(tokens))

    def _after(self, tokens: int) -> Tensor | None:
        """Return the mask after so many tokens; None if more have come since."""
        if self._state is None:
            self._state = self._grammars.state_of(self._compiled.result())
        for token in self._tokens[self._taken : tokens]:
            self._taken += 1
            # A token that ends the answer is none of the grammar's.
            if token not in self._ends:
                self._state.advance(token)
        if len(self._tokens) > tokens:
            return None
        allowed_v = self._state.allowed(self._ends)
        return torch.from_numpy(np.where(allowed_v, np.float32(0), np.float32(-np.inf)))
