"""Run `csps init`: write a `config.yaml` that says what every setting is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.services.launch.deploy_config import CONFIG_FILE, IMPORT_PATH
from csps.services.settings.config_schema import SCHEMA_FILE, attribute_docs
from csps.services.settings.settings import ElasticSettings, Settings

WIDTH = 96
_SET: dict[str, tuple[str, ...]] = {
    "": ("model",),
    "prefill": ("instances", "tp"),
    "decode": ("instances", "tp"),
}
"""Settings that are not comments, by section: those that everyone changes."""
_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# A server of csps: `csps check-config` checks this file and says what fits, `csps serve` starts it,
# and on a Ray cluster `serve deploy` does. A commented setting has its default.
proxy_location: HeadOnly
http_options:
  host: 127.0.0.1 # 0.0.0.0 lets other machines reach it: set api_keys_file below
  port: 8000
logging_config:
  log_level: INFO
  enable_access_log: false
applications:
  - name: csps
    route_prefix: /
    import_path: {IMPORT_PATH}
    args:
"""


def init(argv: Sequence[str]) -> None:
    """Write a commented configuration."""
    parser = CommandParser(
        prog="csps init", description="Write a config.yaml with every setting and its default."
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=CONFIG_FILE, help=f"(default: {CONFIG_FILE})"
    )
    parser.add_argument("--model", default="needle", help="value of the setting model")
    parser.add_argument("--force", action="store_true", help="replace the file if there is one")
    arguments = parser.parse_args(argv)
    path: Path = arguments.file
    try:
        with path.open("w" if arguments.force else "x") as file:
            file.write(commented_config(arguments.model))
    except FileExistsError:
        raise ConfigError(f"{path} exists; --force replaces it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"{path}: check it with `csps check-config`, serve it with `csps serve`")


def commented_config(model: str) -> str:
    """Return a configuration with every setting."""
    defaults = Settings(model=model)
    lines = [*_section("", defaults, set_in="")]
    return _HEAD + textwrap.indent("\n".join(lines), " " * 6) + "\n"


def _section(prefix: str, section: BaseModel, *, set_in: str | None) -> Iterator[str]:
    """Yield the lines of a section.

    Args:
        prefix: what stands before its settings.
        set_in: its key in `_SET`; None if the whole section is a comment, which becomes valid when
            one mark is taken from each of its lines.
    """
    texts = attribute_docs(type(section))
    for name, value in section:
        if name == "elastic" and isinstance(section, Settings):
            value = ElasticSettings()
        shown = set_in is not None and name in _SET.get(set_in, ())
        opened = isinstance(value, BaseModel) and name in _SET
        mark = "" if shown or opened or set_in is None else "# "
        text = texts.get(name) or (value.__doc__ if isinstance(value, BaseModel) else "")
        yield from _comment(prefix, text or "")
        if isinstance(value, BaseModel):
            yield f"{prefix}{mark}{name}:"
            yield from _section(f"{prefix}{mark}  ", value, set_in=name if opened else None)
        else:
            yield f"{prefix}{mark}{name}: {_yaml(value)}"


def _comment(prefix: str, text: str) -> Iterator[str]:
    marked = f"{prefix}# "
    yield from textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=marked, subsequent_indent=marked
    )


def _yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    dumped = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    return dumped.removesuffix("...\n").strip()
