"""The tokens that a grammar allows next, found while the network computes.

A thread takes each sampled token into the grammar's state and finds the tokens that may follow.
llguidance lets go of the interpreter meanwhile, so a mask costs an iteration nothing unless it
takes longer than the forward pass.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Unfinished
from functools import partial

import torch
from torch import Tensor

from csps.models.network.checkpoint_json import InvalidTextError
from csps.models.tokenizers.grammar import Grammars, GrammarState
from csps.protocols.core.errors import CspsError, DeadlineExceeded, InvalidRequest

MASK_S = 10.0
"""Limit of the wait for a mask. It takes 0.1 ms, and some 20 ms at the limits of a grammar; the
first one compiles the grammar."""

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="grammar")


class GrammarMask:
    """The tokens that one answer may go on with.

    Args:
        ends: tokens that end the answer.
    """

    def __init__(self, grammars: Grammars, grammar: str, ends: frozenset[int]) -> None:
        self._make = partial(grammars.state, grammar)
        self._ends = ends
        self._state: GrammarState | None = None
        self._next: Future[Tensor] = _THREAD.submit(self._after, None)

    def observe(self, token: int) -> None:
        """Take the answer's next token."""
        self._next = _THREAD.submit(self._after, token)

    def allowed(self) -> Tensor | CspsError:
        """Return (vocab,) bool on the CPU: tokens that may come next; or why nobody knows."""
        try:
            return self._next.result(MASK_S)
        except InvalidTextError as error:
            return InvalidRequest(str(error))
        except Unfinished:
            return DeadlineExceeded("the mask of a grammar", MASK_S)

    def _after(self, token: int | None) -> Tensor:
        if self._state is None:
            self._state = self._make()
        # A token that ends the answer is none of the grammar's.
        if token is not None and token not in self._ends:
            self._state.advance(token)
        return torch.from_numpy(self._state.allowed(self._ends))
