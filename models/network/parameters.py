"""List a network's parameters once, for places in a checkpoint and for tensors alike.

A family (`checkpoints/families.py`) fills the list with `Place`s, the loader turns each into a
tensor, and the network computes with the result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, TypeVar

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
    index: int | None = None
    """Number of the matrix, where the stored tensor is a stack of them."""
    least_bytes: int = 0
    """Bytes of a number in memory, if the serving dtype has fewer: 4 or 8."""
    transposed: bool = False
    """True if files that hold floats have the columns of each matrix as rows."""
    kept: Literal["floats", "fp8", "scales"] = "floats"
    """Whether a rank keeps this as floats, as FP8 numbers, or as the scales of such numbers' rows,
    which have a place of their own."""


Place = tuple[TensorBlock, ...]
"""Location of a parameter: blocks to be stacked by rows."""


@dataclass(frozen=True, kw_only=True)
class ExpertParameters(Generic[T]):
    """The experts of one layer, and the expert router that chooses among them."""

    router: T
    """A row for each expert, in fp64."""
    gate_up: T
    """The experts one below the other, each its gates, then its ups; if gates are clamped, a gate
    and an up take turns."""
    down: T
    """The experts one below the other."""
    router_bias: T | None = None
    """Correction of the experts' scores when they are chosen, in fp32."""
    logit_bias: T | None = None
    """Bias of the expert router's logits, in fp32."""
    gate_up_bias: T | None = None
    """A row for each expert, in the order of its gates and ups."""
    down_bias: T | None = None
    """A row for each expert, on the first rank of a tensor-parallel group alone."""

    def map(self, convert: Callable[[T], U]) -> "ExpertParameters[U]":
        """Return the same list with each entry converted."""
        return ExpertParameters(**_converted(self, convert))

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the entries that are not None."""
        return _entries(self)


@dataclass(frozen=True, kw_only=True)
class LayerParameters(Generic[T]):
    """One decoder layer; matrices are (out, in), of one tensor-parallel rank."""

    input_norm: T
    qkv: T
    """Queries, then keys, then values."""
    output: T
    mlp_norm: T
    gate_up: T | None = None
    """Gates, then ups, of the MLP that every token passes: a dense layer's, or the shared
    experts'."""
    gate_up_scales: T | None = None
    """Scale of each row, where the numbers are FP8."""
    down: T | None = None
    down_scales: T | None = None
    experts: ExpertParameters[T] | None = None
    """Experts that some tokens pass, besides that MLP or instead of it."""
    qkv_bias: T | None = None
    output_bias: T | None = None
    gate_up_bias: T | None = None
    down_bias: T | None = None
    query_norm: T | None = None
    key_norm: T | None = None
    attention_post_norm: T | None = None
    """Norm of attention's output before the residual is added."""
    mlp_post_norm: T | None = None
    """Norm of the MLP's output before the residual is added."""
    sinks: T | None = None
    """Logit of each query head's attention sink, of all heads on every rank, in fp32."""

    @property
    def norms(self) -> Iterator[T]:
        """Yield the weights of all norms."""
        post = (self.attention_post_norm, self.mlp_post_norm)
        found = (self.input_norm, self.mlp_norm, self.query_norm, self.key_norm, *post)
        return (norm for norm in found if norm is not None)

    def map(self, convert: Callable[[T], U]) -> "LayerParameters[U]":
        """Return the same list with each entry converted."""
        return LayerParameters(**_converted(self, convert))

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the entries that are not None."""
        return _entries(self)


def _converted(
    parameters: ExpertParameters[T] | LayerParameters[T], convert: Callable[[T], U]
) -> dict[str, Any]:
    """Return the entries by name, each converted; an entry may be a list of its own."""
    entries = {field.name: getattr(parameters, field.name) for field in fields(parameters)}
    return {
        name: entry.map(convert)
        if isinstance(entry, ExpertParameters)
        else None
        if entry is None
        else convert(entry)
        for name, entry in entries.items()
    }


def _entries(parameters: ExpertParameters[T] | LayerParameters[T]) -> Iterator[T]:
    for field in fields(parameters):
        entry = getattr(parameters, field.name)
        if isinstance(entry, ExpertParameters):
            yield from entry
        elif entry is not None:
            yield entry


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


def precise(place: Place, least_bytes: int) -> Place:
    """Return the same place, to be read as fp32 (4 bytes) or fp64 (8) if the dtype is shorter."""
    return tuple(replace(block, least_bytes=least_bytes) for block in place)


def in_fp8(place: Place) -> tuple[Place, Place]:
    """Return the places of a matrix that is kept in FP8, and of its rows' scales."""
    return (
        tuple(replace(block, kept="fp8") for block in place),
        tuple(replace(block, kept="scales") for block in place),
    )


def _block(tensor: str, shape: tuple[int, ...], wanted: range) -> TensorBlock:
    all_columns = range(shape[1]) if len(shape) == 2 else None
    return TensorBlock(tensor=tensor, shape=shape, rows=wanted, columns=all_columns)
