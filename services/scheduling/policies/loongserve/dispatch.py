"""Which requests are prefilled next (LoongServe §5.1, App. A).

First come, first served, as far as memory and computing allow:

- a request is taken if the instances have unused slots for its prompt, and the gang for the most
  that all its requests may ever hold: nothing is evicted, ever;
- no more are taken when the iteration would take longer than the *tipping point*, where prefill
  turns compute-bound;
- a batch that decodes is preempted for more requests only if these gain more than it loses
  (Eqs. 1-2). The oldest may need the slots of several, which then give way together or not at all.

When the oldest finds no slots, younger ones may pass it: in `max_num_ooe` rounds at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from csps.services.scheduling.policies.loongserve.jobs import DecodeBatch, Elastic, Prompt
from csps.services.scheduling.policies.loongserve.prefill_model import PrefillModel
from csps.services.scheduling.policies.loongserve.waiting import spared_ns, wait_ns


class Dispatched(NamedTuple):
    """R_p and where it may go."""

    prompts: tuple[Prompt, ...]
    preempted: tuple[DecodeBatch, ...]
    """Batches that may have to give way, in the worst case."""
    again_in_ns: int | None = None
    """When to look again at others, although nothing else happens."""


class Dispatcher:
    """One round.

    Args:
        model: times.
        future_slots: of the gang, that nobody was promised at the most that he may hold.
        average_decode_ns: AvgLat_d, how long finished requests were decoded.
        most: requests that a round takes.
        max_num_ooe: rounds in which a request may be passed.
    """

    def __init__(
        self,
        model: PrefillModel,
        *,
        future_slots: int,
        average_decode_ns: int,
        most: int,
        max_num_ooe: int,
    ) -> None:
        self._model, self._most, self._max_num_ooe = model, most, max_num_ooe
        self._average_decode_ns = average_decode_ns
        self._future = future_slots

    def dispatch(
        self, pending: Iterable[Prompt], idle: Sequence[Elastic], batches: Sequence[DecodeBatch]
    ) -> Dispatched:
        """Choose among the pending requests.

        Args:
            pending: in order of admission.
            idle: instances without KV that is decoded.
            batches: those that decode.
        """
        line = list(pending)
        taken: tuple[Prompt, ...] = ()
        dop, unused = len(idle), sum(it.unused for it in idle)
        if dop:
            taken = self._more(line, (), unused, dop)
        roomiest = sorted(batches, key=lambda it: (-it.unused, it.instances[0].order))
        preempted: list[DecodeBatch] = []
        again: list[int] = []
        for batch in roomiest:
            left = [it for it in line if it not in taken]
            more, in_ns = self._instead(left, taken, unused, dop, batch)
            again.append(in_ns)
            if more:
                taken, dop = (*taken, *more), dop + len(batch.instances)
                unused += batch.unused
                preempted.append(batch)
        if not taken and (together := _together(line, unused, roomiest)):
            taken, in_ns = self._instead(line, (), unused, dop, _as_one(together))
            again.append(in_ns)
            preempted = together if taken else []
        return Dispatched(taken, tuple(preempted), min(filter(None, again), default=None))

    def cost(self, prompts: Sequence[Prompt], dop: int, batch: DecodeBatch) -> float:
        """What a batch loses by one prefill iteration of its instances, per token (Eq. 1). How long
        an answer will be is unknown: what was drawn so far counts."""
        time_ns = self._model.ns([it.tokens for it in prompts], dop)
        loss = 0.0
        for request in batch.requests:
            loss += time_ns / request.drawn
        return loss

    def gain(self, prompts: Sequence[Prompt], batch: DecodeBatch) -> float:
        """What requests gain that need not wait for a batch to end, per token (Eq. 2)."""
        gained = 0.0
        for it in prompts:
            spared = spared_ns(it.waited_ns, batch.requests, self._average_decode_ns)
            gained += spared / it.tokens
        return gained

    def _instead(
        self,
        left: Sequence[Prompt],
        taken: Sequence[Prompt],
        unused: int,
        dop: int,
        batch: DecodeBatch,
    ) -> tuple[tuple[Prompt, ...], int]:
        """Who goes beside those taken if a batch gives way, and 0; or nobody, and how long until
        that is to be looked at again. By waiting they gain once the batch goes on for longer than
        was estimated; and it loses less as its answers grow: each time these are a quarter longer.
        """
        room, wider = unused + batch.unused - _tokens(taken), dop + len(batch.instances)
        more = self._more(left, taken, room, wider)
        if not more:
            return (), 0
        gain, cost = self.gain(more, batch), self.cost((*taken, *more), wider, batch)
        if gain > cost:
            return more, 0
        wait = wait_ns(batch.requests, self._average_decode_ns)
        behind = cost if wait else cost - gain
        gained_ns = wait + math.ceil(behind / sum([1 / it.tokens for it in more]))
        time_ns = round(self._model.ns([it.tokens for it in (*taken, *more)], wider))
        grown_ns = max(time_ns, min(it.executed_ns for it in batch.requests) // 4)
        return (), 1 + min(gained_ns, grown_ns)

    def _more(
        self, line: Sequence[Prompt], before: Sequence[Prompt], unused: int, dop: int
    ) -> tuple[Prompt, ...]:
        """Requests that can go beside `before`: the oldest for which there are slots, until one
        that may be passed no more, or the tipping point."""
        taken: list[Prompt] = []
        tokens = _tokens(before)
        squares = sum(it.tokens**2 for it in before)
        future = self._future - sum(it.future for it in before)
        line_of, tipping_ns = self._model.line(dop), self._model.tipping_ns(dop)
        for prompt in line:
            if len(before) + len(taken) >= self._most:
                break
            if prompt.tokens > unused or prompt.future > future:
                if prompt.passed >= self._max_num_ooe:
                    break
                continue
            tokens, squares = tokens + prompt.tokens, squares + prompt.tokens**2
            if (before or taken) and line_of.ns(tokens, squares) > tipping_ns:
                break
            taken.append(prompt)
            unused -= prompt.tokens
            future -= prompt.future
        return tuple(taken)


def _tokens(prompts: Sequence[Prompt]) -> int:
    return sum(it.tokens for it in prompts)


def _together(
    line: Sequence[Prompt], unused: int, roomiest: Sequence[DecodeBatch]
) -> list[DecodeBatch]:
    """The fewest batches that have slots for the oldest; none if one does, or if all have not."""
    missing = line[0].tokens - unused if line else 0
    chosen: list[DecodeBatch] = []
    for batch in roomiest:
        if missing <= 0:
            break
        missing -= batch.unused
        chosen.append(batch)
    return chosen if missing <= 0 and len(chosen) > 1 else []


def _as_one(batches: Sequence[DecodeBatch]) -> DecodeBatch:
    return DecodeBatch(
        instances=tuple(instance for it in batches for instance in it.instances),
        requests=tuple(request for it in batches for request in it.requests),
        context=sum(it.context for it in batches),
    )
