"""Read and check `config.yaml` before anything is started.

Ray's own schema ignores misspelled keys; here each is an error that names the nearest known one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import csps
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.services.settings.devices import check_gpus
from csps.services.settings.replicas import check_override
from csps.services.settings.settings import Settings, first_error, shipped_models
from csps.services.settings.vllm_options import hint_of

IMPORT_PATH = "csps.services.app:build"
DEFAULT_PORT = 8000
LAST_PORT = 65_535
SERVE_DEFAULT_NAME = "default"
"""Name of an application that the file does not name."""
CONFIG_FILE = Path("config.yaml")
"""Configuration of the working directory."""
_RESOLVED = {
    "model",
    "served_model_name",
    "chat_template",
    "api_keys_file",
    "scaling_information_base",
    "scheduling",
    "telemetry",
    "tls",
}
"""Settings with a path, which processes elsewhere would resolve in their own working directory."""


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """A checked Serve configuration."""

    data: dict[str, Any]
    """Configuration for `serve deploy`, with absolute paths."""
    settings: Settings
    host: str
    port: int

    @property
    def application_name(self) -> str:
        """The name that Serve knows the application by."""
        return str(_application(self.data).get("name", SERVE_DEFAULT_NAME))

    @property
    def application(self) -> dict[str, Any]:
        """The application as Serve knows it; `args` has the settings."""
        # Serve gives applications the logging of the whole file.
        logging = {key: self.data[key] for key in ("logging_config",) if key in self.data}
        return {**logging, **_application(self.data)}

    @property
    def url(self) -> str:
        """The API's address, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"


def shipped_config() -> Path:
    """Return the configuration that ships: of the included model, on two cores."""
    return shipped_models().parent / CONFIG_FILE


def find_config(given: Path | None) -> Path:
    """Return the configuration to use: the given one, that of the working directory, or the one
    that ships."""
    if given is not None:
        return given
    return CONFIG_FILE if CONFIG_FILE.exists() else shipped_config()


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                again = f"again in line {key_node.start_mark.line + 1}"
                raise ConfigError(f"{key} is given twice, {again}: remove one")
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep=deep)


def read_config(
    path: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    args: Mapping[str, Any] | None = None,
    each_gang: Mapping[str, Any] | None = None,
) -> DeployConfig:
    """Read the configuration in `path`.

    Args:
        host: in place of the file's.
        port: in place of the file's.
        args: settings in place of the file's; a section replaces the keys that it has. An elastic
            gang replaces the other two, and either of these replaces it.
        each_gang: settings in place of the file's of every gang, whichever there are.

    Raises:
        ConfigError: one line that says what is wrong, and where.
    """
    try:
        data = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"cannot read {path}: {why}") from None
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(exc).split())}") from None
    listening = {"host": host, "port": port}
    try:
        return _check(data, listening, args or {}, each_gang or {})
    except ConfigError as exc:
        given = args or each_gang or any(value is not None for value in listening.values())
        where = f"{path} with the options given" if given else path
        raise ConfigError(f"{where}: {exc}") from None


def _check(
    data: Any,
    listening: Mapping[str, Any],
    args: Mapping[str, Any],
    each_gang: Mapping[str, Any],
) -> DeployConfig:
    _check_keys(data)
    application = _application(data)
    application["args"] = _changed(application.get("args") or {}, args, each_gang)
    settings = Settings.model_validate(application.get("args") or {}).resolved()
    check_gpus(settings)
    settings.load_tls()  # an error here is plainer than every process's
    for deployment in application.get("deployments") or []:
        check_override(deployment, settings)
    http = {"host": "127.0.0.1", "port": DEFAULT_PORT, **(data.get("http_options") or {})}
    http |= {name: value for name, value in listening.items() if value is not None}
    _check_listening(http)
    args = {
        **application["args"],
        **settings.model_dump(include=_RESOLVED),
        "revision": settings.revision or _code_digest(),
    }
    application = {**application, "args": args, **_own_modules(application, settings)}
    resolved = {**data, "http_options": http, "applications": [application]}
    _check_serve(resolved)
    return DeployConfig(data=resolved, settings=settings, host=http["host"], port=http["port"])


@cache
def _code_digest() -> str:
    """Return a digest of the installed package: Serve replaces nothing if only code has changed."""
    package = Path(csps.__file__).parent
    digest = sha256()
    for folder, _, files in sorted(os.walk(package, followlinks=True)):
        for path in sorted(Path(folder, name) for name in files if name.endswith(".py")):
            text = path.read_bytes()
            # Without the lengths, two different trees could give the same bytes.
            digest.update(f"{path.relative_to(package)} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


_PAIR, _ELASTIC = ("prefill", "decode"), ("elastic",)


def _changed(args: Any, changes: Mapping[str, Any], each_gang: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes; see `read_config`."""
    _check_mapping("args: ", args)
    changed = dict(args)
    for name in _PAIR if "elastic" in changes else _ELASTIC if set(_PAIR) & set(changes) else ():
        changed.pop(name, None)
    sections = _ELASTIC if changed.get("elastic") or "elastic" in changes else _PAIR
    of_gangs = dict.fromkeys(sections, each_gang) if each_gang else {}
    for name, value in [*changes.items(), *of_gangs.items()]:
        given = changed.get(name)
        both = isinstance(given, Mapping) and isinstance(value, Mapping)
        changed[name] = {**given, **value} if both else value  # type: ignore[dict-item]
    return changed


def _check_listening(http: Mapping[str, Any]) -> None:
    host, port = http["host"], http["port"]
    if not isinstance(host, str):
        raise ConfigError(f"http_options.host: must be a host's address, got {abridged(host)}")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= LAST_PORT:
        raise ConfigError(
            f"http_options.port: must be an integer from 1 to {LAST_PORT}, got {abridged(port)}"
        )


def _check_keys(data: Any) -> None:
    """Raise ConfigError if Serve's own part of the file has a key that Serve does not know."""
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        LoggingConfig,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    if data is None:
        raise ConfigError("is empty; `csps init --force` writes one with every setting")
    _check_mapping("", data)
    _known("", data, ServeDeploySchema.model_fields)
    _known("http_options", data.get("http_options"), HTTPOptionsSchema.model_fields)
    _known("logging_config", data.get("logging_config"), LoggingConfig.model_fields)
    for application in data.get("applications") or []:
        _check_mapping("applications: ", application)
        _known("applications", application, ServeApplicationSchema.model_fields)
        for deployment in application.get("deployments") or []:
            _known("applications.deployments", deployment, DeploymentSchema.model_fields)


def _own_modules(application: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the environment in which the server's processes find a policy that lies in the working
    directory; nothing for a policy of the list."""
    module, colon, _ = settings.scheduling.policy.partition(":")
    if not colon or not list(Path().glob(f"{module.split('.')[0]}*")):
        return {}
    given = dict(application.get("runtime_env") or {})
    variables = dict(given.get("env_vars") or {})
    path = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *([path] if path else [])])
    return {"runtime_env": {**given, "env_vars": variables}}


def _check_serve(data: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value in Serve's own part of the file is wrong, or hides the API."""
    from ray.serve.schema import ServeDeploySchema

    if data.get("proxy_location") == "Disabled":
        raise ConfigError("proxy_location is Disabled, so nothing would listen: set it to HeadOnly")
    prefix = _application(data).get("route_prefix", "/")
    if prefix != "/":
        raise ConfigError(
            f"applications: route_prefix is {abridged(prefix)}, and clients expect /v1: set it to /"
        )
    try:
        ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(first_error(error)) from None


def _known(where: str, section: Any, allowed: Mapping[str, Any]) -> None:
    if section is None:
        return
    prefix = f"{where}: " if where else ""
    _check_mapping(prefix, section)
    for key in section:
        if key not in allowed:
            raise ConfigError(
                f"{prefix}unknown setting {abridged(key)}"
                f"{hint_of(str(key)) or nearest(str(key), allowed)}"
            )


def _check_mapping(prefix: str, section: Any) -> None:
    if not isinstance(section, Mapping):
        raise ConfigError(f"{prefix}expected a mapping, got {abridged(section)}")


def _application(data: Mapping[str, Any]) -> dict[str, Any]:
    paths = [application.get("import_path") for application in data.get("applications") or []]
    if paths.count(IMPORT_PATH) != 1:
        raise ConfigError(
            f"applications: expected one with import_path {IMPORT_PATH}, got {abridged(paths)}"
        )
    return dict(data["applications"][paths.index(IMPORT_PATH)])
