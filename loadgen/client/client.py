"""Sends requests in the format of the OpenAI API and records their outcomes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from csps.loadgen.client.connection import Server
from csps.loadgen.results.record import RequestRecord, Status
from csps.loadgen.workloads.request import WorkloadRequest
from csps.models.needle_prompts.haystack import is_correct
from csps.models.needle_prompts.words import split_words
from csps.protocols.core.errors import FaultError

_log = logging.getLogger(__name__)

ENDPOINTS: dict[str, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
    "csps": "/v1/completions",
}


@dataclass(frozen=True, kw_only=True)
class RequestFormat:
    """Format of the requests of a run."""

    model: str
    endpoint: str = ENDPOINTS["openai"]
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Return whether prompts are messages."""
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    def body(self, request: WorkloadRequest, transcript: Transcript | None = None) -> bytes:
        """Return the JSON of a request, with earlier turns in front."""
        transcript = transcript or Transcript()
        prompt = request.prompt or ""
        fields: dict[str, Any] = {
            "model": self.model,
            **(
                {"messages": transcript.messages(prompt)}
                if self.chat
                else {"prompt": transcript.text + prompt}
            ),
            "max_completion_tokens" if self.chat else "max_tokens": request.output_length,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if request.objective is not None:
            fields["csps"] = request.objective.body()
        return json.dumps(fields | self.extra_body).encode()


@dataclass(kw_only=True)
class Transcript:
    """A conversation so far."""

    turns: list[tuple[str, str]] = field(default_factory=list)
    """Prompts and their answers."""

    @property
    def text(self) -> str:
        """Return the text of all turns, for completions."""
        return "".join(f"{prompt}{answer}\n" for prompt, answer in self.turns)

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """Return the messages of all turns and of the next prompt, for chats."""
        roles = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*roles, {"role": "user", "content": prompt}]


_DATA = b"data:"
_DONE = b"[DONE]"
MAX_ERROR = 300
"""Most characters of an error body that are stored."""


class TimedAnswer:
    """Parses the body of a chat or text completion, streamed or whole."""

    def __init__(self) -> None:
        self.chunk_ns: list[int] = []
        """Time of each chunk with text; of the last chunk if none has text."""
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.error = ""
        self.ended = False
        """True if the server has ended the stream."""
        self._ended_ns = 0
        self._rest = b""
        self._whole = bytearray()
        """A body that is one JSON object."""

    def feed(self, body: bytes, read_ns: int) -> None:
        """Parse a part of the body, which may end anywhere."""
        if self._whole or (not self._rest and body.startswith(b"{")):
            self._whole += body
            return
        if self._rest:
            body = self._rest + body
        # Lines, not events: what follows `data:` is one JSON object on one line.
        *lines, self._rest = body.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip(), read_ns)

    def finish(self, status: int, read_ns: int) -> None:
        """Parse the end of the body and set the error, if any."""
        whole = bytes(self._whole) or self._rest
        if status != 200:
            message = _message(whole)
            self.error = f"HTTP {status}" + (f": {message}" if message else "")
        elif self._whole:
            self._take(whole, read_ns)
            self.ended = True
        if not self.chunk_ns and self._ended_ns:
            self.chunk_ns.append(self._ended_ns)
        if not self.error and not (self.ended and self.chunk_ns):
            self.error = "the stream ended early"

    @property
    def end_ns(self) -> int:
        """Return the time of the last token, which may have no text (end of sequence)."""
        return max(self._ended_ns, self.chunk_ns[-1])

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(self.texts)

    def _take(self, data: bytes, read_ns: int) -> None:
        if data == _DONE:
            self.ended = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = f"error event: {_error_message(chunk['error'])}"
                return
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, read_ns)
            if usage := chunk.get("usage"):
                self.usage = usage
        except (ValueError, TypeError, AttributeError):
            self.error = f"not a completion: {data[:MAX_ERROR]!r}"

    def _take_choice(self, choice: dict[str, Any], read_ns: int) -> None:
        delta = choice.get("delta") or choice.get("message") or choice
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("text")
        if text:
            self.chunk_ns.append(read_ns)
            self.texts.append(text)
        if choice.get("finish_reason"):
            self._ended_ns = read_ns


def _message(body: bytes) -> str:
    """Return the message of an error body."""
    try:
        return _error_message(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body[:MAX_ERROR].decode(errors="replace")


def _error_message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR]


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9


REQUEST_S = 600.0
"""Default time limit of a whole answer."""


@dataclass
class RequestCounts:
    """Progress of a run."""

    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    chunks: int = 0
    ttfts_s: list[float] = field(default_factory=list)


class LoadClient:
    """Sends requests, and keeps the clock and the records of a run."""

    def __init__(
        self,
        server: Server,
        api: RequestFormat,
        *,
        max_concurrency: int | None = None,
        request_timeout_s: float = REQUEST_S,
        name: str = "bench",
    ) -> None:
        self.records: list[RequestRecord] = []
        self.counts = RequestCounts()
        self._server, self._api, self._name = server, api, name
        self._timeout_s = request_timeout_s
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._begin_ns = 0

    def start_clock(self) -> None:
        """Start the run's clock."""
        self._begin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        """Return the time since the start of the clock."""
        return time.perf_counter_ns() - self._begin_ns

    def encode(
        self, request: WorkloadRequest, number: int, transcript: Transcript | None = None
    ) -> bytes:
        """Return the bytes of a request."""
        body = self._api.body(request, transcript)
        return self._server.encode(self._api.endpoint, body, request_id=f"{self._name}-{number}")

    async def ask(
        self, request: WorkloadRequest, scheduled_ns: int, payload: bytes
    ) -> RequestRecord:
        """Send a request when a slot is free; its latency includes the wait."""
        answer, error = TimedAnswer(), "cancelled by the client"
        status: Status = "cancelled"
        sent_ns = scheduled_ns
        try:
            if self._slots is not None:
                await self._slots.acquire()
            sent_ns = self.now_ns()
            self.counts.running += 1
            try:
                async with asyncio.timeout(_seconds(request.leaves_after_ns)):
                    error = await self._exchange(payload, answer)
                status = "failed" if error else "completed"
            except TimeoutError:
                pass  # the client gave up, as the workload says
            finally:
                self.counts.running -= 1
                if self._slots is not None:
                    self._slots.release()
        finally:
            record = self._record(request, answer, scheduled_ns, sent_ns, status, error)
        return record

    async def _exchange(self, payload: bytes, answer: TimedAnswer) -> str:
        """Send a request and return its error, or an empty string."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._server.send(payload, answer.feed)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except FaultError as error:
            return str(error)
        answer.finish(status, time.perf_counter_ns())
        return answer.error

    def skip(self, request: WorkloadRequest) -> None:
        """Record a turn as cancelled because the previous turn failed."""
        now_ns = self.now_ns()
        self._record(
            request, TimedAnswer(), now_ns, now_ns, "cancelled", "the previous turn failed"
        )

    def _record(
        self,
        request: WorkloadRequest,
        answer: TimedAnswer,
        scheduled_ns: int,
        sent_ns: int,
        status: Status,
        error: str,
    ) -> RequestRecord:
        done = status == "completed"
        record = RequestRecord(
            # A request may leave half a millisecond early. Its latencies count from then.
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
            slo=request.slo,
            text=answer.text,
        )
        self.records.append(record)
        if not done:
            due_s = record.scheduled_ns / 1e9
            _log.debug("request due at %.3f s: %s: %s", due_s, status, error)
        self._count(record)
        return record

    def _is_right(self, request: WorkloadRequest, answer: TimedAnswer) -> bool | None:
        if request.answer is None:
            return None
        if not self._api.ignore_eos:
            return is_correct(request.answer, answer.text)
        # With ignore_eos, text beyond the end of the sequence does not count.
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
