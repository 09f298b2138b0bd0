"""Strict conversion between messages and what MessagePack can carry.

Messages are frozen dataclasses and structs of msgspec.

`pack` trusts its argument, which the type checker has seen. `unpack` trusts nothing: a missing or
unknown field, or a value of another type, is a `ProtocolError` that names class and field.

Field types: `int`, `float` (an int is accepted), `str`, `bool`, `bytes`, `X | None`, `Literal`,
`StrEnum`, `tuple[X, ...]`, `list[X]`, `dict[K, X]` and other messages.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import types
import typing
from typing import Any, Literal, TypeVar, Union

import msgspec

from csps.protocols.core.errors import ProtocolError

T = TypeVar("T")
_first_use = threading.Lock()
_known: set[type] = set()
"""Classes that msgspec has inspected completely."""
_SCALARS: frozenset[type] = frozenset({int, float, str, bool, bytes})


def pack(obj: Any) -> dict[str, Any]:
    """Return a message as `{field: value}`, `array_like` structs as lists; likewise nested ones."""
    packed: dict[str, Any] = msgspec.to_builtins(obj, builtin_types=(bytes,))
    return packed


def unpack(cls: type[T], data: Any) -> T:
    """Return the `cls` that `data` describes.

    Raises
    ------
    ProtocolError
        `data` is not exactly a `cls`.
    """
    try:
        if cls in _known:
            return _converted(cls, data)
        # msgspec publishes its cache entry of a class before the entry is complete. A second
        # thread that unpacks the class for the first time at that moment would crash.
        with _first_use:
            converted = _converted(cls, data)
            _known.add(cls)
            return converted
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"{cls.__name__}: {exc}") from None


def encode(obj: Any) -> bytes:
    """Return a message as bytes: a part of other messages that is packed once for all of them."""
    return msgspec.msgpack.encode(obj)


def decode(cls: type[T], data: bytes) -> T:
    """Return the `cls` that `encode` has packed.

    Raises
    ------
    ProtocolError
        `data` is not exactly a `cls`.
    """
    try:
        plain = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError) as exc:  # invalid UTF-8, or deeply nested lists
        raise ProtocolError(f"{cls.__name__}: {exc}") from None
    return unpack(cls, plain)


def _converted(cls: type[T], data: Any) -> T:
    # The data goes through another struct first: msgspec accepts unknown fields of a dataclass, and
    # fills in defaults for missing ones.
    message: type = cls
    # Bytes travel as bytes: text is never decoded as base64.
    whole = msgspec.convert(data, _struct(message), builtin_types=(bytes,))
    return msgspec.convert(whole, cls, from_attributes=True, builtin_types=(bytes,))


@functools.cache
def _struct(cls: type) -> type[msgspec.Struct]:
    """Return a struct with exactly the fields of a message, all of them required."""
    hints = typing.get_type_hints(cls)
    if issubclass(cls, msgspec.Struct):
        names, array_like = cls.__struct_fields__, cls.__struct_config__.array_like
    else:
        assert dataclasses.is_dataclass(cls), f"{cls!r} is not a message"
        names, array_like = tuple(field.name for field in dataclasses.fields(cls)), False
    fields = [(name, _strict(hints[name])) for name in names]
    return msgspec.defstruct(
        cls.__name__, fields, forbid_unknown_fields=True, array_like=array_like
    )


def _strict(kind: Any) -> Any:
    """Replace messages by their strict structs in a type annotation.

    Raises
    ------
    TypeError
        The annotation is not in the module's list.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS or origin is Literal:
        return kind
    if origin in (Union, types.UnionType):
        if len(args) != 2 or type(None) not in args:
            raise TypeError(f"{kind!r} cannot be a field of a message: the only union is X | None")
        return _strict(args[0] if args[1] is type(None) else args[1]) | None
    if origin is list:
        return list[_strict(args[0])]  # type: ignore[misc]
    if origin is tuple and args[1:] == (Ellipsis,):
        return tuple[_strict(args[0]), ...]  # type: ignore[misc]
    if origin is dict:
        return dict[_strict(args[0]), _strict(args[1])]  # type: ignore[misc]
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return kind
    if isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)
    ):
        return _struct(kind)
    raise TypeError(f"{kind!r} cannot be a field of a message")
