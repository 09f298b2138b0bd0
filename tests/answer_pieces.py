"""What the parts of an answer come to, whatever format its model writes."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.http.harmony_parts import Splitter

Found = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the name and arguments of each call."""


def found_in(parts: Splitter, pieces: Sequence[str]) -> Found:
    """Return what is found in an answer that comes in pieces."""
    found = [part for piece in pieces for part in parts.push(piece)] + parts.flush()
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for part in found:
        if part.kind == "call":
            assert part.call == len(calls)
            calls.append((part.text, ""))
        elif part.kind == "arguments":
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.text)
        else:
            texts[part.kind] += part.text
    assert parts.calls == len(calls)
    return texts["reasoning"], texts["content"], calls
