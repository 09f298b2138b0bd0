"""Parse the options that describe a server: ours, and those of `vllm serve`.

`services.settings.vllm_options` lists vLLM's. An option of its list that has no setting here is
taken with a line that says why it changes nothing, or refused with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from csps.protocols.core.errors import ConfigError, abridged
from csps.services.settings.vllm_options import (
    ALIASES,
    HARMLESS,
    IGNORED,
    KV_DTYPES,
    REASONING,
    REFUSED,
    TOOL_FORMATS,
    WEIGHT_DTYPES,
    canonical,
)

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""The setting `dtype` by vLLM's names."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a server."""
    parser.add_argument(
        "model",
        nargs="?",
        help="directory of a Hugging Face checkpoint, id of a model of the Hub, or a shipped "
        "model's name (default: the configuration's)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="configuration (default: config.yaml of this directory, or the one that ships)",
    )
    _add_server(parser)
    _add_model(parser)
    _add_gangs(parser)
    _add_other_options_of_vllm(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API")
    group.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, help="HTTP port (default: 8000)")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that clients need, as KEY or NAME KEY; may be given several times. Other users "
        "of this machine see it in the list of processes: CSPS_API_KEYS hides it",
    )
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="name in the API")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", dest="model_option", metavar="MODEL", help="the same as MODEL")
    group.add_argument("--revision", help="branch, tag or commit of a model of the Hub")
    group.add_argument("--download-dir", metavar="DIR", help="cache for models of the Hub")
    group.add_argument("--hf-token", nargs="?", const="", metavar="TOKEN", help="token for the Hub")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of weights, activations and KV; auto is bfloat16 where the device has it",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=_parser_of(KV_DTYPES),
        metavar="FORM",
        help="form of KV: auto is that of --dtype, int8 has 8 bits and is for CPUs",
    )
    group.add_argument(
        "--quantization",
        type=_weight_dtype,
        metavar="FORM",
        help="fp8: store feed-forward weights in FP8, one scale per row (default: --dtype, also "
        "for quantized checkpoints)",
    )
    group.add_argument(
        "--max-model-len",
        type=_tokens,
        metavar="TOKENS",
        help="longest prompt plus answer, such as 131072, 128K (binary) or 128k (decimal); auto is "
        "the model's own limit",
    )
    group.add_argument(
        "--hf-overrides",
        type=_json_object,
        metavar="JSON",
        help="values that replace those of config.json, for instance rope_parameters",
    )
    group.add_argument("--rope-scaling", type=_json_object, metavar="JSON", help=argparse.SUPPRESS)
    group.add_argument("--rope-theta", type=float, metavar="NUMBER", help=argparse.SUPPRESS)
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template for chat requests")
    group.add_argument(
        "--tool-call-parser",
        type=_parser_of(TOOL_FORMATS),
        metavar="FORMAT",
        help=f"how the model writes calls of tools: {', '.join(TOOL_FORMATS)} (default: as its "
        "template shows)",
    )
    group.add_argument(
        "--reasoning-parser",
        type=_parser_of(REASONING),
        metavar="FORMAT",
        help=f"how the model writes reasoning: {', '.join(REASONING)}",
    )


def _add_gangs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--prefill",
        type=_count,
        metavar="COPIES",
        help="copies of the weights that compute prompts",
    )
    group.add_argument(
        "--decode", type=_count, metavar="COPIES", help="copies of the weights that sample tokens"
    )
    group.add_argument(
        "--elastic",
        type=_count,
        metavar="COPIES",
        help="copies of the weights that do both, in place of --prefill and --decode",
    )
    group.add_argument(
        "--tensor-parallel-size", type=_count, metavar="RANKS", help="ranks of each copy (-tp)"
    )
    group.add_argument("--policy", help="scheduling policy")
    group.add_argument(
        "--max-num-seqs", type=_count, metavar="REQUESTS", help="requests that decode at a time"
    )
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], help="where ranks compute")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="FRACTION",
        help="share of a device's memory for weights and KV; makes kv_slots auto",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="retain KV for prompts with a common prefix",
    )
    group.add_argument("--otlp-traces-endpoint", metavar="URL", help=argparse.SUPPRESS)


class _Note(argparse.Action):
    """Notes an option that changes nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = canonical(option_string or "").removeprefix("no-")
        namespace.notes = [*namespace.notes, f"{option_string}: no effect, {IGNORED[name].why}"]


class _Refuse(argparse.Action):
    """Refuses an option, unless its value says what is so anyway."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = canonical(option_string or "")
        off = name.startswith("no-") and name.removeprefix("no-") in REFUSED
        if not off and str(values) not in HARMLESS.get(name, ()):
            raise ConfigError(f"--{name}: {REFUSED[name]}")


def _add_other_options_of_vllm(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(notes=[])
    for name, option in IGNORED.items():
        both = [f"--{name}"] if option.takes_value else [f"--{name}", f"--no-{name}"]
        arity = None if option.takes_value else 0
        parser.add_argument(*both, action=_Note, nargs=arity, help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(f"--{name}", action=_Refuse, nargs="?", help=argparse.SUPPRESS)
        parser.add_argument(f"--no-{name}", action=_Refuse, nargs=0, help=argparse.SUPPRESS)


def as_parsed(words: Sequence[str]) -> list[str]:
    """Return a command line in the parser's spelling: long names, dashes, `--name value` for a part
    of a JSON value (`--compilation-config.mode 3`)."""
    parsed = []
    for word in words:
        name, equals, value = word.partition("=")
        head, dot, _ = name.partition(".")
        if head in ALIASES and (dot or not word[len(head) :] or equals):
            name = ALIASES[head]
        elif word.startswith("--"):
            name = f"--{canonical(name)}"
        elif (short := next((a for a in ("-O", "-q") if word.startswith(a)), None)) is not None:
            parsed += [ALIASES[short], word.removeprefix(short)]
            continue
        else:
            parsed.append(word)
            continue
        parsed.append(f"{name}{equals}{value}")
    return parsed


def _parser_of(known: Mapping[str, str]) -> Callable[[str], str]:
    """Return the conversion of the name of one of vLLM's parsers to a setting."""

    def setting(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(
                f"the format {abridged(text)} is not known here; known: {', '.join(known)}"
            )
        return known[text]

    return setting


def _weight_dtype(text: str) -> str:
    if text not in WEIGHT_DTYPES:
        raise argparse.ArgumentTypeError(
            f"csps does not quantize to {abridged(text)}. Checkpoints that are already in FP8, "
            "MXFP4 or compressed-tensors are detected: drop the option. fp8 keeps feed-forward "
            "weights in FP8"
        )
    return WEIGHT_DTYPES[text]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {abridged(text)}")
    return int(text)


def _tokens(text: str) -> int | None:
    if text in ("auto", "-1"):
        return None
    match = _TOKENS.fullmatch(text)
    count = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if count < 1 or count != int(count):
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens such as 131072, 128K or auto, got {abridged(text)}"
        )
    return int(count)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {abridged(value)}")
    return value
