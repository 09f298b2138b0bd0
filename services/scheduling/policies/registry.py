"""The registry makes policies from `scheduling: {policy: NAME, ...}` in `config.yaml`.

A name with a colon, `my_module:MyPolicy`, is a class of the operator's own. It implements `Policy`,
is called with its options and those for decoding, and may have these attributes: `Options`, a
frozen dataclass; `pairings`; `own_way`, `piggybacked` and `in_iterations`, as in `_Registered`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.policies.chunked_prefill import ChunkedPrefill, ChunkedPrefillOptions
from csps.services.scheduling.policies.context_parallel.pair import ContextParallelOptions
from csps.services.scheduling.policies.context_parallel.policy import ContextParallel
from csps.services.scheduling.policies.csps.pair import CspsOptions
from csps.services.scheduling.policies.csps.policy import Csps
from csps.services.scheduling.policies.fixed_sp import FixedSp, FixedSpOptions
from csps.services.scheduling.policies.loongserve.inputs import LoongServeOptions
from csps.services.scheduling.policies.loongserve.policy import LoongServe
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions
from csps.services.scheduling.policies.tetris.options import TetrisOptions
from csps.services.scheduling.policies.tetris.policy import Tetris

Options = TypeVar("Options")

Pairing = Literal["pair", "elastic"]
"""Prefill and decode gangs, or one elastic gang."""


class _Registered(NamedTuple):
    options: type[Any]
    policy: Callable[[Any, DecodeOptions], Policy]
    pairings: tuple[Pairing, ...]
    own_way: str = ""
    """Phrase about how it computes prompts, if a request cannot choose a strategy."""
    piggybacked: bool = False
    """True if the decode gang of a pair may compute ends of prompts."""
    in_iterations: bool = False
    """True if decode iterations compute all prompts."""


_POLICIES: dict[str, _Registered] = {
    "chunked_prefill": _Registered(
        ChunkedPrefillOptions,
        ChunkedPrefill,
        ("pair", "elastic"),
        "in chunks beside decoding",
        in_iterations=True,
    ),
    "context_parallel": _Registered(
        ContextParallelOptions, ContextParallel, ("pair", "elastic"), piggybacked=True
    ),
    "csps": _Registered(CspsOptions, Csps, ("pair",), piggybacked=True),
    "fixed_sp": _Registered(FixedSpOptions, FixedSp, ("pair",)),
    "loongserve": _Registered(
        LoongServeOptions, LoongServe, ("elastic",), "around rings that it chooses itself"
    ),
    "tetris": _Registered(TetrisOptions, Tetris, ("pair",)),
}


def make_policy(
    name: str, options: Mapping[str, object] | None = None, *, beside: Iterable[str] = ()
) -> Policy:
    """Make a policy with its options.

    Args:
        name: name in the settings.
        options: options by name, those for decoding beside the policy's own.
        beside: other keys of the same section, to suggest for an unknown option.

    Raises:
        ConfigError: an unknown name or option, or a value out of range.
    """
    found = _registered(name)
    of_policy, policy = found.options, found.policy
    given = dict(options or {})
    decode = _pick(DecodeOptions, given)
    if decode.prefill_tokens_max and not found.piggybacked:
        supported = ", ".join(
            other for other, registered in _POLICIES.items() if registered.piggybacked
        )
        raise ConfigError(
            f"policy {name} does not support decode.prefill_tokens_max (supported: {supported})"
        )
    chosen = _pick(of_policy, given)
    for option in given:
        known = [*_names(of_policy), *_names(DecodeOptions), *beside]
        hint = _whose(option) or nearest(option, known)
        raise ConfigError(f"policy {name} has no option {abridged(option)}{hint}")
    return policy(chosen, decode)


def decode_options(options: Mapping[str, object]) -> DecodeOptions:
    """Return the options for decoding among those of a policy."""
    return _pick(DecodeOptions, dict(options))


def own_way(name: str) -> str:
    """Return how a policy computes all prompts, after the words "computes prompts".

    Empty if a request may choose the strategy.
    """
    return _registered(name).own_way


def in_iterations(name: str) -> bool:
    """Return whether decode iterations compute all prompts under a policy."""
    return _registered(name).in_iterations


def policy_pairings(name: str) -> tuple[Pairing, ...]:
    """Return the gangs that a policy can use.

    Raises:
        ConfigError: there is no such policy.
    """
    return _registered(name).pairings


def check_pairing(name: str, pairing: Pairing) -> None:
    """Check that a policy can use the configured gangs.

    Raises:
        ConfigError: it cannot; the message says what each policy needs.
    """
    if pairing not in _registered(name).pairings:
        raise ConfigError(f"policy {name} cannot use {_GANGS[pairing]}: {_pairings()}")


def _registered(name: str) -> _Registered:
    """Return a policy of the list, or of the operator's own.

    Raises:
        ConfigError: there is none of this name.
    """
    if ":" in name:
        return _imported(name)
    if name not in _POLICIES:
        raise ConfigError(f"unknown scheduling policy {abridged(name)}{nearest(name, _POLICIES)}")
    return _POLICIES[name]


@functools.cache
def _imported(name: str) -> _Registered:
    """Import a policy named `module:Class`."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy {abridged(name)}: there is no module {error.name}; it has to be importable, "
            "for instance from the working directory or PYTHONPATH"
        ) from None
    except AttributeError:
        raise ConfigError(f"policy {abridged(name)}: the module has no such class") from None
    except Exception as error:
        # Whatever the operator's code raises, they need the place and not a traceback of ours.
        raise ConfigError(f"policy {abridged(name)}: importing it failed: {error!r}") from None
    missing = [part for part in _PARTS if not hasattr(found, part)]
    if missing:
        raise ConfigError(f"policy {abridged(name)} has no {', '.join(missing)}")
    options = getattr(found, "Options", _NoOptions)
    if not is_dataclass(options):
        raise ConfigError(f"policy {abridged(name)}: Options is no dataclass")
    return _Registered(
        options=options,
        policy=found,
        pairings=tuple(getattr(found, "pairings", ("pair",))),
        own_way=getattr(found, "own_way", ""),
        piggybacked=getattr(found, "piggybacked", False),
        in_iterations=getattr(found, "in_iterations", False),
    )


@dataclass(frozen=True)
class _NoOptions:
    """Options of a policy that has none."""


_PARTS = ("name", "priority", "decide", "fits", "whole_prompts", "regroups")
"""What every policy has, beside the options that it was made with."""
_GANGS = {"pair": "prefill and decode gangs", "elastic": "an elastic gang"}


def _pairings() -> str:
    """Return a sentence about the gangs that each policy needs."""
    needs: dict[tuple[Pairing, ...], list[str]] = {("pair",): [], ("elastic",): []}
    for name, registered in _POLICIES.items():
        needs.setdefault(registered.pairings, []).append(name)
    phrases = []
    for pairings, names in needs.items():
        both = len(pairings) > 1
        verb = ("takes" if both else "needs") if len(names) == 1 else ("take" if both else "need")
        if names:
            what = "either" if both else _GANGS[pairings[0]]
            named = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            phrases.append(f"{named} {verb} {what}")
    return ", ".join(phrases)


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _whose(option: str) -> str:
    """Return text to append for an option that other policies have."""
    owners = [
        name for name, registered in _POLICIES.items() if option in _names(registered.options)
    ]
    return f"; it is one of {' and '.join(owners)}" if owners else ""


def _pick(kind: type[Options], given: dict[str, object]) -> Options:
    """Remove the options of a kind from the given ones and return them."""
    picked: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in given:
            picked[field.name] = _checked(field.name, given.pop(field.name), field.type)
    return kind(**picked)


def _checked(name: str, value: object, kind: object) -> object:
    """Return the value of an option, checked against the annotation of its field."""
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"option {name} must be true or false, not {abridged(value)}")
        return value
    if kind == "Records":
        return _records(name, value)
    if kind == "str":
        if not isinstance(value, str):
            raise ConfigError(f"option {name} must be a word, not {abridged(value)}")
        return value
    if kind in ("float | str", "int | str"):
        return value if isinstance(value, str) else _number(name, value, str(kind).split()[0])
    return _number(name, value, kind)


def _records(name: str, value: object) -> tuple[tuple[object, ...], ...]:
    """Return a value as pairs of numbers."""
    pairs: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    made = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(f"option {name} must be pairs of numbers, not {abridged(value)}")
        made.append(tuple(_number(name, number, "float") for number in pair))
    return tuple(made)


def _number(name: str, value: object, kind: object) -> object:
    allowed: tuple[type, ...] = (int, float) if kind == "float" else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        what = "a number" if kind == "float" else "a whole number"
        raise ConfigError(f"option {name} must be {what}, not {abridged(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"option {name} must be finite, not {value}")
    return value
