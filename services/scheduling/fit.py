"""What fits a cluster that has nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence

from csps.protocols.errors import ContextLengthExceeded
from csps.services.scheduling.decisions import Policy, Trial
from csps.services.scheduling.state import Gang, Pair, idle_copy


class Fit:
    """Asks the policy itself, on idle copies of the present gangs: a request that no round could
    ever place would wait for ever, and hold up all behind it. Without gangs everything fits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._trials: list[tuple[Pair, Trial]] = []

    def use(self, pairs: Sequence[Pair]) -> None:
        """Gangs have come or gone; while there are none, those that were there last count."""
        if not pairs:
            return
        idle = [_idle_pair(pair) for pair in pairs]
        self._trials = [(pair, self._policy.trial(pair)) for pair in idle]

    @property
    def known(self) -> bool:
        """There was a pair of gangs once."""
        return bool(self._trials)

    @property
    def promised(self) -> int:
        """Tokens up to which prompt and answer may share the room as a client likes, as far as
        the answer fits on one instance."""
        limits = (min(_context_limit(pair), _slots(pair.prefill)) for pair, _ in self._trials)
        return max(limits, default=0)

    def longest_answer(self, prompt_tokens: int) -> int:
        """Most tokens that may follow a prompt; 0 or less if there is no room for the prompt."""
        return max(
            (_longest_answer(pair, trial, prompt_tokens) for pair, trial in self._trials), default=0
        )

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether the policy would place the request if there were no other."""
        total = prompt_tokens + output_tokens
        return not self._trials or any(
            total <= pair.max_positions and trial.fits(prompt_tokens, output_tokens)
            for pair, trial in self._trials
        )

    def misfit(self, prompt_tokens: int, output_tokens: int) -> ContextLengthExceeded | None:
        """What is to be said about a request that does not fit, with both numbers."""
        if self.fits(prompt_tokens, output_tokens):
            return None
        longest = self.longest_answer(prompt_tokens)
        return ContextLengthExceeded(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            limit=prompt_tokens + longest if longest > 0 else self.promised,
        )


def _idle_pair(pair: Pair) -> Pair:
    prefill = idle_copy(pair.prefill)
    decode = prefill if pair.decode is pair.prefill else idle_copy(pair.decode)
    return Pair(prefill=prefill, decode=decode)


def _slots(gang: Gang) -> int:
    return sum(it.capacity for it in gang.instances)


def _context_limit(pair: Pair) -> int:
    return min(pair.max_positions, _slots(pair.decode))


def _longest_answer(pair: Pair, trial: Trial, prompt_tokens: int) -> int:
    """By bisection below what slots allow; mostly that fits at once."""
    most = min(_context_limit(pair) - prompt_tokens, pair.decode.largest)
    if most <= 0 or trial.fits(prompt_tokens, most):
        return most
    fits, misfits = 0, most
    while misfits - fits > 1:
        middle = (fits + misfits) // 2
        if trial.fits(prompt_tokens, middle):
            fits = middle
        else:
            misfits = middle
    return fits
