"""What can be known of a long text's tokens before all of them are made.

Tokenizing a text at once takes 120 times its bytes of memory, and a text may be much longer than
the model has positions. Two facts about a tokenizer help: where a text can be cut without changing
its tokens, and how many bytes one token stands for at most. Both are read off its description, and
neither is assumed where the description has parts that this file does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

PIECE_CHARACTERS = 128 * 1024
"""Length from which on a text is tokenized in pieces."""

_WORD_END = re.compile("[A-Za-z](?=[ \n\t\r])")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of GPT-2, and the default of `ByteLevel`."""
_CUT_AT_SPACES = frozenset(
    {
        _GPT2_WORDS,
        # Llama 3, GLM-4
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Patterns of words of which none goes on from a letter to a space, or depends on what is there."""
_NFC_FACTOR = 3
"""NFC turns at most so many bytes into one."""
_EVERY_BYTE = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""Entries by which BPE of SentencePiece's kind spells what has no other."""


@dataclass(frozen=True, kw_only=True)
class LongTexts:
    """Facts about one tokenizer."""

    cut_at_spaces: bool
    """A text may be cut between a letter and a space behind it."""
    longest_token_bytes: int | None
    """Most bytes of a text that one token stands for; None if no limit is known."""

    @classmethod
    def of(cls, backend: Backend) -> LongTexts:
        """Read the facts off a tokenizer."""
        normalizers, words = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            # Such a token takes the spaces beside it, however many.
            return cls(cut_at_spaces=False, longest_token_bytes=None)
        return cls(
            cut_at_spaces=all(step["type"] == "NFC" for step in normalizers)
            and _pattern(words) in _CUT_AT_SPACES
            and not any(_WORD_END.search(token.content) for token in added),
            longest_token_bytes=_longest_token(backend, normalizers, words),
        )

    def least_tokens(self, size: int) -> int:
        """Return how many tokens a text of `size` bytes has at least."""
        longest = self.longest_token_bytes
        return 1 if longest is None else -(-size // longest)

    def pieces(self, text: str) -> Iterator[str]:
        """Yield parts of a text whose tokens, joined, are those of the text."""
        start = 0
        while self.cut_at_spaces and start + PIECE_CHARACTERS < len(text):
            end = _WORD_END.search(text, start + PIECE_CHARACTERS)
            if end is None:
                break
            yield text[start : end.end()]
            start = end.end()
        yield text[start:]


Step = dict[str, Any]
"""One step of a tokenizer, as tokenizer.json describes it."""


def _steps(part: Any) -> list[Step]:
    """Return the steps of a normalizer or pre-tokenizer."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(step: Step) -> Iterator[Step]:
    if step["type"] == "Sequence":
        for inner in step.get("normalizers") or step.get("pretokenizers") or ():
            yield from _flat(inner)
    else:
        yield step


def _pattern(words: list[Step]) -> str | None:
    """Return the pattern of words before byte-level BPE; None if there is no single one."""
    match words:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return _GPT2_WORDS
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:  # fmt: skip
            return pattern
    return None


def _longest_token(backend: Backend, normalizers: list[Step], words: list[Step]) -> int | None:
    """Return the most bytes of a text in one token; None if a step may lose some of them."""
    if not isinstance(backend.model, models.BPE):
        return None
    if not all(map(_loses_nothing, normalizers)) or not all(map(_loses_nothing, words)):
        return None
    entries = backend.get_vocab(with_added_tokens=False).keys()
    added = (token.content.encode() for token in backend.get_added_tokens_decoder().values())
    if any(step["type"] == "ByteLevel" for step in words):
        if not entries >= set(pre_tokenizers.ByteLevel.alphabet()):
            return None
        longest = max(map(len, entries))  # a character is a byte
    elif backend.model.byte_fallback and entries >= _EVERY_BYTE:
        longest = max(len(entry.encode()) for entry in entries)
    else:
        return None
    composed = any(step["type"] == "NFC" for step in normalizers)
    return max(longest, *map(len, added), 1) * (_NFC_FACTOR if composed else 1)


def _loses_nothing(step: Step) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return step["type"] in {"NFC", "Prepend", "ByteLevel", "Digits", "Metaspace"}
