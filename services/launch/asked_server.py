"""Turn the options of a command line into a configuration: settings of their own, a model of the
Hugging Face Hub, the GPUs of this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csps.protocols.core.errors import ConfigError, abridged
from csps.services.launch.deploy_config import (
    DeployConfig,
    find_config,
    read_config,
    shipped_config,
)
from csps.services.launch.serve_options import DTYPES
from csps.services.settings.credentials import KEYS_VARIABLE, known_keys
from csps.services.settings.hub import download_model, is_hub_id
from csps.services.settings.settings import Settings, shipped_models

ONE_GANG_POLICY = "chunked_prefill"
"""Policy of an elastic gang that nobody chose one for."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A server that a command line asks for."""

    config: Path
    model: str | None
    """None takes the configuration's."""
    host: str | None = None
    port: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings in place of the configuration's."""
    each_gang: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every gang, whichever there are."""
    revision: str | None = None
    cache_dir: str | None = None
    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines about options that change nothing."""

    def read(self, *, download: bool) -> DeployConfig:
        """Return the configuration of this server.

        Args:
            download: fetch a model of the Hub; otherwise it has to be in the cache.

        Raises:
            ConfigError: a setting is wrong, or there is no such model.
            FaultError: the model could not be downloaded.
        """
        args = dict(self.args)
        if self.model is not None:
            args |= self._of_model(self.model, download=download)
        return read_config(
            self.config, host=self.host, port=self.port, args=args, each_gang=self.each_gang
        )

    def _of_model(self, model: str, *, download: bool) -> dict[str, Any]:
        shipped = (shipped_models() / model / "config.json").is_file()
        if shipped or not is_hub_id(model) or not download:
            return {"model": model}
        folder = download_model(model, revision=self.revision, cache_dir=self.cache_dir)
        return {"served_model_name": model, **self.args, "model": str(folder)}

    def give_keys(self) -> None:
        """Put the keys where the router reads them, beside those of the environment.

        Raises:
            ConfigError: one is not a key.
        """
        if self.keys:
            given = os.environ.get(KEYS_VARIABLE)
            os.environ[KEYS_VARIABLE] = ",".join([*([given] if given else []), *self.keys])
            known_keys(None)


def asked(arguments: argparse.Namespace, *, gpus: int) -> Asked:
    """Return what parsed options ask for.

    Args:
        gpus: GPUs of this machine. The configuration that ships is for a machine without any: with
            some, and no other configuration, ranks get them.

    Raises:
        ConfigError: options contradict one another.
    """
    if arguments.model is not None and arguments.model_option is not None:
        raise ConfigError(f"--model: the model is already {abridged(arguments.model)}")
    if arguments.hf_token:
        os.environ["HF_TOKEN"] = arguments.hf_token
    config = find_config(arguments.config)
    args, each_gang = _settings(arguments), _of_each_gang(arguments)
    if config == shipped_config() and gpus and args.get("device") != "cpu":
        args = {"dtype": "auto", **args, **_gangs_on(gpus, each_gang.get("tp", 1), args)}
        each_gang = {"num_gpus": 1, "kv_slots": "auto", **each_gang}
    return Asked(
        config=config,
        model=arguments.model or arguments.model_option,
        host=arguments.host,
        port=arguments.port,
        args=args,
        each_gang=each_gang,
        revision=arguments.revision,
        cache_dir=arguments.download_dir,
        keys=tuple(arguments.api_key or ()),
        notes=tuple(arguments.notes),
    )


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that options give."""
    args: dict[str, Any] = {
        "served_model_name": _only_name(arguments.served_model_name),
        "dtype": DTYPES.get(arguments.dtype),
        "kv_dtype": arguments.kv_cache_dtype,
        "weight_dtype": arguments.quantization,
        "max_positions": arguments.max_model_len,
        "model_overrides": _overrides(arguments),
        "chat_template": arguments.chat_template,
        "tool_format": arguments.tool_call_parser,
        "reasoning": arguments.reasoning_parser,
        "device": arguments.device,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "kv_reuse": _section(enabled=arguments.enable_prefix_caching),
        "telemetry": _section(otlp_endpoint=arguments.otlp_traces_endpoint),
        "scheduling": _section(policy=arguments.policy, max_batch=arguments.max_num_seqs),
    }
    for role in ("prefill", "decode", "elastic"):
        args[role] = _section(instances=getattr(arguments, role))
    if args["elastic"] is not None:
        args["scheduling"] = {"policy": ONE_GANG_POLICY, **(args["scheduling"] or {})}
    return {name: value for name, value in args.items() if value is not None}


def _of_each_gang(arguments: argparse.Namespace) -> dict[str, Any]:
    return (
        _section(
            tp=arguments.tensor_parallel_size,
            kv_slots=None if arguments.gpu_memory_utilization is None else "auto",
        )
        or {}
    )


def _section(**values: Any) -> dict[str, Any] | None:
    given = {name: value for name, value in values.items() if value is not None}
    return given or None


def _overrides(arguments: argparse.Namespace) -> dict[str, Any] | None:
    named = _section(rope_scaling=arguments.rope_scaling, rope_theta=arguments.rope_theta)
    # A null in the JSON stays: a model with `"sliding_window": null` has no window.
    return {**(arguments.hf_overrides or {}), **(named or {})} or None


def _only_name(names: Sequence[str] | None) -> str | None:
    if names is not None and len(names) > 1:
        raise ConfigError(f"--served-model-name: a model has one name, got {len(names)}")
    return names[0] if names else None


def _gangs_on(gpus: int, tp: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return gangs that use all GPUs of this machine: half of the copies of the weights compute
    prompts and half decode, or one does both. Nothing if the command line chooses."""
    copies = gpus // tp
    if not copies:
        raise ConfigError(f"--tensor-parallel-size: {tp} ranks need {tp} GPUs, there are {gpus}")
    if any(role in args for role in ("prefill", "decode", "elastic")):
        return {}
    if copies == 1:
        scheduling = {"policy": ONE_GANG_POLICY, **args.get("scheduling", {})}
        return {"elastic": {"instances": 1}, "scheduling": scheduling}
    return {
        "prefill": {"instances": copies - copies // 2},
        "decode": {"instances": copies // 2},
    }


def gpus_here() -> int:
    """Count the GPUs that ranks on this machine can use."""
    import torch

    return torch.cuda.device_count()


def serves_shipped_model(settings: Settings) -> bool:
    """Return True if the served model is one that ships."""
    return settings.model_dir.parent == shipped_models()
