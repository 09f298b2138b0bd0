"""Longer prompts in a round of the policy `csps`: on the groups that they fill, with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from csps.services.scheduling.cost import Choice
from csps.services.scheduling.ids import RequestId
from csps.services.scheduling.policies.csps.starts import Starts, Verdict
from csps.services.scheduling.policies.decode_overlay import Placed
from csps.services.scheduling.policies.near_rooms import Group, NearRooms
from csps.services.scheduling.policies.prefill_overlay import Spot
from csps.services.scheduling.policies.reuse import Reuse, reuse_plan
from csps.services.scheduling.policies.whole_prompts import WholePrompts
from csps.services.scheduling.shares import level_shares
from csps.services.scheduling.view import RequestView

FILLERS_PASS = 8
"""Waiting prompts that others may pass to fill the slack of a step."""


class LongPrompts:
    """Those of one pair."""

    def __init__(self, starts: Starts) -> None:
        self._starts, self._options = starts, starts.options
        self._prefill, self._cost = starts.prefill, starts.cost
        self._rooms: NearRooms | None = None

    def changed(self, spot: Spot) -> None:
        """An instance was given something."""
        if self._rooms is not None:
            self._rooms.update(spot)

    def _near_rooms(self) -> NearRooms:
        if self._rooms is None:
            it = self._options
            self._rooms = NearRooms(self._prefill.spots, it.spt_tokens, it.jobs_per_instance)
        return self._rooms

    def start(
        self, line: Sequence[RequestView], index: int, urgent_id: RequestId | None
    ) -> Verdict:
        """Compute a prompt on the group that it fills, with others in the slack of the last SPT.

        Args:
            line: of longer prompts.
            index: of the prompt in the line.
            urgent_id: the oldest short one that this round has not come to.
        """
        request = line[index]
        placed = self._starts.place(request)
        if placed is None:
            return Verdict.BLOCKED
        group = self._near_rooms().group(request.prompt_tokens)
        reuse = self.reuse(request)
        if reuse and (group is None or reuse.ends_ns <= self._ends_ns(request, group)):
            self._start_reuse(request, reuse, placed)
            return Verdict.STARTS
        if group is None:
            # With slots enough, only outstanding steps are in the way.
            room = sum(it.free for it in self._prefill.spots)
            return Verdict.WAITS if room >= request.prompt_tokens else Verdict.BLOCKED
        choice = self._best(request, group, request.prompt_tokens)
        step = WholePrompts(
            group=group.spots, cls=request.cls, strategy=choice.strategy, urgent=False
        )
        self._add(step, request, placed)
        younger = islice(line, index + 1, index + 1 + self._options.look_ahead)
        self._fill(step, younger, group, urgent_id)
        if len(step.members) > 1:
            choice = self._best(request, group, step.tokens)
        self._launch(step, group, choice.time_ns)
        return Verdict.STARTS

    def _ends_ns(self, request: RequestView, group: Group) -> int:
        """When a group will have computed all of a prompt."""
        choice = self._best(request, group, request.prompt_tokens)
        return max(it.free_at_ns for it in group.spots) + choice.time_ns

    def _best(self, request: RequestView, group: Group, tokens: int) -> Choice:
        """How a group computes all of a prompt, and others that fill its last SPT, when it is
        free."""
        waited_ns = max(it.free_at_ns for it in group.spots) - request.submitted_ns
        shape = self._prefill.shape(group.spots)
        return self._cost.best(request.cls, shape, 0, tokens, waited_ns)

    def _add(self, step: WholePrompts, request: RequestView, placed: Placed) -> None:
        self._starts.take(request, placed)
        step.add(request, placed)

    def _launch(self, step: WholePrompts, group: Group, predicted_ns: int) -> None:
        shares = level_shares(step.tokens, group.room)
        assert shares is not None, "fillers exceed the slack"
        used = [(spot, n) for spot, n in zip(group.spots, shares, strict=True) if n]
        step.group, step.shares = [spot for spot, _ in used], [n for _, n in used]
        step.predicted_ns = predicted_ns
        oldest, _ = step.members[0]
        self._prefill.start_long(oldest, step.group, step.shares, predicted_ns)
        self._starts.add_step(step)
        self._given(step.group)

    def _given(self, spots: list[Spot]) -> None:
        """Instances were given a long step."""
        for spot in spots:
            self._near_rooms().update(spot)
        self._starts.urgent.close(spots)

    # --- behind what was kept ------------------------------------------------------------------

    def reuse(self, request: RequestView) -> Reuse | None:
        """The rest of a prompt, where its beginning was kept and around it."""
        cached = self._starts.cached(request)
        if cached is None:
            return None
        spots = self._starts.reuses.holders(cached)
        left = request.prompt_tokens - cached.tokens
        if left > len(spots) * self._options.spt_tokens:
            wider = self._near_rooms().group(left)
            ids = {it.id for it in spots}
            spots += [it for it in (wider.spots if wider else ()) if it.id not in ids]
            spots.sort(key=lambda it: it.order)
        if any(it.long_steps >= self._options.jobs_per_instance for it in spots):
            return None
        return self._starts.reuses.on(request, cached, spots)

    def _start_reuse(self, request: RequestView, reuse: Reuse, placed: Placed) -> None:
        self._starts.reuses.take(reuse)
        self._prefill.start_long(request, reuse.spots, reuse.shares, reuse.time_ns)
        self._starts.take(request, placed)
        self._starts.add(reuse_plan(request, reuse, placed))
        self._given(reuse.spots)

    # --- with others in the slack --------------------------------------------------------------

    def _fill(
        self,
        step: WholePrompts,
        younger: Iterable[RequestView],
        group: Group,
        urgent_id: RequestId | None,
    ) -> None:
        """Add younger prompts for the slack of the last SPT, if they would otherwise wait.

        They may pass `FILLERS_PASS` longer ones, for which slots are kept meanwhile, but nobody
        who is blocked, nor a short one that may be found to be: what they take is not given back
        within any bound.
        """
        spt = min(self._options.spt_tokens, *group.room)
        slack = len(group.spots) * spt - step.tokens
        idle = self._prefill.idle
        if slack <= 0 or (idle and idle > sum(not it.long_steps for it in group.spots)):
            return  # an idle instance serves them sooner
        line = self._line_to_last_filler(younger, slack, step.cls, urgent_id)
        if not line:
            return
        decode = self._starts.decode
        passed: list[tuple[Placed, int]] = []
        room = sum(it.free for it in self._prefill.spots) - step.tokens
        for other in line:
            placed = self._starts.place(other)
            room -= other.prompt_tokens
            if placed is None or room < 0:
                break
            if other.prompt_tokens <= slack and other.cls == step.cls:
                slack -= other.prompt_tokens
                self._add(step, other, placed)
            else:
                decode.take(placed, other.output_tokens)
                passed.append((placed, other.output_tokens))
        for placed, output_tokens in passed:
            decode.put_back(placed, output_tokens)

    def _line_to_last_filler(
        self, younger: Iterable[RequestView], slack: int, cls: str, urgent_id: RequestId | None
    ) -> list[RequestView]:
        """The part of the line that matters for the slack; mostly nobody in it is small enough."""
        line: list[RequestView] = []
        passing = end = 0
        for other in younger:
            if other.blocked_ns is not None or (urgent_id is not None and urgent_id < other.id):
                break
            if self._starts.started(other) or self._starts.too_long(other):
                continue
            line.append(other)
            if other.prompt_tokens <= slack and other.cls == cls:
                end = len(line)
            elif passing < FILLERS_PASS:
                passing += 1
            else:
                break
        return line[:end]
