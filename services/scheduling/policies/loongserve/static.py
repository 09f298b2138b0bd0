"""LoongServe without elasticity, which its Fig. 12 compares with: groups that never change.

The gang is cut into groups of `static_dop` neighbours; what is left over computes nothing. A group
prefills and decodes by itself: the oldest requests start together, up to the tipping point, on the
group that has most unused slots, and their KV is spread over it evenly. What it decodes stands
still meanwhile, and has `decode_iterations` before the next prefill. Strictly first come, first
served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csps.services.scheduling.decisions import Decision, StartPlan, WakeAt
from csps.services.scheduling.policies.loongserve.dispatch import Dispatcher
from csps.services.scheduling.policies.loongserve.elastic_gang import ElasticGang
from csps.services.scheduling.policies.loongserve.jobs import Elastic, Prompt
from csps.services.scheduling.policies.loongserve.planning import start
from csps.services.scheduling.policies.loongserve.scaling import Kept
from csps.services.scheduling.shares import level_shares


class StaticGroups:
    """A gang in a round.

    Args:
        gang: as it is.
        dop: instances of every group; all of them if there are fewer.
        now_ns: the time of the round.
        most: requests that may start.
    """

    def __init__(self, gang: ElasticGang, dop: int, now_ns: int, most: int) -> None:
        self._gang, self._now_ns, self._most = gang, now_ns, most
        neighbours = sorted(gang.all, key=lambda it: it.order)
        size = min(dop, len(neighbours))
        self._groups = [
            neighbours[at : at + size] for at in range(0, len(neighbours) - size + 1, size)
        ]

    def decide(self, pending: Sequence[Prompt]) -> Iterator[Decision]:
        """Start what can start."""
        line = list(pending)
        for group in self._ready():
            prompts = self._next(line, group)
            if not prompts:
                return
            line = line[len(prompts) :]
            self._most -= len(prompts)
            yield self._start(prompts, group)
        if line:
            later = [it for it in map(self._ready_ns, self._groups) if it and it > self._now_ns]
            if later:
                yield WakeAt(at_ns=min(later))

    def _ready(self) -> list[list[Elastic]]:
        """Groups that may prefill now, the one with most unused slots first."""
        ready = []
        for group in self._groups:
            from_ns = self._ready_ns(group)
            if from_ns is not None and from_ns <= self._now_ns:
                ready.append(group)
        return sorted(ready, key=lambda it: -sum(one.unused for one in it))

    def _ready_ns(self, group: Sequence[Elastic]) -> int | None:
        """From when on; None while it prefills."""
        return self._gang.ready_ns([it.id for it in group])

    def _next(self, line: Sequence[Prompt], group: Sequence[Elastic]) -> tuple[Prompt, ...]:
        slots = sum(it.unused for it in group)
        dispatcher = Dispatcher(
            self._gang.model,
            future_slots=slots,
            average_decode_ns=0,
            most=self._most,
            max_num_ooe=0,
        )
        return dispatcher.dispatch(line, group, []).prompts

    def _start(self, prompts: Sequence[Prompt], group: Sequence[Elastic]) -> StartPlan:
        unused = {it.id: it.unused for it in group}
        mastered = self._gang.mastered
        kept = []
        for prompt in prompts:
            sizes = level_shares(prompt.future, list(unused.values()))
            assert sizes is not None, "slots were counted wrong"
            shares = list(zip(unused, sizes, strict=True))
            master = min(unused, key=lambda it: (mastered[it], it))
            mastered[master] += 1
            left, of_prompt, answer = prompt.tokens, [], []
            for instance, tokens in shares:
                first = min(left, tokens)
                left -= first
                unused[instance] -= tokens
                of_prompt += [(instance, first)] if first else []
                answer += [(instance, tokens - first)] if tokens > first else []
            kept.append(Kept(tuple(of_prompt), tuple(answer), master))
        longest = max(it.tokens for it in prompts)
        members = [
            it for it in group if any(it.id == one for where in kept for one, _ in where.prompt)
        ]
        members += [it for it in group if it not in members][: max(0, longest - len(members))]
        lengths = [it.tokens for it in prompts]
        return start(prompts, members, kept, round(self._gang.model.ns(lengths, len(members))))
