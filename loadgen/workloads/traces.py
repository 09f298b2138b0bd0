"""Traces of requests: Mooncake's JSONL, one request a line, and Azure's CSV.

Mooncake's fields are `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. Further
fields are those of `WorkloadRequest`: `session_id` and `delay` (ms after the answer to the turn
before) for conversations, as in Dynamo, `tenant`, `csps` (the request's objective), `slo`,
`max_tokens`, `cancel_after` (ms), `cls`, `prompt` and `answer`. A router writes the same format
(`telemetry.request_trace`).

Azure's public traces have the columns `TIMESTAMP` (date and time), `ContextTokens` and
`GeneratedTokens`.

What a reader does not know is an error that names file, line and column. A trace of which half is
dropped would be another load.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from csps.loadgen.workloads.request import RequestObjective, Slo, WorkloadRequest
from csps.models.needle_prompts.words import Count
from csps.protocols.core.errors import ConfigError, abridged, nearest

NS_PER_MS = 1_000_000
_OBJECTIVE_FIELDS = tuple(each.name for each in fields(RequestObjective))
_SLO_FIELDS = tuple(each.name for each in fields(Slo))
FIELDS = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "session_id",
    "delay",
    "tenant",
    "csps",
    "slo",
    "priority",
    "max_tokens",
    "cancel_after",
    "cls",
    "prompt",
    "answer",
)
"""Fields of a line of JSONL."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, kw_only=True)
class TraceRules:
    """What the reader of a trace can make use of."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons why fields cannot be honored, by field. Their presence is an error."""
    exact: str = ""
    """Reason why objectives that allow a loss of accuracy cannot be honored. Empty: they can."""
    ignored: Collection[str] = ()
    """Fields that the user wants to be ignored, known or not."""


ANY_FIELD = TraceRules()
"""Rules of a reader that can make use of every known field."""


def read_trace(
    path: Path, *, speedup: float = 1.0, rules: TraceRules = ANY_FIELD
) -> list[WorkloadRequest]:
    """Return all requests of a file in order of arrival.

    Args:
        path: the file; one whose first line names Azure's columns is CSV, any other JSONL. Empty
            lines are skipped.
        speedup: divisor of arrival times and delays.
        rules: fields that are refused or ignored.

    Raises:
        ConfigError: the file is malformed; the message names file, line and column.
    """
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            file.seek(0)
            read = _read_csv if first.startswith(AZURE_COLUMNS[0]) else _read_jsonl
            requests = list(read(file, path, speedup, rules))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    return _in_order(requests)


def _in_order(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the requests in order of arrival, the turns of a conversation in that of the file.

    A later turn may lack a time, and none comes before the turns before it.
    """
    begun_ns: dict[str, int] = {}
    keys = []
    for request in requests:
        at_ns = request.arrival_ns
        if request.conversation is not None:
            at_ns = max(at_ns, begun_ns.get(request.conversation, 0))
            begun_ns[request.conversation] = at_ns
        keys.append(at_ns)
    order = sorted(range(len(requests)), key=keys.__getitem__)
    return [requests[index] for index in order]


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
    # Later turns of a conversation may have no time.
    last_ns = max((request.arrival_ns for request in requests), default=0)
    span_ns = last_ns - requests[0].arrival_ns if requests else 0
    if span_ns == 0:
        return requests
    factor = (len(requests) - 1) / rate * 1e9 / span_ns
    return [replace(request, arrival_ns=round(request.arrival_ns * factor)) for request in requests]


def with_times(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the requests by time, where later turns of conversations come as if answers took none.

    For planning without decoding, which cannot know when an answer ends.
    """
    last_ns: dict[str, int] = {}
    timed = []
    for request in requests:
        at_ns = request.arrival_ns
        if (name := request.conversation) is not None:
            at_ns = last_ns[name] = max(at_ns, last_ns.get(name, 0) + request.delay_ns)
        timed.append(replace(request, arrival_ns=at_ns))
    return sorted(timed, key=lambda request: request.arrival_ns)


class _FieldError(ValueError):
    """A field is wrong; the message lacks its place."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def _place(path: Path, line: int, column_of: Callable[[str], int]) -> Iterator[None]:
    """Name file, line and column in errors of fields."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{line}:{error.colno}: {error.msg}") from None
    except _FieldError as error:
        raise ConfigError(f"{path}:{line}:{column_of(error.field)}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}:{line}:1: {error}") from None


# --- JSONL ----------------------------------------------------------------------------------------


def _read_jsonl(
    lines: Iterable[str], path: Path, speedup: float, rules: TraceRules
) -> Iterator[WorkloadRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _place(path, number, partial(_json_column, line)):
                request = _json_request(line, speedup, rules)
            yield request


def _json_request(line: str, speedup: float, rules: TraceRules) -> WorkloadRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {abridged(row)}")
    row = {name: value for name, value in row.items() if name not in rules.ignored}
    _check_known(row, FIELDS, "unknown field")
    for name, reason in rules.refused.items():
        if row.get(name) not in (None, "", [], {}):
            raise _FieldError(name, f"field '{name}': {reason}")
    objective = _objective(row.get("csps"))
    if rules.exact and objective is not None and objective.allows_loss:
        raise _FieldError("csps", f"csps: {rules.exact}")
    prompt = row.get("prompt")
    if "input_length" not in row and prompt:
        # A file with text only: the server or a tokenizer counts the tokens later.
        row["input_length"] = max(1, len(str(prompt).split()))
    return WorkloadRequest(
        arrival_ns=_ns(row, "timestamp", speedup) or 0,
        delay_ns=_ns(row, "delay", speedup) or 0,
        leaves_after_ns=_ns(row, "cancel_after", 1.0),
        input_length=_count(row, "input_length"),
        output_length=_count(row, "output_length"),
        max_tokens=_count(row, "max_tokens") if row.get("max_tokens") is not None else None,
        hash_ids=_hash_ids(row.get("hash_ids")),
        prompt=prompt,
        answer=row.get("answer"),
        objective=objective,
        slo=_slo(row.get("slo")),
        cls=str(row.get("cls") or ""),
        conversation=None if row.get("session_id") is None else str(row["session_id"]),
        tenant=str(row.get("tenant") or ""),
        priority=_whole(row, "priority") if row.get("priority") is not None else 0,
    )


def _check_known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise _FieldError(
                name, f"{what} {abridged(name)}{hint}; `--ignore-fields {name}` leaves it out"
            )


def _json_column(line: str, field: str) -> int:
    """Return the column of a field of the line's object, from 1; 1 if it is missing."""
    decoder = json.JSONDecoder()
    at = line.index("{") + 1
    while match := re.compile(r"[\s,]*(?=\")").match(line, at):
        name, end = decoder.raw_decode(line, match.end())
        if name == field:
            return match.end() + 1
        colon = re.compile(r"\s*:\s*").match(line, end)
        assert colon is not None, "the line was parsed before"
        _, at = decoder.raw_decode(line, colon.end())
    return 1


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError(name, f"'{name}' must be a number, got {abridged(value)}")
    return value


def _ns(row: Mapping[str, Any], name: str, speedup: float) -> int | None:
    """Return milliseconds as nanoseconds; None without a value."""
    if row.get(name) is None:
        return None
    milliseconds = _number(row, name)
    if not 0 <= milliseconds < float("inf"):
        raise _FieldError(name, f"'{name}' must be at least 0, got {milliseconds:g}")
    return round(milliseconds * NS_PER_MS / speedup)


def _whole(row: Mapping[str, Any], name: str) -> int:
    value = _number(row, name)
    if value != int(value):
        raise _FieldError(name, f"'{name}' must be a whole number, got {value:g}")
    return int(value)


def _count(row: Mapping[str, Any], name: str) -> int:
    value = _number(row, name)
    if value < 1 or value != int(value):
        raise _FieldError(name, f"'{name}' must be a whole number from 1 on, got {value:g}")
    return int(value)


def _hash_ids(value: Any) -> tuple[int, ...]:
    try:
        return tuple(map(int, value or ()))
    except (ValueError, TypeError):
        raise _FieldError(
            "hash_ids", f"'hash_ids' must be numbers, got {abridged(value)}"
        ) from None


def _objective(given: Any) -> RequestObjective | None:
    if not given:
        return None
    _check_part("csps", given, _OBJECTIVE_FIELDS)
    return RequestObjective(**given)


def _slo(given: Any) -> Slo | None:
    if not given:
        return None
    _check_part("slo", given, _SLO_FIELDS)
    for name in given:
        if isinstance(given[name], bool) or not isinstance(given[name], int | float):
            raise _FieldError("slo", f"slo: '{name}' must be a number, got {abridged(given[name])}")
    return Slo(**given)


def _check_part(field: str, given: Any, known: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise _FieldError(field, f"'{field}' must be an object, got {abridged(given)}")
    for name in given:
        if name not in known:
            raise _FieldError(field, f"{field}: unknown field '{name}'{nearest(name, known)}")


def _row(request: WorkloadRequest) -> Iterator[tuple[str, Any]]:
    yield "timestamp", _milliseconds(request.arrival_ns)
    yield "input_length", request.input_length
    yield "output_length", request.output_length
    yield "hash_ids", list(request.hash_ids)
    if request.delay_ns:
        yield "delay", _milliseconds(request.delay_ns)
    leaves = request.leaves_after_ns
    optional = {
        "session_id": request.conversation,
        "tenant": request.tenant or None,
        "priority": request.priority or None,
        "prompt": request.prompt,
        "answer": request.answer,
        "csps": request.objective and request.objective.body(),
        "slo": request.slo
        and {name: ms for name, ms in vars(request.slo).items() if ms is not None},
        "max_tokens": request.max_tokens,
        "cancel_after": None if leaves is None else _milliseconds(leaves),
        "cls": request.cls or None,
    }
    yield from ((name, value) for name, value in optional.items() if value is not None)


def _milliseconds(ns: int) -> int | float:
    """Return milliseconds, as an int if whole, like Mooncake."""
    return ns // NS_PER_MS if ns % NS_PER_MS == 0 else ns / NS_PER_MS


# --- CSV ------------------------------------------------------------------------------------------


def _read_csv(
    lines: Iterable[str], path: Path, speedup: float, rules: TraceRules
) -> Iterator[WorkloadRequest]:
    reader = csv.reader(lines)
    header = next(reader)
    first_ns: int | None = None
    columns = [0]
    for name in header:
        columns.append(columns[-1] + len(name) + 1)
    with _place(path, 1, lambda field: columns[header.index(field)] + 1 if field in header else 1):
        _check_known(
            (name for name in header if name not in rules.ignored), AZURE_COLUMNS, "unknown column"
        )
        for name in AZURE_COLUMNS:
            if name not in header:
                raise ValueError(f"column {name} is missing")
    for cells in reader:
        if not cells:
            continue

        def column_of(field: str, cells: list[str] = cells) -> int:
            return 1 + sum(len(cell) + 1 for cell in cells[: header.index(field)])

        with _place(path, reader.line_num, column_of):
            if len(cells) != len(header):
                raise ValueError(f"expected {len(header)} values, got {len(cells)}")
            row = dict(zip(header, cells, strict=True))
            at_ns = _date_ns(row["TIMESTAMP"])
            first_ns = at_ns if first_ns is None else first_ns
            if at_ns < first_ns:
                raise _FieldError("TIMESTAMP", f"{row['TIMESTAMP']} is before the first request")
            request = WorkloadRequest(
                arrival_ns=round((at_ns - first_ns) / speedup),
                input_length=_csv_count(row, "ContextTokens"),
                output_length=_csv_count(row, "GeneratedTokens"),
            )
        yield request


def _csv_count(row: Mapping[str, str], name: str) -> int:
    value = row[name]
    if not value.isascii() or not value.isdigit() or not int(value):
        raise _FieldError(name, f"{name} must be a whole number from 1 on, got {abridged(value)}")
    return int(value)


_SECONDS = re.compile(r"(.+?:\d\d:\d\d)(?:\.(\d{1,9}))?(\D.*)?", re.ASCII)


def _date_ns(text: str) -> int:
    """Return nanoseconds of a date like `2023-11-16 18:15:46.6805900`, with or without a zone."""
    match = _SECONDS.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        whole, fraction, zone = match.groups()
        # datetime has microseconds only, and without a zone it would take the machine's.
        seconds = datetime.fromisoformat(whole + (zone or "+00:00")).timestamp()
    except ValueError:
        raise _FieldError("TIMESTAMP", f"TIMESTAMP: no date and time: {abridged(text)}") from None
    return int(seconds) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
