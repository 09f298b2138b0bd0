"""Log-probabilities of a prompt's tokens, put together of what the ranks report."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csps.protocols.core.errors import ProtocolError
from csps.protocols.gang.messages import PromptLogprobs


class KnownPromptLogprobs:
    """Log-probabilities of all of a prompt's tokens but the first.

    A rank may report a position again: a new attempt computes the whole prompt.

    Args:
        prompt: token ids [tokens].
        count: number of likeliest tokens beside each.
    """

    def __init__(self, prompt: NDArray[np.int32], count: int) -> None:
        self.prompt, self.count = prompt, count
        self.known = self.missing = int(prompt.size) - 1
        """Tokens with a log-probability; those of which no rank has reported it yet."""

    # Not before a rank reports: requests that wait would hold this memory, too.
    @cached_property
    def _reported(self) -> NDArray[np.bool_]:
        return np.zeros(self.known, np.bool_)

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """Log-probability of each token but the first [tokens - 1]."""
        return np.zeros(self.known, np.float32)

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """Number of tokens that are at least as likely as each token [tokens - 1]."""
        return np.zeros(self.known, np.int32)

    @cached_property
    def top_tokens(self) -> NDArray[np.int32]:
        """Likeliest tokens in place of each token, best first [tokens - 1, count]."""
        return np.zeros((self.known, self.count), np.int32)

    @cached_property
    def top_logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities of the likeliest tokens [tokens - 1, count]."""
        return np.zeros((self.known, self.count), np.float32)

    def add(self, message: PromptLogprobs) -> None:
        """Take log-probabilities that a rank reports.

        Raises:
            ProtocolError: they do not fit the prompt.
        """
        rows = len(message.logprobs) // 4
        columns = (message.logprobs, message.ranks, message.top_tokens, message.top_logprobs)
        widths = (1, 1, self.count, self.count)
        whole = all(len(c) == 4 * rows * width for c, width in zip(columns, widths, strict=True))
        last = message.start + (rows - 1) * message.step
        if not whole or not rows or message.step < 1 or not 0 <= message.start <= last < self.known:
            raise ProtocolError(
                f"log-probabilities of {rows} positions from {message.start} by {message.step} "
                f"do not fit a prompt of {self.prompt.size} tokens"
            )
        at = slice(message.start, last + 1, message.step)
        self.missing -= rows - int(self._reported[at].sum())
        self._reported[at] = True
        self.logprobs[at] = np.frombuffer(message.logprobs, "<f4")
        self.ranks[at] = np.frombuffer(message.ranks, "<i4")
        self.top_tokens[at] = np.frombuffer(message.top_tokens, "<i4").reshape(rows, self.count)
        self.top_logprobs[at] = np.frombuffer(message.top_logprobs, "<f4").reshape(rows, self.count)
