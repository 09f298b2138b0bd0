"""Piggybacked prefill: prompts are computed in the iterations in which others decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gang_driver import Request, prefill_step, prompt_of, slices_at
from gang_threads import elastic_cell, eventually, thread_cell
from greedy_reference import greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from piggyback_requests import piggyback, reserve_piggybacked
from property_examples import examples

from csps.protocols.gang.messages import Sampling


def greedy(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens)


@dataclass(frozen=True)
class Rider:
    """A prompt, how it is cut over the instances, and how long its answer is."""

    length: int
    cuts: tuple[int, ...]
    """Bounds of the shares, as percentages of the prompt."""
    master: int
    tokens: int
    rides: bool
    generated_tokens: int = 0
    """Tokens of the answer that an earlier attempt has sampled."""

    def request(self, sequence_id: int, instances: int) -> Request:
        bounds = sorted(cut * self.length // 100 for cut in self.cuts[: instances - 1])
        prompt = prompt_of(self.length, sequence_id)
        return Request(
            sequence_id=sequence_id,
            prompt=prompt,
            slices=slices_at([0, *bounds, self.length], range(instances)),
            master=self.master % instances,
            sampling=greedy(self.tokens + self.generated_tokens),
            generated_tokens=tuple(prompt[self.length - self.generated_tokens :].tolist())
            if self.generated_tokens
            else (),
        )


async def check_answers(
    model: Path, piggybacked_requests: Sequence[Rider], *, instances: int, tp: int, budget: int
) -> None:
    async with thread_cell(model, prefill=1, decode=instances, decode_tp=tp) as cell:
        requests = [
            sequence.request(sequence_id, instances)
            for sequence_id, sequence in enumerate(piggybacked_requests, 1)
        ]
        for piggybacked_request, request in zip(piggybacked_requests, requests, strict=True):
            if piggybacked_request.rides:
                await reserve_piggybacked(cell, request)
                piggyback(cell, request, budget)
            else:
                await cell.reserve(request)
                cell.submit(prefill_step([request.chunk()], [0]), request.prompt)
                await cell.join(request)
        for piggybacked_request, request in zip(piggybacked_requests, requests, strict=True):
            await cell.until(lambda sequence_id=request.sequence_id: cell.finished(sequence_id))
            first = cell.samples(request.sequence_id)[0].index
            assert first == piggybacked_request.generated_tokens
            expected = greedy_tokens(model, request.prompt.tolist(), piggybacked_request.tokens)
            assert cell.tokens(request.sequence_id) == expected
        await cell.freed(*(sequence.sequence_id for sequence in requests))
        await cell.prefilled(*cell.steps)
        cell.check_idle()


RIDERS = st.builds(
    Rider,
    length=st.integers(2, 60),
    cuts=st.tuples(*[st.integers(0, 100)] * 2),
    master=st.integers(0, 2),
    tokens=st.integers(1, 6),
    rides=st.booleans(),
)


@pytest.mark.parametrize("tp", [1, 2])
def test_any_mixture_gives_the_tokens_of_the_model(tiny_llama: Path, tp: int) -> None:
    @settings(max_examples=examples(6))
    @given(st.lists(RIDERS, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 40))
    def check(piggybacked_requests: list[Rider], instances: int, budget: int) -> None:
        asyncio.run(
            check_answers(
                tiny_llama, piggybacked_requests, instances=instances, tp=tp, budget=budget
            )
        )

    check()


async def test_a_piggybacked_prompt_may_be_stored_elsewhere_than_its_master(
    tiny_llama: Path,
) -> None:
    piggybacked_request = Rider(50, (100, 100), master=1, tokens=5, rides=True)
    await check_answers(tiny_llama, [piggybacked_request], instances=3, tp=1, budget=7)


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_piggybacked_prompt_joins_others_that_were_computed_without_its_ranks(
    tiny_llama: Path, tp: int
) -> None:
    """What a prompt at its master leaves of the budget is known to ranks that had no part in it."""
    budget = 16
    alone = Rider(2_000, (100,), master=0, tokens=30, rides=True)
    elsewhere = Rider(700, (0,), master=1, tokens=30, rides=True)
    both = Rider(100, (50,), master=0, tokens=5, rides=True)
    async with elastic_cell(tiny_llama, 2, tp=tp) as cell:
        requests = [rider.request(at, 2) for at, rider in enumerate((alone, elsewhere, both), 1)]
        for request in requests:
            await reserve_piggybacked(cell, request)
        batches = [rank.loop.decode_batch for rank in cell.decode_gang.ranks[::tp]]
        for request, batch in zip(requests[:2], batches, strict=True):
            piggyback(cell, request, budget)
            await eventually(lambda batch=batch: batch.iterations > 2)
        piggyback(cell, requests[2], budget)
        for request, rider in zip(requests, (alone, elsewhere, both), strict=True):
            await cell.until(lambda request=request: cell.finished(request.sequence_id))
            expected = greedy_tokens(tiny_llama, request.prompt.tolist(), rider.tokens)
            assert cell.tokens(request.sequence_id) == expected
        assert batches[0].iterations != batches[1].iterations, "they never iterated apart"
        await cell.freed(1, 2, 3)
        cell.check_idle()


async def test_a_piggybacked_sequence_resumes_an_answer(tiny_llama: Path) -> None:
    """After a fault the sampled tokens are a part of the prompt."""
    piggybacked_request = Rider(30, (50, 50), master=0, tokens=4, rides=True, generated_tokens=3)
    await check_answers(tiny_llama, [piggybacked_request], instances=2, tp=1, budget=8)


async def test_a_piggybacked_prompt_delays_no_sequence_by_more_than_the_budget(
    tiny_llama: Path,
) -> None:
    """A neighbor samples a token in every iteration that computes a chunk."""
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        neighbour = Rider(10, (50,), master=1, tokens=400, rides=True).request(1, 2)
        long = Rider(300, (50,), master=0, tokens=2, rides=True).request(2, 2)
        await reserve_piggybacked(cell, neighbour)
        await reserve_piggybacked(cell, long)
        piggyback(cell, neighbour, 16)
        await cell.until(lambda: cell.tokens(1))
        piggyback(cell, long, 16)
        await cell.until(lambda: cell.tokens(2))
        order = [
            notification.sequence_id
            for notification in cell.order
            if hasattr(notification, "index")
        ]
        assert order[: order.index(2)].count(1) >= 300 // 15
        cell.cancel(1)
        await cell.freed(1, 2)
        cell.check_idle()


async def test_a_cancelled_piggybacked_sequence_leaves_nothing(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        victim = Rider(500, (50,), master=0, tokens=5, rides=True).request(1, 2)
        other = Rider(40, (50,), master=1, tokens=5, rides=True).request(2, 2)
        for request in (victim, other):
            await reserve_piggybacked(cell, request)
            piggyback(cell, request, 2)
        cell.cancel(1)
        await cell.freed(1)
        await cell.until(lambda: cell.finished(2))
        assert cell.tokens(2) == greedy_tokens(tiny_llama, np.asarray(other.prompt).tolist(), 5)
        assert not cell.tokens(1)
        await cell.freed(2)
        cell.check_idle()
