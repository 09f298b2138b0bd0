"""Recorded streams of the scheduler: events and commands in the vocabulary of the recording.

A recording names structures by their tags and values by their fields, never by their places. Code
whose names have changed since lists them in `RENAMED` and still reads and writes the same lines.

A file is gzip-compressed JSON, one value a line: the sizes, every round (its events, the wake time
that the scheduler answered, and how many commands), the first commands in full, and a SHA-256 of
every `BLOCK` commands behind them.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from csps.services.scheduling.events.commands import AnyCommand, ToGang
from csps.services.scheduling.events.events import AnyEvent

RENAMED: dict[str, str] = {
    # events
    "request_cancelled": "cancelled",
    "kv_received": "landed",
    "retained": "kept",
    "heartbeat": "heard",
    "cost_table_updated": "calibrated",
    # commands
    "JoinBatch": "ride",
    "RetainKv": "keep",
    "EvictKv": "release",
    "MoveSequence": "move_kv",
    # fields
    "request_id": "request",
    "sequence_id": "sequence",
    "step_id": "step",
    "generated_tokens": "drawn",
    "slices": "shares",
    "chunks": "pieces",
    "high_priority": "urgent",
    "piggybacked": "rides",
    "KvSlice.source": "origin",
    "reserve.message": "*",
    "run_step.step": "*",
    "to_gang.message": "*",
    "ReserveKv.retain": "stays",
    "ReserveKv.epoch": "",
    "ReserveKv.first_index": "",
    "ReserveKv.sampler": "",
    "ReserveKv.prompt": "",
    "ReserveKv.kept_only": "",
    "ReserveKv.trace": "",
    "JoinBatch.first_token": "",
    "PrefillStep.next_tokens": "",
    "PrefillStep.prompt_logprobs": "",
    "JoinBatch.instances": "",
    "MoveSequence.prompt_tokens": "",
    "MoveSequence.stop": "",
    "MoveSequence.before": "",
    "MoveSequence.after": "*",
    "MoveSequence.sampler": "",
    "MoveSequence.trace": "",
    "PrefillStep.tokens": "",
    "PrefillStep.csa": "",
    "PrefillStep.samplers": "",
    "PrefillStep.trace": "",
    "PrefillChunk.history": "^history",
    "PrefillChunk.placement": "keep",
    "PrefillChunk.retain": "stays",
    "PrefillChunk.destinations": "",
    "PrefillChunk.last": "",
    "PrefillChunk.decoded": "",
    "PrefillChunk.first_index": "",
    # fields that are newer than the recordings, in which nobody had an API key or an objective
    "submitted.tenant": "",
    "submitted.kv_permille": "",
    "submitted.priority": "",
    "submitted.promise": "",
    "request_cancelled.generated_tokens": "",
    # and in which no layers had slots of their own
    "gang_up.window": "",
    "InstanceUp.window_slots": "",
    "PrefillChunk.near_to": "",
}
"""Present names of tags and fields, and the recorded ones. `"reserve.prompt": "..."` concerns one
structure, named by its present tag, or by its class where it has no tag; `"prompt"` concerns all
others. A message to a gang is named by its class.

A field that the recording lacks is renamed to "" and left out. Where the recording has the fields
of a structure in the one around it, the structure is renamed to "*". A field that the recording has
in the structure around it, as a list with a value of each element, is renamed to "^" and that
list's name.
"""

REWORDED: dict[str, str] = {
    r"^decode instance \d+ received KV of (\d+) tokens, expected (\w+)$": (
        r"KV of \1 tokens landed on a decode instance, not \2"
    ),
    r"^step \d+ ended without the first token of sequence \d+$": (
        "a prefill step ended without its first token"
    ),
    r"\bKV transfer\b": "KV landing",
}
"""Regular expressions that turn the present texts of commands (reasons, error codes and messages)
into the recorded ones, as `re.sub` takes them."""

BLOCK = 100
"""Commands that share a digest."""

Canonical = dict[str, Any]
"""Structure as data: its tag under "event" or "command", and its fields by name."""


# --- structures ----------------------------------------------------------------------------------


def canonical_command(command: AnyCommand) -> Canonical:
    """Write a command in the recorded vocabulary."""
    named = command.message if isinstance(command, ToGang) else command
    return {"command": _kind(type(named)), **_fields(command, _reworded)}


def canonical_event(event: AnyEvent) -> Canonical:
    """Write an event in the recorded vocabulary."""
    return {"event": _kind(type(event)), **_fields(event, str)}


def event_of(data: Canonical) -> AnyEvent:
    """Make the event that `canonical_event` has written."""
    event = _made(_events()[data["event"]], data)
    return typing.cast(AnyEvent, event)


@cache
def _events() -> dict[str, type[msgspec.Struct]]:
    return {_kind(event): event for event in typing.get_args(AnyEvent)}


def forget_names() -> None:
    """Look names up again: `RENAMED` has changed."""
    _events.cache_clear()
    _names.cache_clear()


def _kind(of: type[msgspec.Struct]) -> str:
    present = _present_kind(of)
    return RENAMED.get(present, present)


def _present_kind(of: type[msgspec.Struct]) -> str:
    return str(of.__struct_config__.tag or of.__name__)


@cache
def _names(of: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """List the fields that the recording has: present name, recorded name, type."""
    kind, found = _present_kind(of), []
    for field in msgspec.structs.fields(of):
        recorded = RENAMED.get(f"{kind}.{field.name}", RENAMED.get(field.name, field.name))
        if recorded:
            found.append((field.name, recorded, field.type))
    return tuple(found)


def _fields(of: msgspec.Struct, text: Callable[[str], str]) -> Canonical:
    fields: Canonical = {}
    for name, recorded, _ in _names(type(of)):
        value = getattr(of, name)
        if recorded == "*":
            fields |= _fields(value, text)
        elif not recorded.startswith("^"):
            fields[recorded] = _plain(value, text)
            fields |= _raised(value, text)
    return fields


def _raised(value: Any, text: Callable[[str], str]) -> Canonical:
    """Collect the fields that the recording has beside the list of these structures."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct)):
        return {}
    return {
        recorded[1:]: [_plain(getattr(element, name), text) for element in value]
        for name, recorded, _ in _names(type(value[0]))
        if recorded.startswith("^")
    }


def _plain(value: Any, text: Callable[[str], str]) -> Any:
    """Turn a value into one that JSON has."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return _fields(value, text)
    if isinstance(value, dict):
        return {key: _plain(entry, text) for key, entry in value.items()}
    assert isinstance(value, list | tuple), f"{value!r} has no canonical form"
    return [_plain(entry, text) for entry in value]


def _reworded(text: str) -> str:
    for present, recorded in REWORDED.items():
        text = re.sub(present, recorded, text)
    return text


def _made(of: type[msgspec.Struct], data: Canonical) -> msgspec.Struct:
    given = {name: _value(kind, data[old]) for name, old, kind in _names(of) if old in data}
    return of(**given)


def _value(kind: Any, data: Any) -> Any:
    """Undo `_plain` for a field of this type."""
    if data is None:
        return None
    source, inner = typing.get_origin(kind), typing.get_args(kind)
    if source in (typing.Union, types.UnionType):
        (kind,) = [other for other in inner if other is not types.NoneType]
        return _value(kind, data)
    if source is tuple:
        kinds = inner[:1] * len(data) if inner[-1] is Ellipsis else inner
        return tuple(
            _value(element_kind, value) for element_kind, value in zip(kinds, data, strict=True)
        )
    if kind is bytes:
        return bytes.fromhex(data)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _made(kind, data)
    return data


# --- streams -------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Recorded round."""

    now_ns: int
    events: list[Canonical]
    wake_at_ns: int | None
    commands: int
    """Number of its commands."""


class Stream(NamedTuple):
    """Events that a scheduler got, and the commands that it answered."""

    turns: list[Turn]
    commands: list[tuple[int, Canonical]]
    """First commands, each with the number of its round."""
    digests: list[str]
    """Digests of the other commands."""


def line_of(turn: int, command: Canonical) -> bytes:
    """Write a command as digests take it."""
    return msgspec.json.encode((turn, command), order="deterministic") + b"\n"


def digest_of(lines: Sequence[bytes]) -> str:
    """Sum up the commands of a block."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def write_stream(
    path: Path, turns: Sequence[Turn], commands: Sequence[tuple[int, Canonical]], full: int
) -> None:
    """Write a stream with its first `full` commands, and digests of the rest."""
    encode = msgspec.json.Encoder(order="deterministic").encode
    rest = [line_of(*command) for command in commands[full:]]
    digests = [digest_of(rest[at : at + BLOCK]) for at in range(0, len(rest), BLOCK)]
    sizes = (len(turns), len(commands[:full]), len(digests))
    lines = [encode(sizes), *(encode(tuple(turn)) for turn in turns)]
    lines += [
        *(encode(command) for command in commands[:full]),
        *(encode(digest) for digest in digests),
    ]
    # Without a time and a name in it: equal streams, equal files.
    path.write_bytes(gzip.compress(b"\n".join(lines), mtime=0))


def read_stream(path: Path) -> Stream:
    """Read what `write_stream` has written."""
    lines: Iterator[Any] = map(msgspec.json.decode, gzip.decompress(path.read_bytes()).split(b"\n"))
    turns, commands, digests = next(lines)
    return Stream(
        turns=[Turn(*next(lines)) for _ in range(turns)],
        commands=[tuple(next(lines)) for _ in range(commands)],
        digests=[next(lines) for _ in range(digests)],
    )


# --- comparing -----------------------------------------------------------------------------------


class Follower:
    """Compares a scheduler with a stream, round by round, up to the first difference.

    Args:
        name: of the stream, for messages.
        stream: recorded events and commands.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        self._name, self._stream = name, stream
        self._turn = self._commands = 0
        self._block: list[tuple[int, Canonical]] = []
        self._begin = len(stream.commands)
        """Number of the block's first command."""
        self._digests = iter(stream.digests)

    def events(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """Compare the events of the next round, for executors that make them themselves."""
        if self._turn == len(self._stream.turns):
            self._fail("the recording ends before it")
        turn = self._stream.turns[self._turn]
        if now_ns != turn.now_ns:
            self._fail(f"the recording has it at {turn.now_ns} ns, it is {now_ns} ns")
        present = [canonical_event(event) for event in events]
        if present != turn.events:
            self._fail("other events", _differing(turn.events, present))

    def commands(self, commands: Sequence[AnyCommand], wake_at_ns: int | None) -> None:
        """Compare the scheduler's commands, and go on to the next round."""
        turn = self._stream.turns[self._turn]
        first = self._commands
        for index, command in enumerate(commands):
            self._command(canonical_command(command), extra=index >= turn.commands)
        if len(commands) != turn.commands:
            self._missing(first, turn.commands, len(commands))
        if wake_at_ns != turn.wake_at_ns:
            self._fail(f"wakes at {wake_at_ns} ns, recorded {turn.wake_at_ns} ns")
        self._turn += 1

    def end(self) -> None:
        """Assert that nothing is left of the recording."""
        if self._turn < len(self._stream.turns):
            self._fail(f"the run ends, the recording has {len(self._stream.turns)} turns")
        self._check_block()

    def _command(self, present: Canonical, *, extra: bool) -> None:
        known = self._stream.commands
        if self._commands < len(known):
            number, recorded = known[self._commands]
            if extra or number != self._turn or present != recorded:
                shown = [] if extra or number != self._turn else _differing(recorded, present)
                at = f", recorded in turn {number}" if number != self._turn else ""
                self._fail(
                    f"command {self._commands} differs",
                    [f"recorded{at}: {_shown(recorded)}", f"present: {_shown(present)}", *shown],
                )
        else:
            self._block.append((self._turn, present))
            if len(self._block) == BLOCK:
                self._check_block()
        self._commands += 1

    def _missing(self, first: int, recorded: int, present: int) -> None:
        if present > recorded:
            self._fail(f"{present} commands, recorded {recorded}")
        known = self._stream.commands[first + present : first + recorded]
        named = [f"missing: {_shown(command)}" for _, command in known]
        self._fail(f"command {first + present} is missing", named or ["kept as a digest only"])

    def _check_block(self) -> None:
        """Commands of a block are recorded as a digest: one of them differs, or none."""
        if not self._block:
            return
        if digest_of([line_of(*command) for command in self._block]) != next(self._digests, None):
            (since, _), (until, _) = self._block[0], self._block[-1]
            count, begin = len(self._block), self._begin
            self._fail(
                f"one of the {count} commands from {begin} on differs, in turns {since} to {until}",
                ["only their digest was recorded"],
            )
        self._begin += len(self._block)
        self._block.clear()

    @property
    def place(self) -> str:
        """Stream and next round, for messages."""
        at = ""
        if self._turn < len(self._stream.turns):
            turn = self._stream.turns[self._turn]
            told = ", ".join(event["event"] for event in turn.events)
            at = f" at {turn.now_ns} ns (told: {told or 'nothing'})"
        return f"{self._name}: turn {self._turn}{at}"

    def _fail(self, what: str, more: Sequence[str] = ()) -> typing.NoReturn:
        raise AssertionError("\n  ".join([f"{self.place}: {what}", *more]))


def _shown(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _differing(recorded: Any, present: Any, place: str = "") -> list[str]:
    """Name the places where two values differ, at most a few."""
    if isinstance(recorded, dict) and isinstance(present, dict):
        names = [*recorded, *(name for name in present if name not in recorded)]
        both = [
            (f".{name}", recorded.get(name, "nothing"), present.get(name, "nothing"))
            for name in names
        ]
    elif isinstance(recorded, list) and isinstance(present, list):
        if len(recorded) != len(present):
            return [f"{place}: {_shown(recorded)}, now {_shown(present)}"]
        pairs = zip(recorded, present, strict=True)
        both = [(f"[{index}]", old, other) for index, (old, other) in enumerate(pairs)]
    else:
        both = []
        if recorded != present:
            return [f"{place}: {_shown(recorded)}, now {_shown(present)}"]
    found = [line for name, old, other in both for line in _differing(old, other, place + name)]
    return found[:5]
