"""Policies by the names and options of `scheduling: {policy: NAME, ...}` in `config.yaml`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
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
"""A gang that prefills and one that decodes, or one that does both."""


class _Known(NamedTuple):
    options: type[Any]
    policy: Callable[[Any, DecodeOptions], Policy]
    pairings: tuple[Pairing, ...]
    own_way: str = ""
    """How it computes prompts, where a request cannot choose a strategy for them."""
    piggybacked: bool = False
    """A gang that only decodes may compute ends of prompts."""


_POLICIES: dict[str, _Known] = {
    "chunked_prefill": _Known(
        ChunkedPrefillOptions, ChunkedPrefill, ("pair", "elastic"), "in pieces beside answers"
    ),
    "context_parallel": _Known(
        ContextParallelOptions, ContextParallel, ("pair", "elastic"), piggybacked=True
    ),
    "csps": _Known(CspsOptions, Csps, ("pair",), piggybacked=True),
    "fixed_sp": _Known(FixedSpOptions, FixedSp, ("pair",)),
    "loongserve": _Known(
        LoongServeOptions, LoongServe, ("elastic",), "around rings that it chooses itself"
    ),
    "tetris": _Known(TetrisOptions, Tetris, ("pair",)),
}


def make_policy(
    name: str, options: Mapping[str, object] | None = None, *, beside: Iterable[str] = ()
) -> Policy:
    """A policy with its options.

    Args:
        name: as in the settings.
        options: by name; those of decoding stand beside the policy's own.
        beside: what else may stand where the options do, and may have been meant.

    Raises:
        ConfigError: an unknown name or option, or a value that is out of range.
    """
    if name not in _POLICIES:
        raise ConfigError(f"unknown scheduling policy {abridged(name)}{nearest(name, _POLICIES)}")
    of_policy, policy, *_ = _POLICIES[name]
    given = dict(options or {})
    decode = _pick(DecodeOptions, given)
    if decode.prefill_tokens_max and not _POLICIES[name].piggybacked:
        riding = " and ".join(it for it, known in _POLICIES.items() if known.piggybacked)
        raise ConfigError(
            f"policy {name} computes no ends of prompts on a gang that only decodes; "
            f"prefill_tokens_max is for {riding}"
        )
    chosen = _pick(of_policy, given)
    for option in given:
        known = [*_names(of_policy), *_names(DecodeOptions), *beside]
        hint = _whose(option) or nearest(option, known)
        raise ConfigError(f"policy {name} has no option {abridged(option)}{hint}")
    return policy(chosen, decode)


def own_way(name: str) -> str:
    """How a policy computes all prompts, behind "computes prompts"; empty where the strategy that a
    request asks for is kept."""
    return _POLICIES[name].own_way if name in _POLICIES else ""


def check_pairing(name: str, pairing: Pairing) -> None:
    """See that a policy can do with the gangs that there are.

    Raises:
        ConfigError: it cannot; the message says what each policy needs.
    """
    if pairing not in _POLICIES[name].pairings:
        raise ConfigError(f"policy {name} cannot use {_GANGS[pairing]}: {_pairings()}")


_GANGS = {"pair": "prefill and decode gangs", "elastic": "an elastic gang"}


def _pairings() -> str:
    """What each policy needs, in a sentence."""
    needs: dict[tuple[Pairing, ...], list[str]] = {("pair",): [], ("elastic",): []}
    for name, known in _POLICIES.items():
        needs.setdefault(known.pairings, []).append(name)
    parts = []
    for pairings, names in needs.items():
        both = len(pairings) > 1
        verb = ("takes" if both else "needs") if len(names) == 1 else ("take" if both else "need")
        if names:
            what = "either" if both else _GANGS[pairings[0]]
            named = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            parts.append(f"{named} {verb} {what}")
    return ", ".join(parts)


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _whose(option: str) -> str:
    """Text to append for an option that other policies have."""
    owners = [name for name, known in _POLICIES.items() if option in _names(known.options)]
    return f"; it is one of {' and '.join(owners)}" if owners else ""


def _pick(kind: type[Options], given: dict[str, object]) -> Options:
    """Take the options of a kind out of those given."""
    picked: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in given:
            picked[field.name] = _checked(field.name, given.pop(field.name), field.type)
    return kind(**picked)


def _checked(name: str, value: object, kind: object) -> object:
    """The value of an option of a kind, as its field is annotated."""
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
    if kind == "float | str":
        return value if isinstance(value, str) else _number(name, value, "float")
    return _number(name, value, kind)


def _records(name: str, value: object) -> tuple[tuple[object, ...], ...]:
    """Pairs of numbers."""
    pairs: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    made = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(f"option {name} must be pairs of numbers, not {abridged(value)}")
        made.append(tuple(_number(name, it, "float") for it in pair))
    return tuple(made)


def _number(name: str, value: object, kind: object) -> object:
    allowed: tuple[type, ...] = (int, float) if kind == "float" else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        what = "a number" if kind == "float" else "a whole number"
        raise ConfigError(f"option {name} must be {what}, not {abridged(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"option {name} must be finite, not {value}")
    return value
