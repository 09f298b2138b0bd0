"""A stand-in for the request service: answers what a test scripted, when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from csps.models.tokenizer import Tokenizer
from csps.protocols.tokens import TokenDrawn, TokenLogprob
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.router.slo import Slo
from csps.services.scheduling.fit import Fit


class FakeService:
    """Draws `answer`'s tokens one after another, then ends with "stop" or at `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, answer: str) -> None:
        self.script = tokenizer.encode(answer, add_special_tokens=False)
        self.eos = tokenizer.eos_token_ids[0]
        self.generations: list[Generation] = []
        self.running: list[Running] = []
        self.submitted = asyncio.Event()
        self.cancelled = asyncio.Event()
        """A request was withdrawn."""
        self.refusal: Exception | None = None
        """Raised by `submit`."""
        self.failure: Exception | None = None
        """What a request fails with after `fail_after` tokens."""
        self.fail_after = 0
        self.gate: asyncio.Event | None = None
        """No token before it is set."""
        self.burst = 1
        """Tokens that come together."""
        self.turns: asyncio.Semaphore | None = None
        """Taken before each burst."""
        self.trouble = ""
        self.fit: Fit | None = None

    def check_room(self, slo: Slo) -> None:
        """There is always room, unless `submit` says otherwise."""

    def submit(self, generation: Generation) -> Running:
        if self.refusal is not None:
            raise self.refusal
        running = Running(generation, number=len(self.running), on_cancel=self._cancel)
        self.generations.append(generation)
        self.running.append(running)
        self.submitted.set()
        self._task = asyncio.ensure_future(self._draw(running))
        return running

    @property
    def ready(self) -> bool:
        return not self.trouble

    async def _draw(self, running: Running) -> None:
        if self.gate is not None:
            await self.gate.wait()
        for index, token in enumerate(self._tokens(running.generation)):
            if index % self.burst == 0:
                await self._turn()
            if self.failure is not None and index == self.fail_after:
                return running.fail(self.failure)
            if running.ended:
                return None
            running.deliver(token)
            if token.finish_reason is not None:
                return running.finish(token.finish_reason)
        return None

    async def _turn(self) -> None:
        await (asyncio.sleep(0) if self.turns is None else self.turns.acquire())

    def _tokens(self, generation: Generation) -> Sequence[TokenDrawn]:
        limit = generation.sampling.max_tokens
        ids = [*self.script, self.eos][:limit]
        return [self._drawn(index, ids, generation) for index in range(len(ids))]

    def _drawn(self, index: int, ids: list[int], generation: Generation) -> TokenDrawn:
        alternatives = generation.sampling.logprobs
        last = index == len(ids) - 1
        return TokenDrawn(
            rid=1,
            index=index,
            token=ids[index],
            finish_reason=("stop" if ids[index] == self.eos else "length") if last else None,
            logprob=None if alternatives is None else -0.5,
            top_logprobs=tuple(
                TokenLogprob(token=ids[index] + shift, logprob=-0.5 - shift)
                for shift in range(alternatives or 0)
            ),
        )

    def _cancel(self, running: Running) -> None:
        running.finish(running.finish_reason or "cancelled")
        if running.finish_reason == "cancelled":
            self.cancelled.set()
