"""JSON schemas of many shapes that bound every length: an answer of any model ends by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def bounded_schemas(count: int) -> Iterator[dict[str, Any]]:
    """Yield schemas, always the same."""
    drawn = random.Random(5)

    def value(depth: int) -> dict[str, Any]:
        leaves: list[dict[str, Any]] = [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", "né", 'q"q', 7, None]},
            {"const": {"k": [1, "x"]}},
            {"type": "integer", "minimum": -50, "maximum": drawn.randint(0, 5000)},
            {"type": "string", "maxLength": drawn.randint(0, 9)},
            {"type": "string", "pattern": "^[a-f]{1,4}(-[0-9]{2})?$"},
            {"type": "string", "format": "date"},
        ]
        inner = [
            lambda: {
                "type": "array",
                "items": value(depth - 1),
                "minItems": drawn.randint(0, 1),
                "maxItems": drawn.randint(1, 3),
            },
            lambda: {"anyOf": [value(depth - 1), value(depth - 1)]},
            lambda: record(depth - 1),
        ]
        if depth and drawn.random() < 0.6:
            return drawn.choice(inner)()
        return drawn.choice(leaves)

    def record(depth: int) -> dict[str, Any]:
        names = [f"f{number}" for number in range(drawn.randint(1, 4))]
        return {
            "type": "object",
            "properties": {name: value(depth) for name in names},
            "required": names[: drawn.randint(0, len(names))],
            "additionalProperties": False,
        }

    for _ in range(count):
        yield record(2)
