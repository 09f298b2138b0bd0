"""Read a checkpoint's JSON files with typed values, and define what can be wrong with them.

    ValueError
    ├── CheckpointError            the directory cannot be served
    │   ├── UnsupportedModelError  a well-formed checkpoint of a kind this server does not know
    │   └── MissingTensorError     the weights lack a tensor that the architecture needs
    └── InvalidTextError           text that no tokenizer can take

Every error names the file and the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A model directory is missing something, or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture, or uses a feature, that is not supported."""


class MissingTensorError(CheckpointError):
    """The checkpoint's weights lack a tensor that its architecture needs."""


class InvalidTextError(ValueError):
    """Text or messages that cannot be turned into tokens: a client's mistake."""


@dataclass(frozen=True, kw_only=True)
class CheckpointJson:
    """One JSON object of a model directory. A null value counts as absent, as it does for
    transformers."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._require(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._require(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._wrong(key, "a list of strings")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if the key is absent."""
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in found):
            raise self._wrong(key, "a list of numbers")
        return tuple(map(float, found))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty if the key is absent."""
        return self._integers(key, "a token id or a list of them")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return one integer or a list of them as a tuple; empty if the key is absent."""
        return self._integers(key, "an integer or a list of them")

    def _integers(self, key: str, expected: str) -> tuple[int, ...]:
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            raise self._wrong(key, expected)
        return tuple(found)

    def object(self, key: str) -> CheckpointJson:
        """Return a nested object; empty if the key is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return CheckpointJson(path=self.path, values=value or {})

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _require(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {expected}, not {self.values[key]!r}")


OVERRIDABLE = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
"""Keys of config.json that can be replaced: those that decide what positions mean."""
_ROPE = ("rope_parameters", "rope_scaling")
"""The same object in new files and in old ones."""


def overridden(config: CheckpointJson, overrides: Mapping[str, Any]) -> CheckpointJson:
    """Return a configuration with some values replaced, those of its text part if it has one.

    Objects are replaced as a whole, but RoPE parameters keep the base of their frequencies and the
    fraction of rotated dims unless they are given.

    Raises:
        CheckpointError: a key that is not among `OVERRIDABLE`, or both names of RoPE parameters.
    """
    if unknown := sorted(set(overrides) - set(OVERRIDABLE)):
        raise CheckpointError(
            f"{', '.join(unknown)} cannot be overridden; possible: {', '.join(OVERRIDABLE)}"
        )
    if config.has("text_config"):
        text = overridden(config.object("text_config"), overrides)
        return replace(config, values={**config.values, "text_config": text.values})
    values = {**config.values, **overrides}
    given = [key for key in _ROPE if key in overrides]
    if len(given) > 1:
        raise CheckpointError("rope_parameters and rope_scaling are one: override one of them")
    for key in given:
        kept: dict[str, Any] = {}
        for name in _ROPE:
            kept |= config.object(name).values
            values.pop(name, None)
        kept = {
            name: kept[name] for name in ("rope_theta", "partial_rotary_factor") if name in kept
        }
        new = replace(config, values=overrides).object(key)
        values["rope_parameters"] = {**kept, **new.values}
    return replace(config, values=values)


def read_json(path: Path) -> CheckpointJson:
    """Read a file that must exist and hold a JSON object.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return CheckpointJson(path=path, values=values)


def read_json_if_present(path: Path) -> CheckpointJson:
    """Read a file as `read_json` does; return an empty object if there is no such file."""
    return read_json(path) if path.exists() else CheckpointJson(path=path, values={})


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters that a checkpoint recommends."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Return what generation_config.json recommends, as vLLM reads it: `do_sample` says nothing.

    Raises:
        CheckpointError: a value is out of range.
    """
    config, none = read_json_if_present(model_dir / "generation_config.json"), SamplingDefaults()
    found = SamplingDefaults(
        temperature=config.number("temperature", none.temperature),
        top_p=config.number("top_p", none.top_p),
        top_k=max(0, config.integer("top_k", none.top_k)),
        min_p=config.number("min_p", none.min_p),
        repetition_penalty=config.number("repetition_penalty", none.repetition_penalty),
    )
    limits = {
        "temperature": 0 <= found.temperature < math.inf,
        "top_p": 0 < found.top_p <= 1,
        "min_p": 0 <= found.min_p <= 1,
        "repetition_penalty": 0 < found.repetition_penalty < math.inf,
    }
    for name, kept in limits.items():
        if not kept:
            raise CheckpointError(f"{config.path}: {name} is out of range")
    return found


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        config = read_json_if_present(model_dir / name)
        for part in (config, config.object("text_config")):
            if token_ids := part.token_ids("eos_token_id"):
                return token_ids
    return ()
