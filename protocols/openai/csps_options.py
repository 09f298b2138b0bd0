"""The object `csps` of a request, and the base model and validators of all JSON objects of the
API."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from csps.protocols.attention.csa import ALL_QUERIES, CsaSettings, ntp_only
from csps.protocols.attention.plan import ASKED_RINGS, AskedRing, Objective, RequestClass
from csps.protocols.core.errors import abridged, nearest
from csps.protocols.core.topology import MAX_LEVELS


class JsonModel(BaseModel):
    """A JSON object with known fields and no others; values are never coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_and_given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        for name in data:
            if name not in fields:
                fail(f"unknown field{nearest(name, fields)}", name)
        return {name: value for name, value in data.items() if value is not None}


def fail(text: str, field: str | None = None) -> NoReturn:
    """Refuse the value that is validated, or a `field` of the object that is validated."""
    raise PydanticCustomError("csps", "{text}", {"text": text, "field": field})


@dataclass(frozen=True, slots=True)
class _Checked(AfterValidator):
    """A check that JSON schemas show."""

    shown: dict[str, Any] = field(default_factory=dict, hash=False)
    """What they say of it."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | self.shown


def between(low: float, high: float) -> AfterValidator:
    """Validate that a number is in [low, high]."""

    def check(value: Any) -> Any:
        if not low <= value <= high:
            fail(f"must be between {low} and {high}, got {shown(value)}")
        return value

    return _Checked(check, {"minimum": low, "maximum": high})


def above(low: float, high: float = math.inf) -> AfterValidator:
    """Validate that a number is in (low, high], and finite."""
    limit = "" if high == math.inf else f" and at most {high}"

    def check(value: Any) -> Any:
        if not (low < value <= high and math.isfinite(value)):
            fail(f"must be greater than {low}{limit}, got {shown(value)}")
        return value

    bounds = {"exclusiveMinimum": low} | ({} if high == math.inf else {"maximum": high})
    return _Checked(check, bounds)


def only(supported: object) -> AfterValidator:
    """Validate a field of OpenAI's of which this server supports one value."""

    def check(value: Any) -> Any:
        if value != supported:
            fail(f"only {shown(supported)} is supported, got {shown(value)}")
        return value

    return _Checked(check, {"const": supported})


def shown(value: object) -> str:
    """Return a value as JSON would show it, abridged."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case []:
            return "[]"
        case float():
            return f"{value:g}"
        case list():
            return "an array"
        case dict():
            return "an object"
        case _:
            return abridged(value)


MAX_TOKENS = 2**24
"""Limit of everything that counts tokens of a prompt."""
MAX_LAYERS, MAX_KV_HEADS = 1024, 1024
"""Limits of arrays by layer and by KV head; the configurator knows the model's numbers."""
MAX_RATIOS = 16_384
"""Limit of drop ratios, or of coverages, in all; those of 80 layers with 128 KV heads are fewer."""
MAX_MICRO_PARTITIONS = 64
"""Limit of micro-partitions; each is a message from every rank to every other one, in every
layer."""


def _by_layer_and_head(parse: Callable[[Any], float], value: Any) -> tuple[tuple[float, ...], ...]:
    """Parse numbers: 0.5 for all, [0, 0.5] by layer, [0, [0.5, 0.9]] by layer and KV head."""
    by_layer = [
        _one_or_more(of_layer, MAX_KV_HEADS, "by KV head")
        for of_layer in _one_or_more(value, MAX_LAYERS, "by layer")
    ]
    if (count := sum(map(len, by_layer))) > MAX_RATIOS:
        fail(f"at most {MAX_RATIOS} numbers are supported, got {count}")
    return tuple(tuple(map(parse, of_layer)) for of_layer in by_layer)


def _drop_ratio(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        fail(f"must be at least 0 and less than 1, got {shown(value)}")
    return float(value)


def _coverage(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        fail(f"must be more than 0 and at most 1, got {shown(value)}")
    return float(value)


def _micro_partitions(value: Any) -> tuple[tuple[int, ...], ...]:
    """Parse micro-partitions: 4 for all, [1, 2] by level, [4, [1, 2]] by layer and level."""
    by_layer = isinstance(value, list) and any(isinstance(of_layer, list) for of_layer in value)
    return tuple(
        tuple(map(_micro_partition_count, _one_or_more(of_layer, MAX_LEVELS, "by level")))
        for of_layer in (_one_or_more(value, MAX_LAYERS, "by layer") if by_layer else [value])
    )


def _micro_partition_count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_MICRO_PARTITIONS:
        fail(f"must be between 1 and {MAX_MICRO_PARTITIONS}, got {shown(value)}")
    return value


def _one_or_more(value: Any, most: int, by: str) -> list[Any]:
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= most:
        fail(f"must be a number, or an array of 1 to {most} {by}, got {len(numbers)}")
    return numbers


class _CsaOptions(JsonModel):
    """Sparse attention chosen by hand, for experiments; None leaves a field to the configurator."""

    levels: Annotated[int, between(1, MAX_LEVELS)] | None = None
    """N_v."""
    drop_ratio: Annotated[
        tuple[tuple[float, ...], ...] | None,
        PlainValidator(
            partial(_by_layer_and_head, _drop_ratio),
            json_schema_input_type=float | list[float | list[float]],
        ),
    ] = None
    """p of level 2, in [0, 1): a number, or an array by layer, whose items may be arrays by KV
    head. The last item holds for all further layers."""
    coverage: Annotated[
        tuple[tuple[float, ...], ...] | None,
        PlainValidator(
            partial(_by_layer_and_head, _coverage),
            json_schema_input_type=float | list[float | list[float]],
        ),
    ] = None
    """Share of the estimated attention that kept tokens must reach at level 2, in (0, 1], by layer
    and KV head as `drop_ratio`, of which it takes the place."""
    micro_partitions: Annotated[
        tuple[tuple[int, ...], ...] | None,
        PlainValidator(_micro_partitions, json_schema_input_type=int | list[int | list[int]]),
    ] = None
    """M: a number, an array by level, or an array of these by layer. The last item holds for all
    further levels or layers."""
    strategy: Literal["ntp", "tp", "tp_flat", "ring_kv", "ring_q", "ring"] | None = None
    """SP-NTP, or SP-TP with hierarchical or flat collectives. For exact attention, which takes
    no other option: context parallelism's ring pass-KV or pass-Q, or the better one of them."""

    # As in `csps.protocols.attention.csa.CsaPlan`
    nested: bool | None = None
    drop_queries: bool | None = None
    importance_window: Annotated[int, between(0, MAX_TOKENS)] | None = None
    importance_layer: Literal["previous", "same"] | None = None
    sinks: Annotated[int, between(0, MAX_TOKENS)] | None = None
    tail: Annotated[int, between(0, MAX_TOKENS)] | None = None
    pipelined: bool | None = None
    decode_kept_only: bool | None = None

    @model_validator(mode="after")
    def _no_more_than_levels(self) -> Self:
        given = max(map(len, self.micro_partitions or ((),)))
        if self.levels and given > self.levels:
            what = f"must be at most {self.levels} by level, as 'levels' says"
            fail(f"{what}, got {given}", "micro_partitions")
        return self

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if self.importance_layer == "same" and self.importance_window == ALL_QUERIES:
            fail(
                "must be 1 or more with 'importance_layer': 'same', because what all queries "
                "attend to is known only when the layer is over",
                "importance_window",
            )
        if self.coverage is not None and self.drop_ratio is not None:
            fail("excludes 'drop_ratio'", "coverage")
        only = ntp_only(nested=self.nested, decode_kept_only=self.decode_kept_only)
        if self.strategy in ("tp", "tp_flat") and only is not None:
            fail(f"must be 'ntp' with {only}, not '{self.strategy}'", "strategy")
        return self


class CspsRequestOptions(_CsaOptions):
    """Trade-offs of one request."""

    objective: Literal["ttft", "accuracy"] | None = None
    """Quantity to optimize within the bound on the other. None is "ttft", or "accuracy" where
    `max_ttft_ms` is the only bound."""
    max_accuracy_loss: Annotated[float, between(0, 1)] | None = None
    """Fraction of accuracy that may be lost."""
    max_ttft_ms: Annotated[float, above(0)] | None = None
    attention: Literal["auto", "exact", "csa"] = "auto"
    unmet: Literal["closest", "refuse"] = "closest"
    """Handling of a request whose bounds no configuration is predicted to meet: run the closest
    one and report it, or refuse."""
    explain: bool = False
    """True adds plan and timings to the answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ring is not None and self.attention == "csa":
            fail(f"must be 'ntp', 'tp' or 'tp_flat' with 'attention': 'csa', got '{self.ring}'",
                 "strategy")  # fmt: skip
        for name in _CsaOptions.model_fields:
            asked = getattr(self, name) is not None
            if asked and self.attention != "csa" and not (name == "strategy" and self.ring):
                fail("needs 'attention': 'csa'", name)
        return self

    @property
    def ring(self) -> AskedRing | None:
        """Exact strategy that was asked for, or None."""
        return next((ring for ring in ASKED_RINGS if ring == self.strategy), None)


def request_class(options: CspsRequestOptions) -> RequestClass:
    """Return the class of requests with these options."""
    wanted, given = objective(options), given_of_csa(options)
    is_open = leaves_open(options, given)
    by_configurator = options.attention != "csa" or (is_open and not given)
    return RequestClass(
        None if by_configurator else csa_settings(options),
        options.ring,
        wanted if is_open else None,
        given if is_open else (),
    )


def objective(options: CspsRequestOptions) -> Objective:
    """Return what to optimize; with a bound on TTFT alone that is accuracy."""
    only_ttft_bound = options.max_ttft_ms is not None and options.max_accuracy_loss is None
    return Objective(
        kind=options.objective or ("accuracy" if only_ttft_bound else "ttft"),
        max_accuracy_loss=options.max_accuracy_loss,
        max_ttft_ms=options.max_ttft_ms,
    )


def leaves_open(options: CspsRequestOptions, given: tuple[str, ...]) -> bool:
    """Return whether the configurator may choose, within bounds, which keys attention drops.

    It may for a request with bounds and no attention of its own, and for sparse attention without a
    drop ratio or a coverage.

    Args:
        given: result of `given_of_csa`.
    """
    if options.attention == "csa":
        by_hand = {"drop_ratios", "coverages", "nested", "decode_kept_only"}
        return not by_hand & set(given)
    return options.attention == "auto" and options.ring is None and objective(options).bounded


_CSA_OPTIONS = {field.name: field.name for field in fields(CsaSettings)} | {
    "drop_ratios": "drop_ratio",
    "coverages": "coverage",
}
"""Names of options by field of `CsaSettings`."""


def given_of_csa(options: CspsRequestOptions) -> tuple[str, ...]:
    """Return the fields of `CsaSettings` that the client fixed."""
    return tuple(
        name for name, option in _CSA_OPTIONS.items() if getattr(options, option) is not None
    )


def csa_settings(options: CspsRequestOptions) -> CsaSettings:
    """Return the settings of sparse attention; keys are dropped only as the client asked.

    With an importance window the default `importance_layer` is "same".
    """
    given = {name: getattr(options, _CSA_OPTIONS[name]) for name in given_of_csa(options)}
    settings = CsaSettings(**given)
    if "importance_layer" in given or settings.importance_window == ALL_QUERIES:
        return settings
    # The layer before may look at other keys than this one, which models of few layers show
    # (benchmarks/results/two-servers-2026-11-21.md).
    return replace(settings, importance_layer="same")
