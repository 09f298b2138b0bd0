"""Sends the requests of a workload, each at its time.

Open loop: a request is sent when it is due, however many are still under way. Closed loop: when
one of a fixed number of users is free. Latencies count from that moment, not from when the client
came round to sending.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Sequence

from csps.loadgen.client.api import Said
from csps.loadgen.client.asker import Asker
from csps.loadgen.workloads.request import Request

_EARLY_NS = 500_000
"""That a request may leave early. Timers have a resolution of a millisecond: aimed at the due time
they would be late by half of that on average, and all latencies with them."""


class Load:
    """One run."""

    def __init__(
        self,
        asker: Asker,
        requests: Sequence[Request],
        *,
        users: int | None = None,
        max_duration_s: float | None = None,
    ) -> None:
        """`users` makes it a closed loop: so many ask, each again as soon as it has its answer,
        and times of arrival are ignored."""
        self._asker, self._users = asker, users
        self._max_duration_s = max_duration_s
        self._conversations = conversations(requests)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more, and withdraw what is under way."""
        self._stopped.set()

    async def run(self) -> None:
        """Until the last answer, the time limit, or `stop`; the asker has the records."""
        # Encoded before, because 100K tokens take a millisecond.
        payloads = [self._asker.encode(it[0], number) for number, it in self._numbered()]
        gc.collect()
        gc.freeze()
        self._asker.start_clock()
        loop = self._open_loop(payloads) if self._users is None else self._closed_loop(payloads)
        tasks = [asyncio.create_task(it) for it in (loop, self._stopped.wait())]
        try:
            await asyncio.wait(
                tasks, timeout=self._max_duration_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            gc.unfreeze()
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]

    def _numbered(self) -> Iterable[tuple[int, list[Request]]]:
        return enumerate(self._conversations)

    async def _open_loop(self, payloads: list[bytes]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, turns in self._numbered():
                due_ns = turns[0].arrival_ns
                await self._until(due_ns)
                group.create_task(self._converse(turns, number, due_ns, payloads[number]))

    async def _closed_loop(self, payloads: list[bytes]) -> None:
        assert self._users is not None
        waiting = iter(self._numbered())

        async def user() -> None:
            for number, turns in waiting:
                await self._converse(turns, number, self._asker.now_ns(), payloads[number])

        async with asyncio.TaskGroup() as group:
            for _ in range(self._users):
                group.create_task(user())

    async def _until(self, due_ns: int) -> None:
        """Absolute time: what one wait is late does not delay the next."""
        while (left_ns := due_ns - self._asker.now_ns()) > _EARLY_NS:  # noqa: ASYNC110 (a clock)
            await asyncio.sleep((left_ns - _EARLY_NS) / 1e9)

    async def _converse(
        self, turns: list[Request], number: int, due_ns: int, payload: bytes
    ) -> None:
        said = Said()
        for turn, request in enumerate(turns):
            if turn:
                due_ns = max(request.arrival_ns, self._asker.now_ns() + request.delay_ns)
                payload = self._asker.encode(request, number, said)
                await self._until(due_ns)
            record = await self._asker.ask(request, due_ns, payload)
            if not record.completed:
                for skipped in turns[turn + 1 :]:
                    self._asker.skip(skipped)
                return
            said.turns.append((request.prompt or "", record.text))


def conversations(requests: Sequence[Request]) -> list[list[Request]]:
    """Turns of one conversation together; a request of none is one of its own. By arrival."""
    grouped: dict[str, list[Request]] = {}
    alone: list[list[Request]] = []
    for request in requests:
        if request.conversation is None:
            alone.append([request])
        else:
            grouped.setdefault(request.conversation, []).append(request)
    return sorted([*alone, *grouped.values()], key=lambda turns: turns[0].arrival_ns)
