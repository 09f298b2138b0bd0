"""Where bodies are parsed: small ones on threads, large ones in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import Any

from csps.protocols.core.errors import DeadlineExceeded, InvalidRequest, from_wire
from csps.protocols.rpc.schema import pack, unpack
from csps.services.http import parser_process
from csps.services.http.body_parser import (
    BodyParser,
    Endpoint,
    NeedsProcess,
    ParsedBody,
    Question,
    ServedModel,
)
from csps.services.http.errors import PayloadTooLarge
from csps.services.http.parser_process import LENGTHS, ParseCall, frame, message_of

_log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 64 * 1024
"""Some 16,000 tokens. No single call holds the interpreter for more than 5 ms over such a body."""
THREADS = 2
PROCESSES = 2
HUGE_BODY_BYTES = 8 * 2**20
"""Larger bodies, of some two million tokens, are parsed one at a time: one may take a process's
whole memory, and others would wait behind two of them."""
MEMORY_BYTES = 2**29
"""Limit of a process's memory, beyond what it has at its start. A prompt of 32 MiB takes 300 MiB as
ids and less as text; a list of as many bytes of `{},` would take 900 MiB."""
RETAINED_BYTES = MEMORY_BYTES // 4
"""A process that keeps more between two bodies is replaced."""
MEMORY_PERIOD_S = 0.05
"""Interval at which the limit is checked. The kernel's own limits would not do: a parser that gets
no memory hangs while it tries to say so."""
PARSE_DEADLINE_S = 30.0
"""Limit for one body in a process. A prompt of a million tokens takes six seconds."""
STUCK_S = 5.0
"""Time without processor time in the middle of a body, after which a process is replaced."""
START_DEADLINE_S = 60.0
END_DEADLINE_S = 10.0
CANCELLED_PARSE_S = 1.0
"""How long a process may go on with a body whose client has gone. Killing it at once would cost
more than most bodies do: a new process takes half a second of a processor to start."""
TOO_LARGE = "The request body takes too much memory to parse."
TOO_DEEP = (
    "The request body cannot be parsed: something in it, such as a grammar, nests too deeply."
)
_SLICE_BYTES = 256 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ParserPool:
    """Parses bodies for the event loop without holding it up.

    Small bodies are parsed on threads of its own. Large ones, and those with a grammar or a chat
    template of their own, wait in line for a process, where they delay each other and no short
    request.
    """

    def __init__(self, parser: BodyParser, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._parser = parser
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="parser")
        self._processes = [_ParserProcess(parser.model, memory_bytes) for _ in range(PROCESSES)]
        self._idle = list(self._processes)
        self._line, self._huge = asyncio.Semaphore(PROCESSES), asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start the processes ahead of the first large body."""
        await asyncio.gather(*(process.start() for process in self._processes))

    async def close(self) -> None:
        """Start no more work, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            await process.end()

    async def parse(self, endpoint: Endpoint, body: bytes, owner: bytes) -> ParsedBody:
        """Return `BodyParser.parse` of the same arguments.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
            PayloadTooLarge: parsing takes more memory than a process may have.
            DeadlineExceeded: parsing takes too long.
        """
        if len(body) <= SMALL_BODY_BYTES:
            with suppress(NeedsProcess):
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._parser.parse, endpoint, body, owner
                )
        answer = await self._in_process(ParseCall(endpoint=endpoint, owner=owner), body)
        return unpack(ParsedBody, answer["parsed"])

    async def answer(self, question: Question, body: bytes) -> bytes:
        """Return `BodyParser.answer` of the same arguments; errors are those of `parse`."""
        if len(body) <= SMALL_BODY_BYTES:
            with suppress(NeedsProcess):
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._parser.answer, question, body
                )
        found: bytes = (await self._in_process(ParseCall(question=question), body))["answer"]
        return found

    async def _in_process(self, call: ParseCall, body: bytes) -> dict[str, Any]:
        """Return a process's answer to a call."""
        async with AsyncExitStack() as turn:
            if len(body) > HUGE_BODY_BYTES:
                await turn.enter_async_context(self._huge)
            await turn.enter_async_context(self._line)
            work = self._begin(self._parse(self._idle.pop(), call, body, turn.pop_all()))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(CANCELLED_PARSE_S, work.cancel)
            raise

    async def _parse(
        self, process: _ParserProcess, call: ParseCall, body: bytes, turn: AsyncExitStack
    ) -> dict[str, Any]:
        try:
            try:
                return await process.parse(call, body)
            except _ProcessEnded as ended:
                # Whatever has ended it was no fault of this body, unless it happens again.
                _log.warning("%s; its body is parsed again", ended)
                return await process.parse(call, body)
        except _ProcessEnded as ended:
            raise ended.error from None
        finally:
            if not process.usable:
                await process.end()
                self._begin(process.start())
            self._idle.append(process)
            await turn.aclose()

    def _begin(self, work: Coroutine[Any, Any, dict[str, Any] | None]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits for it has it as well


class _ProcessEnded(RuntimeError):
    """A process has ended in the middle of a body, and was not ended because of it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a parser's process ended with status {status}")
        self.error: Exception = RuntimeError(str(self))
        """What the client gets if it happens again."""
        if status == -signal.SIGKILL:  # by the kernel, which ran out of memory
            self.error = PayloadTooLarge(TOO_LARGE)
        elif status in (-signal.SIGSEGV, -signal.SIGABRT):  # its stack overflowed
            self.error = InvalidRequest(TOO_DEEP)


class _ParserProcess:
    """One process; it is started when it is needed, and again after it has ended."""

    def __init__(self, model: ServedModel, memory_bytes: int) -> None:
        self._model, self._memory_bytes = model, memory_bytes
        self._changing = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._in_call = False
        self._overgrown = False
        self._at_start_bytes = 0

    @property
    def usable(self) -> bool:
        """Return whether the process waits for a call, with enough memory left for it."""
        alive = self._process is not None and self._process.poll() is None
        ready = alive and self._reader is not None and not self._in_call
        return ready and self._taken_bytes() <= RETAINED_BYTES

    @property
    def pid(self) -> int | None:
        """Return the process's id; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready.

        Raises:
            DeadlineExceeded: it was not ready in time.
            RuntimeError: it ended instead; its reason is in the router's log.
        """
        async with self._changing:
            if self.usable:
                return
            await self._end()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = _spawn(theirs)
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    self._reader, self._writer = await asyncio.open_connection(sock=ours)
                    await self._exchange(pack(self._model), b"")
                    self._at_start_bytes += self._taken_bytes()
            except TimeoutError:
                await self._end()
                raise DeadlineExceeded("the start of a parser", START_DEADLINE_S) from None
            except Exception as error:
                _log.warning("a parser's process did not start: %s", error)
                raise

    async def parse(self, call: ParseCall, body: bytes) -> dict[str, Any]:
        """Parse a body; the process is not usable if this fails with anything but a refusal.

        Raises:
            _ProcessEnded: it ended, or hung and was killed.
        """
        await self.start()
        watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.timeout(PARSE_DEADLINE_S):
                answer = await self._exchange(pack(call), body)
        except TimeoutError:
            raise DeadlineExceeded("parsing a request body", PARSE_DEADLINE_S) from None
        except _ProcessEnded:
            if self._overgrown:
                raise PayloadTooLarge(TOO_LARGE) from None
            raise
        finally:
            watching.cancel()
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer

    async def _watch(self) -> None:
        """Kill the process if it takes too much memory, or hangs."""
        ticks, since = self._processor_ticks(), time.monotonic()
        while self._taken_bytes() <= self._memory_bytes:
            await asyncio.sleep(MEMORY_PERIOD_S)
            before, ticks = ticks, self._processor_ticks()
            if ticks != before:
                since = time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                break
        else:
            self._overgrown = True
        self.kill()

    def _processor_ticks(self) -> int:
        """Return the processor time that the process has used, in the kernel's unit."""
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                # "pid (name) state ...", and a name may hold anything.
                user, system = stat.read().rpartition(")")[2].split()[11:13]
        except OSError:  # it has ended
            return 0
        return int(user) + int(system)

    def _taken_bytes(self) -> int:
        """Return the memory that the process has, beyond what it had at its start."""
        try:
            with open(f"/proc/{self.pid}/statm") as sizes:
                return int(sizes.read().split()[1]) * _PAGE_BYTES - self._at_start_bytes
        except OSError:  # it has ended
            return 0

    def kill(self) -> None:
        """End the process at once; a call of it fails."""
        if self._process is not None:
            self._process.kill()

    async def end(self) -> None:
        """End the process, and wait until it is gone."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        self.kill()
        if self._writer is not None:
            self._writer.close()
        await self._status()
        self._process = self._reader = self._writer = None
        self._in_call, self._overgrown, self._at_start_bytes = False, False, 0

    async def _exchange(self, message: dict[str, Any], body: bytes) -> dict[str, Any]:
        assert self._reader is not None, "the process is not started"
        assert self._writer is not None, "the process is not started"
        self._in_call = True
        try:
            self._writer.write(frame(message, len(body)))
            # In slices: the transport would copy all at once what the socket does not take.
            for start in range(0, len(body), _SLICE_BYTES):
                self._writer.write(memoryview(body)[start : start + _SLICE_BYTES])
                await self._writer.drain()
            answer_bytes, _ = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
            answer = await self._reader.readexactly(answer_bytes)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _ProcessEnded(await self._status()) from None
        self._in_call = False
        return message_of(answer)

    async def _status(self) -> int:
        """Return the exit status of a process that ends, or was killed."""
        if self._process is None:
            return 0
        try:
            return await asyncio.to_thread(self._process.wait, END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)


def _spawn(link: socket.socket) -> subprocess.Popen[bytes]:
    one_thread = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", parser_process.__name__],
        stdin=link.fileno(),
        env={**os.environ, **one_thread, **path},
    )
