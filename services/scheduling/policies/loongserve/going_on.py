"""Prompts that go on from kept KV, before batches are formed: history lies where it lies.

What an iteration of §5.3 takes follows from prompts' lengths, and any instances may compute it. A
prompt of which most was kept has a short rest instead, which its holders compute around a ring in
an iteration of its own, and keep. They prefill if they are idle, or if the rest gains more than
those lose who decode there (Eqs. 1-2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from csps.protocols.placement import striped
from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.elastic_gang import ElasticGang
from csps.services.scheduling.policies.loongserve.jobs import DecodeBatch, Elastic, Prompt
from csps.services.scheduling.policies.loongserve.planning import ALONE, RING
from csps.services.scheduling.policies.loongserve.waiting import spared_ns
from csps.services.scheduling.shares import bounds_of, laid_out, tokens_on
from csps.services.scheduling.view import CachedView


class GoingOn:
    """What goes on in a round.

    Args:
        gang: whose slots are taken as prompts start.
        average_decode_ns: how long finished requests were decoded.
    """

    def __init__(self, gang: ElasticGang, average_decode_ns: int) -> None:
        self._gang, self._average_decode_ns = gang, average_decode_ns

    def start(
        self,
        prompt: Prompt,
        cached: CachedView,
        idle: Sequence[Elastic],
        batches: Sequence[DecodeBatch],
    ) -> StartPlan | None:
        """Compute the rest of a prompt where its beginning lies; None if these may not prefill, or
        have no slots, or all of the prompt would be computed sooner by all that may."""
        names = dict.fromkeys(it.instance for it in cached.shares)
        holders = sorted(self._gang.elastic(list(names)), key=lambda it: it.order)
        free = {it.id for it in idle}
        disturbed = [it for it in batches if not names.keys().isdisjoint(_ids(it))]
        free.update(*map(_ids, disturbed))
        if not free.issuperset(names):
            return None
        took_ns = self._gang.rest_ns(len(holders), prompt.tokens - cached.tokens, cached.tokens)
        if took_ns > self._gang.model.ns([prompt.tokens], max(1, len(idle))):
            return None
        if any(self._cost(took_ns, it) >= self._gain(prompt, it) for it in disturbed):
            return None
        return self._plan(prompt, cached, holders, took_ns)

    def _cost(self, took_ns: float, batch: DecodeBatch) -> float:
        """Eq. 1."""
        return sum([took_ns / it.drawn for it in batch.requests])

    def _gain(self, prompt: Prompt, batch: DecodeBatch) -> float:
        """Eq. 2."""
        spared = spared_ns(prompt.waited_ns, batch.requests, self._average_decode_ns)
        return spared / prompt.tokens

    def _plan(
        self, prompt: Prompt, cached: CachedView, holders: Sequence[Elastic], took_ns: float
    ) -> StartPlan | None:
        members, left = [it.id for it in holders], prompt.tokens - cached.tokens
        laid = laid_out(members, striped(left, len(members)), cached.tokens)
        rows = tuple(it for it in laid if it.tokens)
        computed = tokens_on(rows)
        unused = dict(self._gang.unused)
        for slots in (cached.taken, computed):
            _take(unused, slots)
        if min(unused.values()) < 0 or sum(unused.values()) < prompt.answer:
            return None
        master = min(holders, key=lambda it: (self._gang.mastered[it.id], -unused[it.id], it.order))
        others = [it for it in unused if it != master.id]
        line = [master.id, *sorted(others, key=lambda it: (it not in members, -unused[it]))]
        answer = _filled(prompt.tokens, prompt.answer, line, unused)
        _take(unused, tokens_on(answer))
        self._gang.unused.update(unused)
        ring = len(members) > 1
        step = PlannedStep(
            group=tuple(members),
            bounds=bounds_of([computed.get(it, 0) for it in members]),
            pieces=(PlannedPiece(prompt.id, cached.tokens, left, rows=rows if ring else ()),),
            strategy=RING if ring else ALONE,
            predicted_ns=round(took_ns),
        )
        placement = DecodePlacement(prompt.id, (*cached.shares, *rows), master.id, answer=answer)
        return StartPlan(steps=(step,), decode=(placement,))


def _ids(batch: DecodeBatch) -> set[InstanceId]:
    return {it.id for it in batch.instances}


def _take(unused: dict[InstanceId, int], slots: Mapping[InstanceId, int]) -> None:
    for instance, count in slots.items():
        unused[instance] -= count


def _filled(
    start: int, tokens: int, line: Sequence[InstanceId], unused: Mapping[InstanceId, int]
) -> tuple[Share, ...]:
    """Positions from `start` on, in slots of one instance after the other."""
    shares, stop = [], start + tokens
    for instance in line:
        part = min(stop - start, unused[instance])
        if part:
            shares.append(Share(instance, start, start + part))
            start += part
    return tuple(shares)
