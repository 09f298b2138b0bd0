"""A policy of your own: the shortest prompt first, but nobody waits longer than `patience_s`.

Run it on a simulated cluster, or live, from this folder:

    csps simulate --policy shortest_first:ShortestFirst --option patience_s=5
    csps serve --elastic 2 --policy shortest_first:ShortestFirst

Requests join the decode batch of a gang, whose iterations compute their prompts in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    PiggybackPlan,
    SchedulerView,
)
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    fits_idle,
)
from csps.services.scheduling.state.state import GangPair, Priority, Request


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keys of the section `scheduling` beside `policy`."""

    patience_s: float = 10.0
    token_budget: int = 256


class ShortestFirst:
    """The policy; it has no state: all that it knows is in the view."""

    pairings = ("pair", "elastic")
    Options = Options
    name = "shortest_first"
    whole_prompts = False
    regroups = False

    def __init__(self, options: Options, decode: DecodeOptions) -> None:
        self.options, self.decode_options = options, decode

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        return "low"

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return fits_idle(pair.decode, prompt_tokens, output_tokens)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        return list(self._starts(view))

    def _starts(self, view: SchedulerView) -> Iterator[Decision]:
        patience_ns = self.options.patience_s * 1e9
        overlays = [
            (pair, DecodeOverlay(pair.decode, self.decode_options, view.cost))
            for pair in view.pairs
        ]

        def order(request: Request) -> tuple[bool, int]:
            waits = view.now_ns - request.submitted_ns > patience_ns
            return not waits, request.submitted_ns if waits else request.prompt_tokens

        for request in sorted(view.waiting("low"), key=order):
            size = request.prompt_tokens, request.output_tokens
            for pair, overlay in overlays:
                if sum(size) > pair.max_positions:
                    continue
                placed = overlay.place_after(view.cached(request, pair.decode.id), *size)
                if placed is not None:
                    overlay.take(placed, request.output_tokens)
                    placement = DecodePlacement(request.id, placed.slices, placed.master)
                    yield PiggybackPlan(placement=placement, budget=self.options.token_budget)
                    break
            else:
                return  # the others wait behind it, so that large requests find room as well
