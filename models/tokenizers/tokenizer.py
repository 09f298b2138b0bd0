"""Turn text into tokens and back, by a checkpoint's tokenizer.json.

Decoding one token alone loses information: a token that holds a part of a character decodes to
U+FFFD, and decoders of SentencePiece's kind drop the space before a text, so `▁the` and `the`
become the same. The entry of the vocabulary has it all, in one of two spellings. Byte-level BPE
(GPT-2, Llama 3, Qwen, GLM-4) writes every byte as a printable character. SentencePiece (Llama 2,
Mistral, InternLM2) writes text with `▁` for a space, and `<0x00>` to `<0xFF>` for bytes without an
entry. A tokenizer's decoder says which of the two it undoes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from csps.models.network.checkpoint_json import (
    CheckpointError,
    InvalidTextError,
    read_eos_token_ids,
    read_json_if_present,
)
from csps.models.tokenizers.long_texts import PIECE_CHARACTERS, LongTexts

EntryBytes = Callable[[str], bytes]

_BYTE_ENTRY = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHANGES_NO_TOKEN_ALONE = frozenset({"Fuse", "Strip"})
"""Decoder steps that work on the text as a whole: `Strip` drops the space of its first token."""


def entry_bytes(backend: Backend) -> EntryBytes | None:
    """Return a reader of a vocabulary's entries; None if it spells them in neither way."""
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
        for step in decoder["decoders"]:
            yield from _steps(step)
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
    """Return GPT-2's byte alphabet: printable Latin-1 is itself, other bytes follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TooManyTokens(ValueError):
    """A text has more tokens than it may have: at least `at_least`."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


_REPLACEMENT = "\ufffd"
"""Character that invalid UTF-8 decodes to, such as the first bytes of a longer character."""

_CONTEXT_TOKENS = 8
"""Tokens that a detokenizer looks back, at least."""
_LONGEST_GARBAGE_TOKENS = 64
"""Tokens of bytes that are no text after which a detokenizer stops waiting for text."""


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads.

    Raises:
        CheckpointError: the directory has no tokenizer.json, or a damaged one.
    """

    def __init__(self, model_dir: Path) -> None:
        self._backend = _read_backend(model_dir / "tokenizer.json")
        self._entry_bytes: EntryBytes | None = entry_bytes(self._backend)
        self.eos_token_ids = self._read_eos_token_ids(model_dir)
        """Tokens that end an answer: the model's, and the tokenizer's own."""

    @property
    def highest_id(self) -> int:
        """Largest id that `encode` may return; ids may have gaps. Reads the whole vocabulary."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Tokenize a text.

        Args:
            add_special_tokens: puts the beginning-of-sequence token and the like around it;
                False for text that a chat template rendered, which has them already.
            limit: most tokens that a long text may have; None for no limit.

        Raises:
            InvalidTextError: the text has lone surrogates, which are not Unicode.
            TooManyTokens: a long text has more than `limit` tokens; tokenizing stopped there.
        """
        size = _utf8_size(text)
        if len(text) <= PIECE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        if limit is not None and (least := self.long_texts.least_tokens(size)) > limit:
            raise TooManyTokens(least)
        before, after = self._special_around if add_special_tokens else ([], [])
        ids = [*before]
        for piece in self.long_texts.pieces(text):
            ids += self._encode(piece, add_special_tokens=False)
            if limit is not None and len(ids) > limit:
                raise TooManyTokens(len(ids))
        return [*ids, *after]

    @cached_property
    def long_texts(self) -> LongTexts:
        """What is known of long texts. It takes a second for a vocabulary of 150,000."""
        return LongTexts.of(self._backend)

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` leaves out unless asked for them."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def _special_around(self) -> tuple[list[int], list[int]]:
        """Special tokens that are put before and behind a text."""
        plain, whole = self._encode("a", False), self._encode("a", True)
        start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one, because only this call leaves out the offsets into the text: they take
        # nine tenths of the time of `encode`, a second for 345,000 tokens.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; joined, the tokens of an answer give its text in UTF-8.

        Two kinds of tokens differ: special ones are not hidden, and one at the beginning keeps the
        space that the decoder drops. Empty for ids without an entry.
        """
        entry = self._backend.id_to_token(token_id)
        if entry is None:
            return b""
        if self._entry_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._entry_bytes(entry)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a decoder for an answer that arrives token by token."""
        return Detokenizer(tokenizer=self, skip_special_tokens=skip_special_tokens)

    def _read_eos_token_ids(self, model_dir: Path) -> tuple[int, ...]:
        text = special_tokens(model_dir).get("eos_token")
        own = None if text is None else self._backend.token_to_id(text)
        declared = read_eos_token_ids(model_dir)
        return declared if own is None or own in declared else (*declared, own)


@dataclass(kw_only=True)
class Detokenizer:
    """Decoder that turns an answer's tokens into text, never in the middle of a character.

    What `push` and `flush` return, joined, is the answer. It equals `decode` of all tokens, except
    that a byte-fallback tokenizer garbles characters next to invalid bytes there.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    _window: list[int] = field(default_factory=list, init=False)
    """The last tokens. Some decoders look at the neighbour, so one token alone is not enough."""
    _returned: int = field(default=0, init=False)
    """Leading characters of the window's text that were returned."""
    _boundary: int = field(default=0, init=False)
    """Tokens of the window after which no character was unfinished."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, empty in the middle of a character."""
        if self.skip_special_tokens and token_id in self.tokenizer.hidden:
            # In the window, eight of them would push all text out, and decoders that drop the first
            # space would take the next word for the first.
            return ""
        self._window.append(token_id)
        text = self._decode()
        # All of them wait, not the last few: one byte too many turns a whole run of byte tokens,
        # characters already returned among them, into U+FFFD until the character is complete.
        waiting = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._window) > _LONGEST_GARBAGE_TOKENS:
            waiting = min(waiting, 3)  # a character has four bytes at most
        certain = len(text) - waiting
        fresh = text[self._returned : certain]
        self._returned = max(self._returned, certain)
        self._trim(waiting)
        return fresh

    def flush(self) -> str:
        """Return the rest at the end of the answer: a character that was never finished."""
        rest = self._decode()[self._returned :]
        self._window, self._returned, self._boundary = [], 0, 0
        return rest

    def _trim(self, waiting: int) -> None:
        """Shorten the window, which must begin with a whole character."""
        if waiting == 0 and len(self._window) - self._boundary >= _CONTEXT_TOKENS:
            self._window = self._window[self._boundary :]
            self._returned = len(self._decode())
            self._boundary = len(self._window)
        elif len(self._window) > _LONGEST_GARBAGE_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._returned = max(len(self._decode()) - waiting, 0)
            self._boundary = 0

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, self.skip_special_tokens)


def special_tokens(model_dir: Path) -> dict[str, str]:
    """Return the named special tokens (`bos_token`, `eos_token`, ...) that the checkpoint sets."""
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json_if_present(model_dir / name).values
        for key in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
            token = values.get(f"{key}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[f"{key}_token"] = text
    return texts


def _read_backend(path: Path) -> Backend:
    if not path.exists():
        raise CheckpointError(
            f"{path}: not found; other tokenizer files can be converted with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: is not a tokenizer ({error})") from error
    # Left over from training; a server must never cut a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _utf8_size(text: str) -> int:
    """Return the length of a text in UTF-8, which lone surrogates do not have."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}"
        ) from None
