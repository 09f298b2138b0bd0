"""Answers detokenized token by token, against decoding all of their tokens at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.gang.messages import SampledToken
from csps.services.http.answer import AnswerText

TEXTS = [
    "the",
    " the",
    "ing",
    "naïve",
    "你好",
    "🙂",
    "👩‍👩‍👧",
    "\n",
    "\t ",
    "é",
    ".",
    " ,",
    "\u202e",
]
SPECIAL = ["<s>", "</s>", "<你>"]
LONGEST = 90
SHOWN = 20


def byte_level(*, pieces: bool) -> Backend:
    """Make a tokenizer as GPT-2's: a token a byte, and pieces that begin or end in a character."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in TEXTS if pieces else ():
        ((whole, _),) = splitter.pre_tokenize_str(text)
        entries += [part for cut in range(1, 6) for part in (whole[:cut], whole[cut:]) if part]
    return _backend(list(dict.fromkeys(entries)), decoders.ByteLevel())


def byte_fallback(*, strip: bool) -> Backend:
    """Make a tokenizer as Llama 2's or Gemma's: words, and a token for each byte of rare text."""
    words = [text.replace(" ", "▁") for text in TEXTS if text.isascii()]
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁", "你"]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=1))
    return _backend(entries, decoders.Sequence(steps))


def word_pieces() -> Backend:
    """Make a tokenizer as BERT's, whose decoder looks at neighbors."""
    entries = [*(text.strip() or "x" for text in TEXTS), *(f"##{text.strip()}" for text in TEXTS)]
    return _backend(list(dict.fromkeys(entries)), decoders.WordPiece())


def metaspace() -> Backend:
    """Make a tokenizer of words with a sign for the space."""
    entries = [f"{space}{text.strip()}" for text in TEXTS for space in ("", "▁")]
    return _backend(list(dict.fromkeys(entries)), decoders.Metaspace())


def _backend(entries: list[str], decoder: Any) -> Backend:
    vocab = {entry: index for index, entry in enumerate(entries)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZERS: dict[str, Callable[[], Backend]] = {
    "bytes": partial(byte_level, pieces=False),
    "bytes and pieces": partial(byte_level, pieces=True),
    "byte fallback": partial(byte_fallback, strip=True),
    "byte fallback, spaces kept": partial(byte_fallback, strip=False),
    "word pieces": word_pieces,
    "metaspace": metaspace,
}


@dataclass
class Streamed:
    """Answers that were compared."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_window: int = 0
    """Most tokens that were decoded again for one more."""


def stream_texts(folder: Path, *, count: int, seed: int) -> Streamed:
    """Stream answers of random tokens, and of the bytes of random text, by every tokenizer."""
    found, drawn = Streamed(), random.Random(seed)
    for name, make in TOKENIZERS.items():
        path = folder / name.replace(" ", "-").replace(",", "")
        path.mkdir(parents=True, exist_ok=True)
        backend = make()
        backend.save(str(path / "tokenizer.json"))
        tokenizer, size = Tokenizer(path), backend.get_vocab_size()
        for _ in range(count):
            ids = _ids(drawn, backend, size, by_byte="fallback" in name)
            _compare(name, tokenizer, ids, skip=drawn.random() < 0.5, found=found)
    return found


def _ids(drawn: random.Random, backend: Backend, size: int, *, by_byte: bool) -> list[int]:
    """Return token ids; bytes of a byte-fallback tokenizer only as whole characters, because its
    decoder garbles characters next to other bytes."""
    length = drawn.randint(0, LONGEST)
    if not by_byte:
        if drawn.random() < 0.3:  # few different ones: garbage without end
            some = [drawn.randrange(size) for _ in range(drawn.randint(1, 4))]
            return [drawn.choice(some) for _ in range(length)]
        return [drawn.randrange(size) for _ in range(length)]
    words = [token for entry, token in backend.get_vocab().items() if not entry.startswith("<0x")]
    ids: list[int] = []
    while len(ids) < length:
        character = chr(drawn.choice([0x41, 0xE9, 0x4F60, 0x1F642, 0x202E, 0xFFFD]))
        encoded = [1 + byte for byte in character.encode()]
        ids += drawn.choice([encoded, encoded, [drawn.choice(words)]])
    return ids


def _compare(
    name: str, tokenizer: Tokenizer, ids: list[int], *, skip: bool, found: Streamed
) -> None:
    answer = AnswerText(tokenizer, stop=(), min_tokens=0, skip_special=skip)
    text = ""
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        reason = "length" if last else None
        delta = answer.push(
            SampledToken(sequence_id=1, index=index, token=token, finish_reason=reason)  # type: ignore[arg-type]
        )
        text += "".join(part.text for part in delta.parts)
        found.longest_window = max(found.longest_window, len(answer._detokenizer._window))
    found.answers += 1
    whole = tokenizer.decode(ids, skip)
    if text != whole and len(found.wrong) < SHOWN:
        found.wrong.append(f"{name}, skip={skip}: {ids} gave {text!r}, not {whole!r}")
