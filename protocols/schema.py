"""Strict conversion between frozen dataclasses and what MessagePack can carry.

`pack` trusts its argument, which the type checker has seen; `unpack` trusts nothing: a missing or
unknown field or a value of another type is a `ProtocolError` that names class and field. A class is
compiled to a list of converters on first use.

Field types: `int`, `float` (an int is accepted), `str`, `bool`, `bytes`, `X | None`, `Literal`,
`StrEnum`, `tuple[X, ...]`, `list[X]`, `dict[K, X]` and other such dataclasses.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union

from csps.protocols.errors import ProtocolError, abridged, nearest

T = TypeVar("T")
Convert = Callable[[Any], Any]
_SCALARS: frozenset[type] = frozenset({int, str, bool, bytes})

_CODECS: dict[type, _Codec] = {}
"""By dataclass, compiled on first use."""


class _Mismatch(Exception):
    """A value is not of its field's type. Each caller on the way out knows one step of `path`."""

    def __init__(self, expected: str, value: object, path: str = "") -> None:
        self.expected, self.value, self.path = expected, value, path

    def inside(self, step: str) -> _Mismatch:
        return _Mismatch(self.expected, self.value, step + self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codec:
    """Both directions for one type; `pack` is None where values travel as they are."""

    pack: Convert | None
    unpack: Convert


def pack(obj: Any) -> dict[str, Any]:
    """`{field: value}` of a dataclass, nested ones included."""
    codec = _dataclass_codec(type(obj))
    assert codec.pack is not None
    packed: dict[str, Any] = codec.pack(obj)
    return packed


def unpack(cls: type[T], data: Any) -> T:
    """The `cls` that `data` describes.

    Raises
    ------
    ProtocolError
        `data` is not exactly a `cls`.
    """
    try:
        obj: T = _dataclass_codec(cls).unpack(data)
    except _Mismatch as exc:
        raise ProtocolError(
            f"{cls.__name__}{exc.path}: expected {exc.expected}, got {abridged(exc.value)}"
        ) from None
    return obj


def _codec(kind: Any) -> _Codec:
    """Converters for one type annotation; `TypeError` if it is not one of the module's list."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return _Codec(pack=None, unpack=_scalar(kind))
    if kind is float:
        return _Codec(pack=None, unpack=_float)
    if origin is Literal:
        return _Codec(pack=None, unpack=_literal(args))
    if origin in (Union, types.UnionType):
        return _optional_codec(kind, args)
    if origin is list or (origin is tuple and args[1:] == (Ellipsis,)):
        return _sequence_codec(origin, args[0])
    if origin is dict:
        return _dict_codec(args[0], args[1])
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _Codec(pack=lambda member: member.value, unpack=_str_enum(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_codec(kind)
    raise TypeError(f"{kind!r} cannot be a field of a message")


def _scalar(kind: type) -> Convert:
    def unpack(value: Any) -> Any:
        if type(value) is not kind:  # not isinstance: a bool is not an int here
            raise _Mismatch(kind.__name__, value)
        return value

    return unpack


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _Mismatch("float", value)


def _literal(choices: tuple[Any, ...]) -> Convert:
    allowed = {(type(choice), choice) for choice in choices}
    expected = f"one of {', '.join(map(repr, choices))}"

    def unpack(value: Any) -> Any:
        if type(value) not in (str, int, bool, bytes) or (type(value), value) not in allowed:
            raise _Mismatch(expected, value)
        return value

    return unpack


def _str_enum(cls: type[enum.StrEnum]) -> Convert:
    by_value = {member.value: member for member in cls}
    expected = f"one of {', '.join(map(repr, by_value))}"

    def unpack(value: Any) -> Any:
        if type(value) is not str or value not in by_value:
            raise _Mismatch(expected, value)
        return by_value[value]

    return unpack


def _optional_codec(kind: Any, args: tuple[Any, ...]) -> _Codec:
    if len(args) != 2 or type(None) not in args:
        raise TypeError(f"{kind!r}: the only union that a message may hold is X | None")
    inner = _codec(args[0] if args[1] is type(None) else args[1])
    inner_pack, inner_unpack = inner.pack, inner.unpack
    return _Codec(
        pack=inner_pack and (lambda value: None if value is None else inner_pack(value)),
        unpack=lambda value: None if value is None else inner_unpack(value),
    )


def _sequence_codec(make: type, item_kind: Any) -> _Codec:
    item = _codec(item_kind)
    item_pack, item_unpack = item.pack, item.unpack

    def unpack(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise _Mismatch("array", value)
        if item_kind in _SCALARS and set(map(type, value)) <= {item_kind}:
            return make(value)  # a million integers in 10 ms instead of 100
        return make(_unpack_items(item_unpack, value))

    return _Codec(
        pack=item_pack and (lambda value: [item_pack(element) for element in value]),
        unpack=unpack,
    )


def _unpack_items(item_unpack: Convert, values: Any) -> list[Any]:
    items: list[Any] = []
    try:
        for value in values:
            items.append(item_unpack(value))
    except _Mismatch as exc:
        raise exc.inside(f"[{len(items)}]") from None
    return items


def _dict_codec(key_kind: Any, value_kind: Any) -> _Codec:
    key_unpack, value = _codec(key_kind).unpack, _codec(value_kind)
    value_pack, value_unpack = value.pack, value.unpack

    def unpack(data: Any) -> Any:
        if type(data) is not dict:
            raise _Mismatch("map", data)
        result = {}
        for key, element in data.items():
            try:
                result[key_unpack(key)] = value_unpack(element)
            except _Mismatch as exc:
                raise exc.inside(f"[{abridged(key)}]") from None
        return result

    return _Codec(
        pack=value_pack and (lambda data: {key: value_pack(v) for key, v in data.items()}),
        unpack=unpack,
    )


def _dataclass_codec(cls: type) -> _Codec:
    if (known := _CODECS.get(cls)) is not None:
        return known
    assert dataclasses.is_dataclass(cls), f"{cls!r} is not a message"
    hints = typing.get_type_hints(cls)
    codecs = {field.name: _codec(hints[field.name]) for field in dataclasses.fields(cls)}
    codec = _Codec(pack=_dataclass_pack(codecs), unpack=_dataclass_unpack(cls, codecs))
    _CODECS[cls] = codec
    return codec


def _dataclass_pack(codecs: dict[str, _Codec]) -> Convert:
    names = tuple(codecs)
    converted = [(name, codec.pack) for name, codec in codecs.items() if codec.pack is not None]

    def pack(obj: Any) -> dict[str, Any]:
        packed = {name: getattr(obj, name) for name in names}
        for name, convert in converted:
            packed[name] = convert(packed[name])
        return packed

    return pack


def _dataclass_unpack(cls: Any, codecs: dict[str, _Codec]) -> Convert:
    steps = [(name, codec.unpack) for name, codec in codecs.items()]
    names = codecs.keys()

    def unpack(data: Any) -> Any:
        if type(data) is not dict:
            raise _Mismatch("map", data)
        if data.keys() != names:
            raise ProtocolError(f"{cls.__name__}: {_wrong_keys(data, names)}")
        fields = {}
        try:
            for name, convert in steps:
                fields[name] = convert(data[name])
        except _Mismatch as exc:
            raise exc.inside(f".{name}") from None
        try:
            return cls(**fields)
        except ValueError as exc:  # the class's own invariants
            raise ProtocolError(f"{cls.__name__}: {exc}") from None

    return unpack


def _wrong_keys(data: dict[Any, Any], names: typing.AbstractSet[str]) -> str:
    if missing := sorted(names - data.keys()):
        return f"missing {', '.join(missing)}"
    unknown = next(key for key in data if key not in names)
    return f"unknown field {abridged(unknown)}{nearest(str(unknown)[:64], names)}"
