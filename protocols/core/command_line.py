"""Parse the arguments of a subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from csps.protocols.core.errors import abridged, closest

MISUSED = 2
"""Exit status, as in argparse."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the likeliest option for an unknown one."""

    # Not in `parse_args`, which the parsers of subcommands never call.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all arguments; unlike argparse's, this leaves none to the caller."""
        if args is not None and self._subparsers is None:
            # First, since a misspelled option is also missing where it is required.
            self._check_options(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Print one line, and end with the status of misuse."""
        self.exit(MISUSED, f"{self.prog}: {message}\n")

    def _check_options(self, words: Sequence[str]) -> None:
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            # argparse takes the beginning of an option for it, and no blank within.
            known = any(option.startswith(name) for option in self._option_string_actions)
            if word.startswith("--") and " " not in word and not known:
                self._refuse(word)

    def _refuse(self, word: str) -> NoReturn:
        shown = [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]
        hint = closest(word.partition("=")[0], shown) or f"; see {self.prog} --help"
        self.error(f"unknown argument {abridged(word)}{hint}")
