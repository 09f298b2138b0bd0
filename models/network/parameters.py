"""List a network's parameters once, for places in a checkpoint and for tensors alike.

A family (`checkpoints/families.py`) fills the list with `Place`s, the loader turns each into a
tensor, and the network computes with the result.
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
    """Shape that the whole stored tensor must have."""
    rows: range
    columns: range | None = None


Place = tuple[TensorBlock, ...]
"""Location of a parameter: blocks to be stacked by rows."""


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
        """Return the same list with each entry converted."""
        entries: dict[str, T | None] = {f.name: getattr(self, f.name) for f in fields(self)}
        converted: dict[str, Any] = {
            name: None if entry is None else convert(entry) for name, entry in entries.items()
        }
        return LayerParameters(**converted)

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the entries that are not None."""
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
        """Return the same list with each entry converted, in the order of the network."""
        return ModelParameters(
            embedding=convert(self.embedding),
            layers=tuple(layer.map(convert) for layer in self.layers),
            norm=convert(self.norm),
            head=None if self.head is None else convert(self.head),
        )

    def __iter__(self) -> Iterator[T]:
        """Yield all entries; a head that is the embedding counts once."""
        yield self.embedding
        for layer in self.layers:
            yield from layer
        yield self.norm
        if self.head is not None:
            yield self.head


def whole(tensor: str, *shape: int) -> Place:
    """Return all of a stored tensor."""
    return (_block(tensor, shape, range(shape[0])),)


def rows(tensor: str, shape: tuple[int, ...], wanted: range) -> Place:
    """Return some rows of a stored matrix, or some entries of a vector."""
    return (_block(tensor, shape, wanted),)


def columns(tensor: str, shape: tuple[int, int], wanted: range) -> Place:
    """Return some columns of a stored matrix."""
    return (TensorBlock(tensor=tensor, shape=shape, rows=range(shape[0]), columns=wanted),)


def _block(tensor: str, shape: tuple[int, ...], wanted: range) -> TensorBlock:
    all_columns = range(shape[1]) if len(shape) == 2 else None
    return TensorBlock(tensor=tensor, shape=shape, rows=wanted, columns=all_columns)
