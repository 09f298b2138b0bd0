"""The exception tree and its journey over the wire."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core import errors
from csps.protocols.core.errors import (
    AuthenticationFailed,
    BoundNotMet,
    Cancelled,
    ConfigError,
    ConnectionLost,
    ContextLengthExceeded,
    CspsError,
    DeadlineExceeded,
    FaultError,
    GangLost,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    ProtocolMismatch,
    QueueFull,
    RanksHeld,
    RateLimited,
    RemoteError,
    RequestError,
    SloNotMet,
    Superseded,
    TransferError,
    Unauthorized,
    abridged,
    from_wire,
    nearest,
    to_wire,
)

EXAMPLES: list[CspsError] = [
    InvalidRequest("temperature: must be a number", param="temperature"),
    InvalidRequest("not JSON"),
    ContextLengthExceeded(prompt_tokens=70_000, output_tokens=16, limit=65_536, param="prompt"),
    ModelNotFound(model="gpt", served="needle"),
    BoundNotMet(ttft_ms=812.5, loss=0.02),
    Unauthorized(),
    QueueFull("32 requests wait", retry_after_s=2.5),
    RateLimited("60 requests", retry_after_s=2.0),
    SloNotMet("ttft", 812.5, retry_after_s=2.0),
    ConfigError("tp must divide the ranks"),
    GangLost("rank 2 died"),
    RanksHeld("generation 1 holds this rank"),
    Superseded("generation 2 has attached"),
    DeadlineExceeded("kv landing", 30),
    TransferError("7 of 8 tokens"),
    ConnectionLost("reset"),
    ProtocolError("no"),
    AuthenticationFailed("no"),
    Cancelled("no"),
    RemoteError("KeyError", "'x'"),
]


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def test_examples_cover_the_tree() -> None:
    families = {CspsError, RequestError, FaultError, ProtocolMismatch}
    ours = {cls for cls in subclasses(CspsError) if cls.__module__ == errors.__name__}
    assert {type(error) for error in EXAMPLES} | families == ours


def test_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    for cls in subclasses(CspsError):
        if cls.__module__ == errors.__name__:
            assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_the_wire(error: CspsError) -> None:
    back = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_mismatch_names_versions_from_the_readers_side() -> None:
    back = from_wire(to_wire(ProtocolMismatch(ours=2, theirs=1)))
    assert isinstance(back, ProtocolMismatch)
    assert (back.ours, back.theirs) == (1, 2)


def test_families() -> None:
    assert issubclass(RequestError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(FaultError, RuntimeError)


def test_context_length_message_has_both_numbers() -> None:
    error = ContextLengthExceeded(prompt_tokens=70_000, output_tokens=16, limit=65_536)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "65536" in str(error)
    assert "70016" in str(error)


def test_foreign_exceptions_travel_by_name() -> None:
    back = from_wire(to_wire(KeyError("x")))
    assert isinstance(back, RemoteError)
    assert (back.code, back.message) == ("KeyError", "'x'")


@pytest.mark.parametrize(
    "wire",
    [
        None,
        "boom",
        [1, "pynvim style"],
        {},
        {"code": "os.system", "message": "x"},
        {"code": "QueueFull", "message": "x"},
        {"code": "QueueFull", "message": "x", "data": {"nonsense": 1}},
        {"code": "QueueFull", "message": "x", "data": [1]},
        {"code": "DeadlineExceeded", "message": "x", "data": {"name": 1, "seconds": "y"}},
        {"code": ["GangLost"], "message": {}},
    ],
)
def test_malformed_errors_are_remote_errors(wire: Any) -> None:
    assert isinstance(from_wire(wire), RemoteError)


def test_a_subclass_elsewhere_crosses_the_wire_too() -> None:
    class PoolExhausted(FaultError):
        pass

    assert type(from_wire(to_wire(PoolExhausted("no slots")))) is PoolExhausted


def test_nearest() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert nearest("zzz", ["b", "a"]) == "; allowed: a, b"


@given(st.text() | st.binary() | st.integers() | st.lists(st.integers()))
def test_abridged_is_short(value: Any) -> None:
    assert len(abridged(value)) <= 65


def test_abridged_keeps_short_values() -> None:
    assert abridged("max_token") == "'max_token'"
