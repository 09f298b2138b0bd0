"""Traces in Mooncake's JSONL format: one request a line.

The fields are `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, as in Mooncake's
published traces. Further fields are `prompt`, `answer`, `csps` (the request's objective) and
`tenant` (the client's name), and for conversations, as in Dynamo, `session_id` and `delay` (ms
after the answer to the turn before).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from csps.loadgen.workloads.request import RequestObjective, WorkloadRequest
from csps.models.needle_prompts.words import Count
from csps.protocols.core.errors import ConfigError, abridged, nearest

NS_PER_MS = 1_000_000
_OBJECTIVE_FIELDS = {field.name for field in fields(RequestObjective)}


def read_trace(path: Path, *, speedup: float = 1.0) -> list[WorkloadRequest]:
    """Return all requests of a file in order of arrival.

    Args:
        path: the file; empty lines are skipped, unknown fields ignored.
        speedup: divisor of arrival times and delays.

    Raises:
        ConfigError: the file is malformed; the message names file and line.
    """
    requests: list[WorkloadRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_read(line, f"{path}:{number}", speedup))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    # The sort is stable: turns of a conversation without times stay in the order of the file.
    return sorted(requests, key=lambda request: request.arrival_ns)


def read_sharegpt(path: Path, count: Count | None) -> list[WorkloadRequest]:
    """Return the first question and the length of the first answer of each conversation in a file
    of ShareGPT: a JSON list of objects with `conversations`.

    Questions and answers of fewer than four tokens, and questions of more than 1024 or together
    with the answer more than 2048, are left out, as other load generators do.

    Args:
        count: function that counts the tokens of a text; None counts words.

    Raises:
        ConfigError: the file is malformed.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        talks: list[list[dict[str, str]]] = [
            entry.get("conversations") or entry.get("conversation") or [] for entry in entries
        ]
        pairs = [(talk[0]["value"], talk[1]["value"]) for talk in talks if len(talk) > 1]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of ShareGPT: {error!r}") from None
    tokens = count or (lambda text: len(text.split()))
    requests = []
    for question, answer in pairs:
        asked, answered = tokens(question), tokens(answer)
        if min(asked, answered) >= 4 and asked <= 1024 and asked + answered <= 2048:
            requests.append(
                WorkloadRequest(
                    arrival_ns=0, input_length=asked, output_length=answered, prompt=question
                )
            )
    return requests


def write_trace(requests: Iterable[WorkloadRequest], path: Path) -> None:
    """Write requests; `read_trace` reads them back equal, except for fractions of a nanosecond."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dict(_row(request))) + "\n" for request in requests)


def at_rate(requests: list[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Return the requests with times stretched to an average rate in requests per second."""
    span_ns = requests[-1].arrival_ns - requests[0].arrival_ns if requests else 0
    if span_ns == 0:
        return requests
    factor = (len(requests) - 1) / rate * 1e9 / span_ns
    return [replace(request, arrival_ns=round(request.arrival_ns * factor)) for request in requests]


def _read(line: str, place: str, speedup: float) -> WorkloadRequest:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {abridged(row)}")
        prompt = row.get("prompt")
        # A file with text only: the server or a tokenizer counts the tokens later.
        input_length = row.get("input_length", max(1, len(str(prompt).split())) if prompt else None)
        return WorkloadRequest(
            arrival_ns=round(_number(row.get("timestamp", 0), "timestamp") * NS_PER_MS / speedup),
            delay_ns=round(_number(row.get("delay", 0), "delay") * NS_PER_MS / speedup),
            input_length=int(_number(input_length, "input_length")),
            output_length=int(_number(row.get("output_length"), "output_length")),
            hash_ids=tuple(map(int, row.get("hash_ids") or ())),
            prompt=prompt,
            answer=row.get("answer"),
            objective=_objective(row.get("csps")),
            conversation=None if (name := row.get("session_id")) is None else str(name),
            tenant=str(row.get("tenant") or ""),
            priority=int(_number(row.get("priority", 0), "priority")),
            slo_ttft_ms=_bound_ms(row.get("slo_ttft_ms")),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _bound_ms(value: Any) -> float | None:
    return None if value is None else _number(value, "slo_ttft_ms")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"'{name}' must be a number, got {abridged(value)}")
    return value


def _objective(fields_of: Any) -> RequestObjective | None:
    if not fields_of:
        return None
    for name in fields_of:
        if name not in _OBJECTIVE_FIELDS:
            raise ValueError(f"csps: unknown field '{name}'{nearest(name, _OBJECTIVE_FIELDS)}")
    return RequestObjective(**fields_of)


def _row(request: WorkloadRequest) -> Iterator[tuple[str, Any]]:
    yield "timestamp", _milliseconds(request.arrival_ns)
    yield "input_length", request.input_length
    yield "output_length", request.output_length
    yield "hash_ids", list(request.hash_ids)
    if request.delay_ns:
        yield "delay", _milliseconds(request.delay_ns)
    optional = {
        "session_id": request.conversation,
        "tenant": request.tenant or None,
        "priority": request.priority or None,
        "slo_ttft_ms": request.slo_ttft_ms,
        "prompt": request.prompt,
        "answer": request.answer,
        "csps": request.objective and request.objective.body(),
    }
    yield from ((name, value) for name, value in optional.items() if value is not None)


def _milliseconds(ns: int) -> int | float:
    """Return milliseconds, as an int if whole, like Mooncake."""
    return ns // NS_PER_MS if ns % NS_PER_MS == 0 else ns / NS_PER_MS
