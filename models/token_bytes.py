"""The bytes that an entry of a vocabulary stands for.

Decoding the token alone does not tell: a token that holds a part of a character decodes to U+FFFD,
and decoders of SentencePiece's kind drop the space before a text, so that `▁the` and `the` become
the same. The entry has it all, in one of two spellings.

Byte-level BPE (GPT-2, Llama 3, Qwen, GLM-4) writes every byte as a printable character.
SentencePiece (Llama 2, Mistral, InternLM2) writes text, with `▁` for a space, and has the entries
`<0x00>` to `<0xFF>` for the bytes of what has no entry of its own. A tokenizer's decoder says which
of them it undoes.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Backend

EntryBytes = Callable[[str], bytes]

_BYTE_ENTRY = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHANGES_NO_TOKEN_ALONE = frozenset({"Fuse", "Strip"})
"""They work on the text as a whole: `Strip` takes the space of its first token away."""


def entry_bytes(backend: Backend) -> EntryBytes | None:
    """Reads the entries of a tokenizer's vocabulary; None if it spells them in neither way."""
    if backend.decoder is None:
        return None
    replaced: list[tuple[str, str]] = []
    encode: EntryBytes = str.encode
    for step in _steps(json.loads(backend.decoder.__getstate__())):
        match step:
            case {"type": "ByteLevel"}:
                encode = _from_byte_level
            case {"type": "ByteFallback"}:
                encode = _from_byte_fallback
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                replaced.append((old, " "))
            case {"type": kind} if kind not in _CHANGES_NO_TOKEN_ALONE:
                return None
    return partial(_bytes, replaced=replaced, encode=encode)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


def _bytes(entry: str, *, replaced: list[tuple[str, str]], encode: EntryBytes) -> bytes:
    for old, new in replaced:
        entry = entry.replace(old, new)
    return encode(entry)


def _from_byte_fallback(entry: str) -> bytes:
    byte = _BYTE_ENTRY.fullmatch(entry)
    return bytes.fromhex(byte[1]) if byte else entry.encode()


def _from_byte_level(entry: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, entry))
    except KeyError:  # a token that was added as it is read
        return entry.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are their own bytes, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
