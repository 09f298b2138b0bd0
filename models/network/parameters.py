"""The list of a network's parameters, kept once: first as places in a checkpoint, then as tensors.

A family (`families/`) fills it with `Place`s, the loader turns each into a tensor, and the
network computes with the result. None of the three has a list of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """A rectangle of one stored tensor; a vector has no columns."""

    tensor: str
    shape: tuple[int, ...]
    """What the whole stored tensor has to measure."""
    rows: range
    columns: range | None = None


Place = tuple[TensorBlock, ...]
"""Where a parameter lies: blocks to be stacked by rows."""


@dataclass(frozen=True, kw_only=True)
class LayerParameters(Generic[T]):
    """One decoder layer; matrices are (out, in), of one tensor-parallel rank."""

    input_norm: T
    qkv: T
    """Queries, then keys, then values."""
    output: T
    mlp_norm: T
    gate_up: T
    """Gates, then ups."""
    down: T
    qkv_bias: T | None = None
    output_bias: T | None = None
    gate_up_bias: T | None = None
    down_bias: T | None = None
    query_norm: T | None = None
    key_norm: T | None = None

    def map(self, convert: Callable[[T], U]) -> "LayerParameters[U]":
        """The same list with each entry converted."""
        entries: dict[str, T | None] = {f.name: getattr(self, f.name) for f in fields(self)}
        converted: dict[str, Any] = {
            name: None if entry is None else convert(entry) for name, entry in entries.items()
        }
        return LayerParameters(**converted)

    def __iter__(self) -> Iterator[T]:
        """The entries that there are."""
        entries: list[T | None] = [getattr(self, f.name) for f in fields(self)]
        return (entry for entry in entries if entry is not None)


@dataclass(frozen=True, kw_only=True)
class ModelParameters(Generic[T]):
    """A whole network; embedding and head are complete on every tensor-parallel rank."""

    embedding: T
    layers: tuple[LayerParameters[T], ...]
    norm: T
    head: T | None
    """None where the head is the embedding."""

    def map(self, convert: Callable[[T], U]) -> "ModelParameters[U]":
        """The same list with each entry converted, in the order of the network."""
        return ModelParameters(
            embedding=convert(self.embedding),
            layers=tuple(layer.map(convert) for layer in self.layers),
            norm=convert(self.norm),
            head=None if self.head is None else convert(self.head),
        )

    def __iter__(self) -> Iterator[T]:
        """All entries; a head that is the embedding counts once."""
        yield self.embedding
        for layer in self.layers:
            yield from layer
        yield self.norm
        if self.head is not None:
            yield self.head


def whole(tensor: str, *shape: int) -> Place:
    """All of a stored tensor."""
    return (_block(tensor, shape, range(shape[0])),)


def rows(tensor: str, shape: tuple[int, ...], wanted: range) -> Place:
    """Some rows of a stored matrix, or some entries of a vector."""
    return (_block(tensor, shape, wanted),)


def columns(tensor: str, shape: tuple[int, int], wanted: range) -> Place:
    """Some columns of a stored matrix."""
    return (TensorBlock(tensor=tensor, shape=shape, rows=range(shape[0]), columns=wanted),)


def _block(tensor: str, shape: tuple[int, ...], wanted: range) -> TensorBlock:
    all_columns = range(shape[1]) if len(shape) == 2 else None
    return TensorBlock(tensor=tensor, shape=shape, rows=wanted, columns=all_columns)
