"""The tokens that a grammar allows next.

Most masks take less than 0.1 ms and are computed when they are needed. If the previous mask took
long, another thread advances the grammar by the sampled token and computes the next mask during the
forward pass. A third thread compiles grammars, which takes up to a second.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unfinished

import torch
from torch import Tensor

from csps.models.network.checkpoint_json import InvalidTextError
from csps.models.tokenizers.grammar import Grammars, GrammarState, GrammarThread
from csps.protocols.core.errors import CspsError, DeadlineExceeded, InvalidRequest

MASK_S = 10.0
"""Limit of the wait for a mask. Some take 20 ms at the limits of a grammar."""
BESIDE_S = 0.3e-3
"""Shortest time of a mask after which the next one is computed during the forward pass. Handing a
shorter one to the other thread takes longer than computing it, because both need the interpreter's
lock."""
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
        self._beside = True
        """Whether the next mask is computed during the forward pass. The first one is, because its
        time is unknown. This changes only while no mask is being computed, so one thread at a time
        uses the state."""
        self._next: Future[tuple[Tensor | None, float]] | None = None
        """Mask after the tokens so far, if it is computed during the forward pass."""

    def observe(self, token: int) -> None:
        """Take the answer's next token."""
        self._tokens.append(token)
        self._next = self._begun() if self._beside and self._compiled.done() else None

    def after_answer(self, until: float) -> Tensor | CspsError:
        """Return bits, uint8 on the CPU, of which bit t % 8 of byte t // 8 is 1 if token t may come
        next; or the error.

        Args:
            until: time (`time.monotonic()`) until which this waits for the grammar to compile.
        """
        try:
            self._compiled.result(max(0.0, until - time.monotonic()))
        except Unfinished:
            return DeadlineExceeded("compiling a grammar", COMPILE_WAIT_S)
        if self._next is None and self._beside:
            self._next = self._begun()
        try:
            bits, took_s = (
                self._after(len(self._tokens)) if self._next is None else self._next.result(MASK_S)
            )
        except InvalidTextError as error:
            return InvalidRequest(str(error))
        except Unfinished:
            return DeadlineExceeded("the mask of a grammar", MASK_S)
        self._beside = took_s >= BESIDE_S
        assert bits is not None, "a mask that later tokens have made useless"
        return bits

    def _begun(self) -> Future[tuple[Tensor | None, float]]:
        tokens = len(self._tokens)
        return _MASKS.submit(lambda: self._after(tokens))

    def _after(self, tokens: int) -> tuple[Tensor | None, float]:
        """Return the mask after so many tokens, None if more have come since, and the processor
        time in seconds that it took."""
        began = time.thread_time()
        if self._state is None:
            self._state = self._grammars.state_of(self._compiled.result())
        for token in self._tokens[self._taken : tokens]:
            self._taken += 1
            # A token that ends the answer is none of the grammar's.
            if token not in self._ends:
                self._state.advance(token)
        if len(self._tokens) > tokens:
            return None, time.thread_time() - began
        bits = torch.from_numpy(self._state.allowed(self._ends))
        return bits, time.thread_time() - began
