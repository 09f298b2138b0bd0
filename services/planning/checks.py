"""Find the mistakes of a configuration that only its model, or the machine, makes mistakes.

`check_settings` needs the checkpoint alone, and runs wherever an application is built. The others
look at this machine. Each finding is one line that names the setting, its value and a remedy.
"""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from csps.kernels.rowwise_fp8 import unsupported_device
from csps.models.checkpoints.loading import without_fp8
from csps.models.network.spec import ModelSpec, read_spec
from csps.models.tokenizers.chat_template import read_chat_template
from csps.protocols.core.errors import ConfigError
from csps.services.planning.memory import one_line
from csps.services.settings.credentials import KEYS_VARIABLE, cluster_secret, known_keys
from csps.services.settings.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the ranks of a server can have."""

    cores: int
    gpus: int
    no_fp8: str | None = None
    """Reason why the GPUs cannot multiply FP8."""
    where: str = "this machine"


def resources_here() -> Resources:
    """Return the cores and GPUs of this machine."""
    import torch

    gpus = torch.cuda.device_count()
    return Resources(
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus,
        no_fp8=unsupported_device(torch.device("cuda", 0)) if gpus else None,
    )


def check_settings(settings: Settings) -> None:
    """Compare settings with the model and with each other.

    Raises:
        ConfigError: the model cannot be read, or lengths contradict one another.
    """
    with one_line("model"):
        spec = read_spec(settings.model_dir, settings.model_overrides)
    template = settings.chat_template
    with one_line("model" if template is None else f"chat_template: {template}"):
        read_chat_template(settings.model_dir, settings.chat_template)
    _check_lengths(settings, spec.max_positions)
    _check_windows(settings, spec)
    if settings.http.body_silence_s > settings.http.body_deadline_s:
        raise ConfigError(
            f"http.body_silence_s is {settings.http.body_silence_s:g}, but the whole body has "
            f"{settings.http.body_deadline_s:g} s (http.body_deadline_s): lower the first"
        )


def _check_lengths(settings: Settings, positions: int) -> None:
    longest = settings.max_positions
    if longest is not None and longest > positions:
        raise ConfigError(
            f"max_positions is {longest}, but the model has {positions}: lower it, or extend the "
            "model with model_overrides (docs/models.md)"
        )
    for role in settings.gangs:
        slots = slots_of(settings, role)
        if longest is not None and slots is not None and longest > slots:
            raise ConfigError(
                f"max_positions is {longest}, but {role}.kv_slots holds {slots} tokens on all "
                f"instances: raise {role}.kv_slots, set it to auto, or lower max_positions"
            )
    limit = min(value for value in (longest, positions) if value is not None)
    answer = settings.default_max_tokens
    if answer is not None and answer >= limit:
        raise ConfigError(
            f"default_max_tokens is {answer}, which leaves no room for a "
            f"prompt within {limit} positions: lower it"
        )
    prefill = slots_of(settings, settings.prefilling_role)
    prompt = limit if prefill is None else min(limit, prefill)
    if settings.max_body_bytes < prompt:
        raise ConfigError(
            f"max_body_bytes is {settings.max_body_bytes}, which is too little for a prompt of "
            f"{prompt} tokens: raise it to {4 * prompt} or more"
        )


def _check_windows(settings: Settings, spec: ModelSpec) -> None:
    given = settings.decode.window_slots if settings.elastic is None else None
    if given is None or given == "auto":
        return
    if spec.window is None or not spec.near_layers:
        raise ConfigError(
            f"decode.window_slots is {given}, but no layer of the model has a window: remove it"
        )
    if given < spec.window:
        raise ConfigError(
            f"decode.window_slots is {given}, less than the window of {spec.window} tokens that "
            f"one request takes: raise it to a multiple of {spec.window}, or set it to auto"
        )


def slots_of(settings: Settings, role: str) -> int | None:
    """Return the slots of all instances of a gang; None if they depend on the memory (`auto`)."""
    section = next(gang for name, gang in settings.gangs.items() if name == role)
    return None if section.kv_slots == "auto" else section.instances * section.kv_slots


def check_resources(settings: Settings, resources: Resources) -> None:
    """Compare ranks with the cores and GPUs that there are.

    Raises:
        ConfigError: Ray could never place the ranks, or they would have no use for what they get.
    """
    gpus = {role: gang.ranks * gang.num_gpus for role, gang in settings.gangs.items()}
    for role, gang in settings.gangs.items():
        if gang.num_gpus and settings.device == "cpu":
            raise ConfigError(
                f"{role}.num_gpus is {gang.num_gpus:g}, but device is cpu: set num_gpus to 0, or "
                "device to auto"
            )
        if gang.num_gpus and sum(gpus.values()) > resources.gpus:
            raise ConfigError(
                f"{role}.num_gpus is {gang.num_gpus:g}, so all ranks need {sum(gpus.values()):g} "
                f"GPUs, and {resources.where} has {resources.gpus}: lower instances or tp, set "
                "num_gpus to 0, or name other hardware (--hardware)"
            )
        if gang.num_gpus and settings.weight_dtype == "fp8" and resources.no_fp8 is not None:
            raise ConfigError(without_fp8(resources.no_fp8))
        if not gang.num_gpus and gang.threads > resources.cores:
            raise ConfigError(
                f"{role}.threads is {gang.threads}, and {resources.where} has "
                f"{resources.cores} cores: set it to at most {resources.cores}"
            )
    cpus = {role: gang.ranks * gang.num_cpus for role, gang in settings.gangs.items()}
    if sum(cpus.values()) > resources.cores:
        role = max(cpus, key=lambda one: cpus[one])
        raise ConfigError(
            f"{role}.num_cpus is {settings.gangs[role].num_cpus:g}, and {role}.instances is "
            f"{settings.gangs[role].instances}, so all ranks need {sum(cpus.values()):g} CPUs, and "
            f"{resources.where} has {resources.cores}: lower one of them; Ray only counts CPUs"
        )


def check_places(settings: Settings) -> None:
    """Check files, folders and hosts that processes on this machine will use.

    Raises:
        ConfigError: one cannot be used.
    """
    cluster_secret()
    _check_keys(settings)
    if settings.telemetry.otlp_endpoint is None and settings.telemetry.enabled:
        _check_writable("telemetry.spans_dir", Path(settings.telemetry.spans_dir))
    if (log := settings.scheduling.log) is not None:
        _check_writable("scheduling.log", Path(log))
    if (files := settings.kv_reuse.files) is not None:
        _check_writable("kv_reuse.files.path", Path(files.path))
        _check_room("kv_reuse.files.mib", Path(files.path), files.bytes)
    if (base := Path(settings.scaling_information_base)).is_dir():
        raise ConfigError(f"scaling_information_base: {base} is a directory: name a file")
    if settings.host != "auto":
        _check_own("host", settings.host, "auto, or an address of this machine")
    if (endpoint := settings.telemetry.otlp_endpoint) is not None:
        _check_resolves(
            "telemetry.otlp_endpoint",
            urlsplit(endpoint).hostname or endpoint,
            "name another one, or none, and traces go to telemetry.spans_dir",
        )


def check_listening(host: str) -> None:
    """Raise `ConfigError` if the server cannot listen on an address of this machine."""
    _check_own("http_options.host", host, "127.0.0.1, or 0.0.0.0 for all interfaces")


def _check_keys(settings: Settings) -> None:
    keys = known_keys(settings.api_keys_file)
    names = {entry.split()[0] for entry in keys if len(entry.split()) > 1}
    for name in settings.auth.names:
        # A name without a key is no mistake by itself: the file may get one while the server runs.
        close = difflib.get_close_matches(name, names, n=1)
        if name not in names and close:
            raise ConfigError(
                f"auth: no key of api_keys_file or {KEYS_VARIABLE} has the name {name!r}; did you "
                f"mean {close[0]!r}?"
            )


def _check_writable(setting: str, path: Path) -> None:
    """Try it: permissions say less than a file that is made, above all to root."""
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be used ({error.strerror}): name a folder that can be "
            "written"
        ) from None


def _check_room(setting: str, path: Path, needed: int) -> None:
    """Compare a limit of files with the disk: what is there already, and what is free."""
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    there = sum(file.stat().st_size for file in path.glob("*.kv")) if path.is_dir() else 0
    room = shutil.disk_usage(existing).free + there
    if needed > room:
        raise ConfigError(
            f"{setting} is {needed >> 20}, but the disk of {path} has room for {room >> 20}: lower "
            "it, or name another folder"
        )


def _check_own(setting: str, host: str, instead: str) -> None:
    _check_resolves(setting, host, f"set {instead}")
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{setting}: {host} is no address of this machine: set {instead}"
                ) from None
            raise ConfigError(f"{setting}: {host}: {error.strerror}: set {instead}") from None


def _check_resolves(setting: str, host: str, remedy: str) -> None:
    try:
        with suppress(UnicodeError):
            socket.getaddrinfo(host, None)
            return
    except socket.gaierror as error:
        raise ConfigError(
            f"{setting}: the host {host} does not resolve ({error.strerror}): {remedy}"
        ) from None
    raise ConfigError(f"{setting}: {host} is no host: {remedy}")
