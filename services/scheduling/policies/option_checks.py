"""What the options of all policies are checked by."""

from __future__ import annotations

from csps.protocols.errors import ConfigError


def check_least(options: object, least: int, *names: str) -> None:
    """Refuse the first of these options that is less than `least`.

    Raises:
        ConfigError: it names the option and the value.
    """
    for name in names:
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"option {name} must be at least {least}, not {value}")
