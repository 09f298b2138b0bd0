"""An outage as clients see it: short requests all the time, and `/health` beside them."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from deployed_server import DEADLINE_S, MODEL, Deployed

PERIOD_S = 0.25
LATE_S = 3.0
"""Time after which an answer counts as late: it waited for something that was mended."""
QUIET_S = 5.0
"""Time without a late or failed answer, after which an outage is over."""
HEALTH_S = 1.0
"""Longest wait for `/health`."""


@dataclass(frozen=True)
class Probe:
    """A short greedy request. Times are `time.monotonic()`."""

    sent: float
    done: float
    text: str
    """The answer; empty if the request failed."""
    failure: str


class Outage:
    """A client that asks a few times a second, as long as the context is open."""

    def __init__(self, server: Deployed, prompt: list[int], tokens: int) -> None:
        self._url = server.url
        self._body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.probes: list[Probe] = []
        self.green: list[float] = []
        """When `/health` said that a request would be served."""
        self._pending: dict[float, asyncio.Task[None]] = {}
        self._began = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_on()))

    def __enter__(self) -> Self:
        """Ask until the first answer is there."""
        self._thread.start()
        self._wait(lambda: any(map(self._good, self.probes)), "no answer before the fault")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)

    def begin(self) -> None:
        """Note that the fault happens now."""
        self._began = time.monotonic()

    def recovered(self) -> float:
        """Wait until the outage is over; return how long it took until answers came again."""
        self._wait(self._is_over, "no end of the outage")
        since = [probe for probe in self.probes if probe.done > self._began]
        last_bad = max((probe.sent for probe in since if not self._good(probe)), default=None)
        if last_bad is None:
            return 0.0
        good = (probe.done for probe in since if not probe.failure and probe.sent >= last_bad)
        return min(good) - self._began

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now - self._began < QUIET_S + LATE_S:
            return False
        pending = [now - sent for sent in list(self._pending)]
        lately = [probe for probe in self.probes if probe.done > now - QUIET_S]
        return (
            len(lately) > QUIET_S / PERIOD_S / 2
            and all(map(self._good, lately))
            and max(pending, default=0.0) <= LATE_S
        )

    def _good(self, probe: Probe) -> bool:
        return not probe.failure and probe.done - probe.sent <= LATE_S

    def longest_s(self) -> float:
        """Return how long the last of all requests had to wait for its answer."""
        return max(probe.done - probe.sent for probe in self.probes if not probe.failure)

    def red_s(self) -> float:
        """Return the longest time since the fault in which `/health` was not green."""
        times = [self._began, *(at for at in self.green if at > self._began)]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    @property
    def failed(self) -> list[Probe]:
        return [probe for probe in self.probes if probe.failure]

    def lies(self) -> list[Probe]:
        """Return the requests that failed though they were sent after `/health` had been green,
        since the fault: what a dead process had been sent is lost with it."""
        since = self._began + HEALTH_S  # the last answers of what froze were under way
        first = min((at for at in self.green if at > since), default=math.inf)
        return [probe for probe in self.failed if probe.sent > first]

    def check_health_was_honest(self) -> None:
        """Assert that `/health` was not green while requests failed."""
        lies = self.lies()
        assert not lies, f"/health was green, but {lies}"

    def check_tokens(self, expected: str) -> None:
        """Assert that whatever was answered is right."""
        wrong = {probe.text for probe in self.probes if not probe.failure} - {expected}
        assert not wrong, f"{wrong}, not {expected!r}"

    def _wait(self, condition: Any, otherwise: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{otherwise}: {self.probes[-3:]}"
            time.sleep(PERIOD_S / 5)

    async def _ask_on(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=DEADLINE_S, limits=limits
        ) as client:
            watching = asyncio.create_task(self._watch(client))
            while not self._over.is_set():
                sent = time.monotonic()
                self._pending[sent] = asyncio.create_task(self._ask(client, sent))
                await asyncio.sleep(PERIOD_S)
            watching.cancel()
            await asyncio.gather(*self._pending.values(), return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, sent: float) -> None:
        text, failure = "", ""
        try:
            answer = await client.post("/v1/completions", json=self._body)
            if answer.status_code == httpx.codes.OK:
                text = answer.json()["choices"][0]["text"]
            else:
                failure = f"{answer.status_code}: {answer.text}"
        except httpx.HTTPError as error:
            failure = repr(error)
        self.probes.append(Probe(sent, time.monotonic(), text, failure))
        del self._pending[sent]

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            try:
                answer = await client.get("/health", timeout=HEALTH_S)
                if answer.status_code == httpx.codes.OK:
                    self.green.append(time.monotonic())
            except httpx.HTTPError:
                pass
            await asyncio.sleep(PERIOD_S)
