"""Dataclasses to MessagePack and back, strictly."""

from __future__ import annotations

import contextlib
import enum
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang import messages, step_messages
from csps.protocols.gang.messages import SamplerInputs, Sampling
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import encode, pack, unpack


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
    ("number", 1.0, "Expected `int`, got `float` - at `$.number`"),
    ("number", True, "Expected `int`, got `bool` - at `$.number`"),
    ("ratio", "1", "Expected `float`, got `str` - at `$.ratio`"),
    ("ratio", True, "Expected `float`, got `bool` - at `$.ratio`"),
    ("name", b"n", "Expected `str`, got `bytes` - at `$.name`"),
    ("flag", 1, "Expected `bool`, got `int` - at `$.flag`"),
    ("blob", "b", "Expected `bytes`, got `str` - at `$.blob`"),
    ("blob", "YmFzZQ==", "Expected `bytes`, got `str` - at `$.blob`"),
    ("color", "green", "Invalid enum value 'green' - at `$.color`"),
    ("mode", "slower", "Invalid enum value 'slower' - at `$.mode`"),
    ("mode", 4, "Invalid enum value 4 - at `$.mode`"),
    ("mode", 3.0, "Expected `int | str`, got `float` - at `$.mode`"),
    ("mode", [], "Expected `int | str`, got `array` - at `$.mode`"),
    ("maybe", "x", "Expected `int | null`, got `str` - at `$.maybe`"),
    ("nested", None, "Expected `object`, got `null` - at `$.nested`"),
    ("nested", {"size": "1", "tags": []}, "Expected `int`, got `str` - at `$.nested.size`"),
    ("many", [{"size": 1, "tags": ["a", 2]}], "got `int` - at `$.many[0].tags[1]`"),
    ("many", {"size": 1}, "Expected `array`, got `object` - at `$.many`"),
    ("numbers", [1, 2, True], "Expected `int`, got `bool` - at `$.numbers[2]`"),
    ("table", {"k": 1}, "Expected `object`, got `int` - at `$.table[...]`"),
    ("table", {1: pack(Inner(size=1))}, "Expected `str`, got `int` - at `key` in `$.table`"),
    ("bias", {7: None}, "Expected `float`, got `null` - at `$.bias[...]`"),
    ("bias", {"7": 1.0}, "Expected `int`, got `str` - at `key` in `$.bias`"),
    ("nested", {"size": 1}, "Object missing required field `tags` - at `$.nested`"),
    (
        "nested",
        {"size": 1, "tags": [], "tag": 1},
        "Object contains unknown field `tag` - at `$.nested`",
    ),
    ("nested", {"size": -1, "tags": []}, "size must not be negative, got -1 - at `$.nested`"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_values_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(Outer, {**pack(EXAMPLE), field: value})
    assert str(caught.value).startswith("Outer: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in fields(Outer)])
def test_every_field_is_required(field: str) -> None:
    data = pack(EXAMPLE)
    del data[field]
    with pytest.raises(ProtocolError, match=f"Outer: Object missing required field `{field}`"):
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
    modules = (messages, step_messages)
    classes = {
        cls
        for module in modules
        for cls in vars(module).values()
        if is_dataclass(cls) or (isinstance(cls, type) and issubclass(cls, msgspec.Struct))
    }
    assert len(classes) > 25
    for cls in classes:
        with pytest.raises(ProtocolError):  # compiles the converters, which is what could fail
            unpack(cls, None)


def test_a_prefill_step_travels() -> None:
    history = KvSlice(1, 0, 5)
    chunk = PrefillChunk(sequence_id=3, start=5, length=2, history=(history,))
    samplers = {3: encode(SamplerInputs(sampling=Sampling(logit_bias={5: 1.5}, logprobs=3)))}
    step = PrefillStep(
        step_id=1, group=(0, 1), bounds=(0, 1, 2), chunks=(chunk,), samplers=samplers
    )
    assert unpack(PrefillStep, over_the_wire(pack(step))) == step


def test_threads_that_are_the_first_to_unpack_a_message() -> None:
    """Messages that contain the new class are unpacked as well."""
    program = Path(__file__).with_name("first_messages.py")
    ended = subprocess.run([sys.executable, program], timeout=60, check=False)
    assert ended.returncode == 0
