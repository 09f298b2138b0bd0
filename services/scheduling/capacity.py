"""What a cluster can hold when it holds nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ContextLengthExceeded


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """KV slots of an idle cluster, in tokens: a request beyond them would wait for ever."""

    prefill: tuple[int, ...]
    """By instance. A prompt's KV may be spread over all of them."""
    decode: tuple[int, ...]
    """By instance. The answer's KV lies on one of them, the master."""
    max_positions: int
    """Of the model."""

    @property
    def context_limit(self) -> int:
        """Most tokens, prompt and answer together, of any request."""
        return min(self.max_positions, sum(self.decode))

    def longest_answer(self, prompt_tokens: int) -> int:
        """Most tokens that may follow a prompt; 0 or less if there is no room for the prompt."""
        if prompt_tokens > sum(self.prefill):
            return 0
        return min(self.context_limit - prompt_tokens, max(self.decode))

    def check(self, prompt_tokens: int, output_tokens: int) -> None:
        """Raise `ContextLengthExceeded`, with both numbers, if the request could never run."""
        longest = self.longest_answer(prompt_tokens)
        if output_tokens <= longest:
            return
        limit = prompt_tokens + longest if longest > 0 else self.promised
        raise ContextLengthExceeded(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, limit=limit
        )

    @property
    def promised(self) -> int:
        """Tokens up to which prompt and answer may share the room as a client likes, as far as
        the answer fits on one instance."""
        return min(self.context_limit, sum(self.prefill))
