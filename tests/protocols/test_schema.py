"""Dataclasses to MessagePack and back, strictly."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols import messages
from csps.protocols.errors import ProtocolError
from csps.protocols.schema import pack, unpack


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    number: int
    ratio: float
    name: str
    flag: bool
    blob: bytes
    color: Color
    mode: Literal["fast", "slow", 3]
    maybe: int | None
    nested: Inner
    many: tuple[Inner, ...]
    numbers: list[int]
    floats: tuple[float, ...]
    table: dict[str, Inner]
    bias: dict[int, float]
    perhaps: Inner | None = None


int64 = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False)
inners = st.builds(Inner, size=st.integers(0, 9), tags=st.lists(st.text()).map(tuple))
outers = st.builds(
    Outer,
    number=int64,
    ratio=finite,
    color=st.sampled_from(Color),
    mode=st.sampled_from(["fast", "slow", 3]),
    maybe=st.none() | int64,
    nested=inners,
    many=st.lists(inners, max_size=3).map(tuple),
    numbers=st.lists(int64),
    floats=st.lists(finite).map(tuple),
    table=st.dictionaries(st.text(), inners, max_size=3),
    bias=st.dictionaries(int64, finite, max_size=3),
    perhaps=st.none() | inners,
)

EXAMPLE = Outer(
    number=1,
    ratio=0.5,
    name="n",
    flag=True,
    blob=b"b",
    color=Color.RED,
    mode=3,
    maybe=None,
    nested=Inner(size=1),
    many=(Inner(size=2, tags=("x",)),),
    numbers=[1],
    floats=(1.0,),
    table={"k": Inner(size=3)},
    bias={7: -1.0},
)


def over_the_wire(data: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(data), strict_map_key=False)


@given(outers)
def test_round_trip(outer: Outer) -> None:
    back = unpack(Outer, over_the_wire(pack(outer)))
    assert back == outer
    assert type(back.color) is Color
    assert type(back.many) is tuple
    assert type(back.numbers) is list


def test_integers_are_floats_where_floats_belong() -> None:
    back = unpack(Outer, {**pack(EXAMPLE), "ratio": 2})
    assert type(back.ratio) is float


WRONG: list[tuple[str, Any, str]] = [
    ("number", 1.0, "Outer.number: expected int, got 1.0"),
    ("number", True, "Outer.number: expected int, got True"),
    ("ratio", "1", "Outer.ratio: expected float"),
    ("ratio", True, "Outer.ratio: expected float"),
    ("name", b"n", "Outer.name: expected str"),
    ("flag", 1, "Outer.flag: expected bool"),
    ("blob", "b", "Outer.blob: expected bytes"),
    ("color", "green", "Outer.color: expected one of 'red', 'blue', got 'green'"),
    ("mode", 3.0, "Outer.mode: expected one of 'fast', 'slow', 3"),
    ("mode", [], "Outer.mode: expected one of"),
    ("maybe", "x", "Outer.maybe: expected int"),
    ("nested", None, "Outer.nested: expected map, got None"),
    ("nested", {"size": "1", "tags": []}, "Outer.nested.size: expected int"),
    ("many", [{"size": 1, "tags": ["a", 2]}], "Outer.many[0].tags[1]: expected str, got 2"),
    ("many", {"size": 1}, "Outer.many: expected array"),
    ("numbers", [1, 2, True], "Outer.numbers[2]: expected int"),
    ("table", {"k": 1}, "Outer.table['k']: expected map"),
    ("table", {1: pack(Inner(size=1))}, "Outer.table[1]: expected str, got 1"),
    ("bias", {7: None}, "Outer.bias[7]: expected float"),
    ("nested", {"size": 1}, "Inner: missing tags"),
    (
        "nested",
        {"size": 1, "tags": [], "tag": 1},
        "Inner: unknown field 'tag'; did you mean 'tags'",
    ),
    ("nested", {"size": -1, "tags": []}, "Inner: size must not be negative, got -1"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_values_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(Outer, {**pack(EXAMPLE), field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in fields(Outer)])
def test_every_field_is_required(field: str) -> None:
    data = pack(EXAMPLE)
    del data[field]
    with pytest.raises(ProtocolError, match=f"Outer: missing {field}"):
        unpack(Outer, data)


@pytest.mark.parametrize("data", [None, [], "x", 1, {1: 2}, {}])
def test_other_things_are_refused(data: Any) -> None:
    with pytest.raises(ProtocolError, match="Outer: "):
        unpack(Outer, data)


anything = st.recursive(
    st.none() | st.booleans() | int64 | finite | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Outer)]), anything))
def test_arbitrary_values_raise_nothing_else(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(Outer, {**pack(EXAMPLE), **changes})


@pytest.mark.parametrize("kind", [set[int], tuple[int, str], int | str, Any, object])
def test_fields_that_no_message_may_have(kind: Any) -> None:
    cls = dataclass(type("Odd", (), {"__annotations__": {"field": kind}}))
    with pytest.raises(TypeError, match=r"cannot be a field|the only union"):
        unpack(cls, {"field": 1})


def test_every_message_of_the_protocol_can_travel() -> None:
    classes = [cls for cls in vars(messages).values() if is_dataclass(cls)]
    assert len(classes) > 10
    for cls in classes:
        with pytest.raises(ProtocolError):  # compiles the converters, which is what could fail
            unpack(cls, None)


def test_a_job_travels() -> None:
    share = messages.KvShare(instance=1, span=messages.Span(start=0, stop=5))
    piece = messages.PrefillPiece(rid=3, start=5, length=2, history=(share,))
    piece = replace(piece, sampling=messages.Sampling(logit_bias={5: 1.5}, logprobs=3))
    job = messages.PrefillJob(job_id=1, group=(0, 1), bounds=(0, 1, 2), pieces=(piece,))
    assert unpack(messages.PrefillJob, over_the_wire(pack(job))) == job
