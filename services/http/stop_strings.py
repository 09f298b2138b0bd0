"""Stop strings: found in text across token boundaries, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one answer for the strings that end it.

    Text that could be the beginning of a stop string is held back until more text decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False
        """A stop string has appeared; nothing more will be returned."""

    def push(self, text: str) -> str:
        """What can be shown now that `text` has come."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        end = self._first_stop(text)
        if end is not None:
            self.found, self._held = True, ""
            return text[:end]
        certain = len(text) - self._doubtful(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the leftmost stop string begins."""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _doubtful(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
