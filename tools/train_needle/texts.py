"""Read the real text to train on: documents and programs of the packages that the tests need.

They are on every machine on which `constraints.txt` is installed, so none has to be shipped. The
log starts with the digest of the text, which identifies the recipe's. What ships with Python itself
is excluded: measurements use it (`needle_prompts.filler`).

`training_fillers` names the fillers of training: generated ones, and real text of the packages.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, distribution
from typing import Final

from csps.models.needle_prompts.filler import (
    Filler,
    Sentence,
    names,
    real_text,
    sentences,
    shuffled,
)
from csps.models.needle_prompts.words import split_words

# fmt: off
DOCUMENTED = (
    "accelerate", "aiohttp", "attrs", "cffi", "charset-normalizer", "click", "cryptography",
    "fastapi", "fonttools", "frozenlist", "grpcio", "httpcore", "httpx", "huggingface_hub",
    "hypothesis", "jsonschema", "kiwisolver", "lightgbm", "matplotlib", "mpmath", "msgpack",
    "multidict", "narwhals", "networkx", "numpy", "openai", "packaging", "pathspec", "pillow",
    "propcache", "pydantic", "Pygments", "pytest", "PyYAML", "regex", "requests", "rich", "scipy",
    "smart_open", "sortedcontainers", "starlette", "sympy", "tqdm", "transformers", "typer",
    "typing_extensions", "urllib3", "uvicorn", "virtualenv", "yarl",
)
# fmt: on
"""Packages whose licenses and descriptions are read."""

PROGRAMS = ("attrs", "click", "httpx", "packaging", "rich", "sortedcontainers", "starlette")
"""Packages whose Python sources are read."""

_LICENCE = re.compile(r"dist-info/.*(licen[cs]e|copying|notice|authors)", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingTexts:
    """Documents and programs, each a text of its own."""

    documents: tuple[str, ...]
    programs: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of them, in order."""
        everything = "\0".join((*self.documents, "", *self.programs))
        return hashlib.sha256(everything.encode()).hexdigest()


def installed_texts() -> TrainingTexts:
    """Read the texts of the installed packages.

    Raises:
        importlib.metadata.PackageNotFoundError: a package is missing;
            `pip install -c constraints.txt -e .[dev]` installs them all.
    """
    packages = [distribution(name) for name in DOCUMENTED]
    documents = [text for package in packages for text in _documents(package)]
    programs = [text for name in PROGRAMS for text in _files(distribution(name), r"\.py$")]
    return TrainingTexts(tuple(dict.fromkeys(documents)), tuple(programs))


def _documents(package: Distribution) -> Iterator[str]:
    yield str(package.metadata.get_payload() or package.metadata.get("Description"))  # type: ignore[attr-defined]
    yield from _files(package, _LICENCE)


def _files(package: Distribution, pattern: str | re.Pattern[str]) -> Iterator[str]:
    """Yield the texts of a package's files that match a pattern, sorted by name."""
    for file in sorted(package.files or (), key=str):
        if re.search(pattern, str(file)):
            text = file.read_text(encoding="utf-8")
            if text.strip():
                yield text


_ALPHABETS: Final = (
    0x3B1,
    0x430,
    0x561,
    0x5D0,
    0x628,
    0x905,
    0xE01,
    0x10D0,
    0x3042,
    0x4E00,
    0xAC00,
)
"""First letters of scripts, from Greek to Hangul."""


def training_fillers(texts: TrainingTexts) -> dict[str, Filler]:
    """Return all fillers that a stage may name; those of the server's measurements have the same
    names."""
    english = real_text("\n\n".join(texts.documents))
    code = real_text("\n\n".join(texts.programs))
    plain: dict[str, Filler] = {
        "sentences": sentences,
        "shuffled": shuffled,
        "names": names,
        "english": english,
        "code": code,
        "bytes": _in_other_letters(english),
    }
    return {**plain, "mixed": _mixed(plain)}


def draw_filler(
    rng: random.Random, weights: Mapping[str, float], fillers: Mapping[str, Filler]
) -> tuple[str, Filler]:
    """Draw one filler by its weight."""
    if len(weights) == 1:
        (name,) = weights
    else:
        (name,) = rng.choices(list(weights), list(weights.values()))
    return name, fillers[name]


def _in_other_letters(filler: Filler) -> Filler:
    """Return a filler in a script whose words the tokenizer does not know: a letter is two or three
    bytes."""

    def stream(rng: random.Random) -> Iterator[Sentence]:
        first = rng.choice(_ALPHABETS)
        letters = {ord("a") + offset: first + offset for offset in range(26)}
        letters |= {ord("A") + offset: first + offset for offset in range(26)}
        for sentence in filler(rng):
            yield split_words("".join(sentence).translate(letters))

    return stream


def _mixed(fillers: Mapping[str, Filler]) -> Filler:
    """Return a filler of two or three kinds, mixed sentence by sentence."""

    def stream(rng: random.Random) -> Iterator[Sentence]:
        chosen: Sequence[Iterator[Sentence]] = [
            fillers[name](rng) for name in rng.sample(sorted(fillers), rng.randint(2, 3))
        ]
        while True:
            yield next(rng.choice(chosen))

    return stream
