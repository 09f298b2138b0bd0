"""Asks a server one thing and notes what became of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from csps.loadgen.client.answer import Answer
from csps.loadgen.client.api import Api, Said
from csps.loadgen.client.server import Server
from csps.loadgen.results.record import RequestRecord, Status
from csps.loadgen.workloads.request import Request
from csps.models.needle_prompts.questions import is_correct
from csps.models.needle_prompts.words import split_words
from csps.protocols.errors import FaultError

REQUEST_S = 600.0
"""For one whole answer, unless the user says otherwise."""


@dataclass
class Counts:
    """How far a run has got."""

    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    chunks: int = 0
    ttfts_s: list[float] = field(default_factory=list)


class Asker:
    """Keeps the clock and the records of a run."""

    def __init__(
        self,
        server: Server,
        api: Api,
        *,
        max_concurrency: int | None = None,
        request_timeout_s: float = REQUEST_S,
        name: str = "bench",
    ) -> None:
        self.records: list[RequestRecord] = []
        self.counts = Counts()
        self._server, self._api, self._name = server, api, name
        self._timeout_s = request_timeout_s
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._begin_ns = 0

    def start_clock(self) -> None:
        """From now on, times count from now."""
        self._begin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        """Since the start."""
        return time.perf_counter_ns() - self._begin_ns

    def encode(self, request: Request, number: int, said: Said | None = None) -> bytes:
        """What to send."""
        body = self._api.body(request, said)
        return self._server.encode(self._api.endpoint, body, request_id=f"{self._name}-{number}")

    async def ask(self, request: Request, scheduled_ns: int, payload: bytes) -> RequestRecord:
        """Send a request as soon as there is a place for it; its latency counts the wait."""
        answer, error = Answer(), "withdrawn by the client"
        status: Status = "cancelled"
        sent_ns = scheduled_ns
        try:
            if self._slots is not None:
                await self._slots.acquire()
            sent_ns = self.now_ns()
            self.counts.running += 1
            try:
                error = await self._exchange(payload, answer)
                status = "failed" if error else "completed"
            finally:
                self.counts.running -= 1
                if self._slots is not None:
                    self._slots.release()
        finally:
            record = self._record(request, answer, scheduled_ns, sent_ns, status, error)
        return record

    async def _exchange(self, payload: bytes, answer: Answer) -> str:
        """What went wrong; empty if nothing."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._server.send(payload, answer.feed)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except FaultError as error:
            return str(error)
        answer.finish(status, time.perf_counter_ns())
        return answer.error

    def skip(self, request: Request) -> None:
        """A turn that cannot follow one that has no answer."""
        now_ns = self.now_ns()
        self._record(request, Answer(), now_ns, now_ns, "cancelled", "the turn before failed")

    def _record(
        self,
        request: Request,
        answer: Answer,
        scheduled_ns: int,
        sent_ns: int,
        status: Status,
        error: str,
    ) -> RequestRecord:
        done = status == "completed"
        record = RequestRecord(
            # A request may leave half a millisecond early: no answer is faster for that.
            scheduled_ns=min(scheduled_ns, sent_ns),
            sent_ns=sent_ns,
            chunk_ns=tuple(ns - self._begin_ns for ns in answer.chunk_ns),
            finished_ns=answer.end_ns - self._begin_ns if done else self.now_ns(),
            input_tokens=answer.usage.get("prompt_tokens") or request.input_length,
            output_tokens=answer.usage.get("completion_tokens") or len(answer.chunk_ns),
            status=status,
            error=error,
            correct=self._is_right(request, answer) if done else None,
            objective=request.objective,
            text=answer.text,
        )
        self.records.append(record)
        self._count(record)
        return record

    def _is_right(self, request: Request, answer: Answer) -> bool | None:
        if request.answer is None:
            return None
        if not self._api.ignore_eos:
            return is_correct(request.answer, answer.text)
        # What was generated beyond the end of the sequence is nobody's answer.
        expected, found = (split_words(text.strip()) for text in (request.answer, answer.text))
        return found[: len(expected)] == expected

    def _count(self, record: RequestRecord) -> None:
        counts = self.counts
        counts.chunks += len(record.chunk_ns)
        if record.completed:
            counts.completed += 1
            counts.ttfts_s.append(record.ttft_s)
        elif record.status == "failed":
            counts.failed += 1
        else:
            counts.cancelled += 1
