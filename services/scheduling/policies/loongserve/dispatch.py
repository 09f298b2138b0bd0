"""Which requests are prefilled next (LoongServe §5.1, App. A).

First come, first served, as far as memory and computing allow:

- a request is taken if the instances have unused slots for its prompt, and the gang for the most
  that all its requests may ever hold: nothing is evicted, ever;
- no more are taken when the iteration would take longer than the *tipping point*, where prefill
  turns compute-bound;
- a batch that decodes is preempted for more requests only if these gain more than it loses
  (Eqs. 1-2).

When the oldest finds no slots, younger ones may pass it: in `max_num_ooe` rounds at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from csps.services.scheduling.policies.loongserve.jobs import DecodeBatch, Elastic, Prompt
from csps.services.scheduling.policies.loongserve.prefill_model import PrefillModel
from csps.services.scheduling.policies.loongserve.waiting import wait_ns


class Dispatched(NamedTuple):
    """R_p and where it may go."""

    prompts: tuple[Prompt, ...]
    preempted: tuple[DecodeBatch, ...]
    """Batches that may have to give way, in the worst case."""


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
        preempted: list[DecodeBatch] = []
        for batch in sorted(batches, key=lambda it: (-it.unused, it.instances[0].order)):
            left = [it for it in line if it not in taken]
            room = unused + batch.unused - sum(it.tokens for it in taken)
            wider = dop + len(batch.instances)
            more = self._more(left, taken, room, wider)
            if more and self.gain(more, batch) > self.cost((*taken, *more), wider, batch):
                taken, dop, unused = (*taken, *more), wider, unused + batch.unused
                preempted.append(batch)
        return Dispatched(taken, tuple(preempted))

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
        wait = wait_ns(batch.requests, self._average_decode_ns)
        gained = 0.0
        for prompt in prompts:
            gained += wait / prompt.tokens
        return gained

    def _more(
        self, line: Sequence[Prompt], before: Sequence[Prompt], unused: int, dop: int
    ) -> tuple[Prompt, ...]:
        """Requests that can go beside `before`: the oldest for which there are slots, until one
        that may be passed no more, or the tipping point."""
        taken: list[Prompt] = []
        tokens = sum(it.tokens for it in before)
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
