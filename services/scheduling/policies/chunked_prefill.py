"""Prompts in pieces beside the tokens that are drawn: Sarathi-Serve's chunked prefill.

A request *rides*: it joins the stream of the gang that will decode it with nothing computed. Every
iteration computes one token of each row that decodes and, with what that leaves of the instance's
budget, pieces of prompts whose answers will be drawn there, the oldest first
(`protocols.iteration.fill`). No prefill stands between two tokens of an answer, however long its
prompt.

What the gang has kept of a prompt is not computed again: the request begins behind it.

**Nobody starves.** Requests start strictly first come, first served, as soon as there are slots for
prompt and answer, at most `max_batch` at a time. The budget is at least as large, so the oldest
prompt of an instance gets a token or more of every iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    IdleCapacity,
    PiggybackPlan,
)
from csps.services.scheduling.deciding.view import GangView, PairView, RequestView, View
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
    check_least,
)
from csps.services.scheduling.state.state import Priority


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefillOptions:
    """What an iteration is filled with."""

    token_budget: int = 128
    """Tokens that an iteration computes on each instance, for those that are drawn there included.
    A smaller one makes iterations shorter and prompts slower."""

    def __post_init__(self) -> None:
        check_least(self, 1, "token_budget")


class ChunkedPrefill:
    """The policy of this module's description."""

    name = "chunked_prefill"
    whole_prompts = False
    regroups = False

    def __init__(
        self, options: ChunkedPrefillOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options = options or ChunkedPrefillOptions()
        self.decode_options = decode or DecodeOptions()
        budget, batch = self.options.token_budget, self.decode_options.max_batch
        if budget < batch:
            raise ConfigError(
                f"option token_budget must be at least max_batch, {batch}, not {budget}: rows that "
                "decode would use it up, and prompts wait for ever"
            )

    def priority(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Priority:
        """Nobody is urgent."""
        return "low"

    def decide(self, view: View) -> Sequence[Decision]:
        """Start the oldest requests until one finds no room."""
        gangs = [
            (pair.max_positions, _Gang(pair.decode, self.decode_options, view))
            for pair in view.pairs
        ]
        decisions: list[Decision] = []
        for request in view.waiting("low"):
            total = request.prompt_tokens + request.output_tokens
            roomy = (gang for most, gang in gangs if total <= most)
            ride = next((it for gang in roomy if (it := self._piggyback(request, gang))), None)
            if ride is None:
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(ride)
        return decisions

    def _piggyback(self, request: RequestView, gang: _Gang) -> PiggybackPlan | None:
        placed = gang.place(request)
        if placed is None:
            return None
        placement = DecodePlacement(request.id, placed.slices, placed.master)
        return PiggybackPlan(placement=placement, budget=self.options.token_budget)

    def idle_capacity(self, pair: PairView) -> IdleCapacity:
        """On an idle gang."""
        return _Trial(DecodeOverlay(pair.decode, self.decode_options))


class _Gang:
    """A gang that decodes, and what it has kept."""

    def __init__(self, gang: GangView, options: DecodeOptions, view: View) -> None:
        self._id, self._view = gang.id, view
        self._overlay = DecodeOverlay(gang, options)

    def place(self, request: RequestView) -> Placed | None:
        """Compute what follows upon KV that is here, or all of the prompt; None if there is no
        room."""
        cached = self._view.cached(request, self._id)
        prompt, output = request.prompt_tokens, request.output_tokens
        placed = self._overlay.place_behind(cached, prompt, output)
        if placed is not None:
            self._overlay.take(placed, output)
        return placed


class _Trial:
    def __init__(self, gang: DecodeOverlay) -> None:
        self._gang = gang

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """With all slots of the gang that decodes."""
        return self._gang.has_room(prompt_tokens, output_tokens)
