"""JSON objects of the API: known fields and no others, and checks that a type cannot express."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from csps.protocols.errors import abridged, nearest


class JsonObject(BaseModel):
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
    """Refuse the value at hand, or the `field` of the object at hand."""
    raise PydanticCustomError("csps", "{text}", {"text": text, "field": field})


def between(low: float, high: float) -> AfterValidator:
    """In [low, high]."""

    def check(value: Any) -> Any:
        if not low <= value <= high:
            fail(f"must be between {low} and {high}, got {shown(value)}")
        return value

    return AfterValidator(check)


def above(low: float, high: float = math.inf) -> AfterValidator:
    """In (low, high], and finite."""
    limit = "" if high == math.inf else f" and at most {high}"

    def check(value: Any) -> Any:
        if not (low < value <= high and math.isfinite(value)):
            fail(f"must be greater than {low}{limit}, got {shown(value)}")
        return value

    return AfterValidator(check)


def only(supported: object) -> AfterValidator:
    """For a field of OpenAI's of which this server implements one value."""

    def check(value: Any) -> Any:
        if value != supported:
            fail(f"only {shown(supported)} is supported, got {shown(value)}")
        return value

    return AfterValidator(check)


def shown(value: object) -> str:
    """A value as its sender wrote it, as far as it is short."""
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
