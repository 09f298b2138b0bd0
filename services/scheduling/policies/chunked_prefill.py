"""The policy `chunked_prefill` computes prompts in chunks beside decoding: Sarathi-Serve.

A request joins the decode batch with nothing computed but its cached prefix. Every iteration
computes one token of each decoding sequence and, within the rest of the instance's budget, chunks
of the prompts whose answers will be sampled there, the oldest first. A prompt of any length delays
the tokens of others by at most one iteration.

No request starves. Requests start strictly first come, first served, at most `max_batch` at a time.
The budget is at least as large, so the oldest prompt of an instance advances in every iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    PiggybackPlan,
    SchedulerView,
)
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
    check_least,
    fits_idle,
)
from csps.services.scheduling.state.state import Gang, GangPair, Priority, Request

PROMPTS_SHARED = 2
"""Prompts for each instance that start while several tenants share a gang: one to compute and one
to follow without a gap. More would only come before a modest tenant's prompt."""


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefillOptions:
    """Options of the policy `chunked_prefill`."""

    token_budget: int = 128
    """Tokens that an iteration computes on each instance, including one for each answer sampled
    there. A smaller budget makes iterations shorter and prompts slower."""

    def __post_init__(self) -> None:
        check_least(self, 1, "token_budget")


class ChunkedPrefill:
    """The policy `chunked_prefill`."""

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
                f"option token_budget must be at least max_batch, {batch}, not {budget}: decoding "
                "sequences would use all of it, and prompts would wait forever"
            )

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        """Return low priority for all requests."""
        return "low"

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Start the oldest requests until one finds too few slots."""
        gangs = [
            (pair.max_positions, _Gang(pair.decode, self.decode_options, view))
            for pair in view.pairs
        ]
        decisions: list[Decision] = []
        for request in view.waiting("low"):
            if view.shared and all(gang.prompts >= gang.most_prompts for _, gang in gangs):
                break
            total = request.prompt_tokens + request.output_tokens
            plans = (self._piggyback(request, gang) for most, gang in gangs if total <= most)
            plan = next(filter(None, plans), None)
            if plan is None:
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(plan)
        return decisions

    def _piggyback(self, request: Request, gang: _Gang) -> PiggybackPlan | None:
        placed = gang.place(request)
        if placed is None:
            return None
        placement = DecodePlacement(request.id, placed.slices, placed.master)
        return PiggybackPlan(placement=placement, budget=self.options.token_budget)

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return True if the decode gang has slots for prompt and answer."""
        return fits_idle(pair.decode, prompt_tokens, output_tokens)


class _Gang:
    """A decode gang in a round."""

    def __init__(self, gang: Gang, options: DecodeOptions, view: SchedulerView) -> None:
        self._id, self._view = gang.id, view
        self.prompts = sum(sequence.piggyback_tokens > 0 for sequence in gang.decoding.values())
        """Prompts that are not computed."""
        self.most_prompts = PROMPTS_SHARED * len(gang.instances)
        """Most of them while several tenants share the gang."""
        self._overlay = DecodeOverlay(gang, options, view.cost, shared=view.shared)

    def place(self, request: Request) -> Placed | None:
        """Place a request after its cached prefix, or as a whole; None without enough slots."""
        cached = self._view.cached(request, self._id)
        prompt, output = request.prompt_tokens, request.output_tokens
        placed = self._overlay.place_after(cached, prompt, output, modest=request.modest)
        if placed is not None:
            self._overlay.take(placed, output)
            self.prompts += 1
        return placed
