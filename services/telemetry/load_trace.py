"""Record what a server was asked for, as a trace of requests: `telemetry.request_trace`.

A line has the format of load tests and of the simulator (`docs/simulator.md`): lengths, times,
conversations, objectives and a number for every 512 tokens of a prompt. It has no text. The numbers
are hashes under a key that nobody learns, so that no text can be looked up by its number either.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from csps.protocols.core.errors import ConfigError
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec, SloBounds

_log = logging.getLogger(__name__)

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that a number stands for, as in Mooncake's traces."""
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size at which a file becomes `NAME.1`, in place of an older one."""
MAX_SESSIONS = 65_536
"""Conversations that are remembered. A turn of a forgotten one is a first turn."""
NUMBER_BYTES = 6
"""Bytes of a number: any JSON reader can hold so many digits."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class LoadTrace:
    """Writes a line for each request that ends; rejected requests have none.

    A later turn of a conversation has the time that its client took since the answer before, and no
    time of its own: on a faster server it would have come sooner.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Begin a file. One that is there becomes `NAME.1`.

        Raises:
            ConfigError: the file cannot be written there.
        """
        self._path, self._max_bytes = path, max_bytes
        self._key = secrets.token_bytes(32)
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            if error.errno not in DISK_FULL:
                reason = f"telemetry.request_trace: {error.strerror}: {path}"
                raise ConfigError(reason) from None
            self._give_up(error)

    def _begin(self) -> None:
        """Begin a file, and with it time and conversations."""
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._bytes = 0
        self._began_s = time.monotonic()
        self._ends_s: OrderedDict[str, float] = OrderedDict()
        """Time of the last answer's end, by conversation."""

    def close(self) -> None:
        """Close the file; later requests are not recorded."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def record(self, handle: RequestHandle) -> None:
        """Write the line of a request that has ended."""
        if self._fd < 0:
            return
        try:
            if self._bytes >= self._max_bytes:
                self._rotate()
            line = json.dumps(dict(self._row(handle)), separators=(",", ":")).encode() + b"\n"
            os.write(self._fd, line)
            self._bytes += len(line)
        except OSError as error:
            self._give_up(error)

    def _rotate(self) -> None:
        # A router that drains writes on to a file that its successor has renamed.
        ours = os.fstat(self._fd)
        if not self._path.exists() or not os.path.samestat(ours, self._path.stat()):
            raise OSError(errno.EFBIG, "another router writes a file of this name")
        self.close()
        self._begin()

    def _give_up(self, error: OSError) -> None:
        self.close()
        _log.warning("requests are no longer recorded: %s: %s", error.strerror, self._path)

    def _row(self, handle: RequestHandle) -> Iterator[tuple[str, Any]]:
        spec, marks = handle.spec, handle.marks
        most, generated = spec.sampling.max_tokens, handle.timings.tokens
        ended_s = marks.ended or time.monotonic()
        whole = handle.state == "finished" and handle.finish_reason != "cancelled"
        session, delay_s = self._turn(spec, marks.submitted, ended_s)
        if delay_s is None:
            yield "timestamp", _ms(max(0.0, marks.submitted - self._began_s))
        yield "input_length", int(spec.prompt.size)
        # How long an answer would have been that its client did not wait for, nobody knows.
        yield "output_length", max(1, generated) if whole else max(1, most)
        yield "hash_ids", self._hash_ids(spec)
        if session:
            yield "session_id", session
        if delay_s is not None:
            yield "delay", _ms(delay_s)
        yield "max_tokens", max(1, most)
        if not whole:
            yield "cancel_after", _ms(ended_s - marks.submitted)
        if spec.api_key.name:
            yield "tenant", spec.api_key.name
        yield from _attention(spec)
        if slo := _bounds(spec.slo):
            yield "slo", slo
        if spec.priority:
            yield "priority", spec.priority

    def _turn(
        self, spec: RequestSpec, submitted_s: float, ended_s: float
    ) -> tuple[str, float | None]:
        """Return the conversation's name, and the seconds since the answer before, if any.

        A request that came before the answer of another one with the same name belongs to none: its
        client did not wait.
        """
        if spec.session is None:
            return "", None
        name = self._digest(spec.api_key.digest + spec.session.encode()).hex()
        before_s = self._ends_s.get(name)
        if before_s is not None and submitted_s < before_s:
            return "", None
        self._ends_s[name] = ended_s
        self._ends_s.move_to_end(name)
        if len(self._ends_s) > MAX_SESSIONS:
            self._ends_s.popitem(last=False)
        return name, None if before_s is None else submitted_s - before_s

    def _hash_ids(self, spec: RequestSpec) -> list[int]:
        """Return a number for each whole block. The prefix cache's hash of a block covers all
        tokens before it, and its owner."""
        if spec.prefix is None:
            return []
        step = max(1, HASH_BLOCK_TOKENS // spec.prefix.block)
        ends = spec.hashes[step - 1 :: step]
        return [int.from_bytes(self._digest(block)[:NUMBER_BYTES], "big") for block in ends]

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=self._key).digest()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _attention(spec: RequestSpec) -> Iterator[tuple[str, Any]]:
    """Yield what the request asked of attention, if anything."""
    if spec.csa is not None or spec.strategy is not None:
        yield "cls", spec.cls.key
    elif (asked := spec.cls.objective) is not None:
        bounds = {"max_accuracy_loss": asked.max_accuracy_loss, "max_ttft_ms": asked.max_ttft_ms}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        yield "csps", {"objective": asked.kind, **given}


def _bounds(slo: SloBounds) -> dict[str, float]:
    """Return the objectives by the names of load tests."""
    bounds = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2el": slo.e2e_ms}
    return {name: bound for name, bound in bounds.items() if bound is not None}
