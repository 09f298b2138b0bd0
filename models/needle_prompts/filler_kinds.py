"""Kinds of filler by name; those of real text are read from Python itself.

Every Python brings its language reference and its library's sources along, so that real text needs
no download, and the included model has not been trained on it.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from csps.models.needle_prompts.filler import Filler, names, real_text, sentences, shuffled

FillerKind = Literal["sentences", "shuffled", "names", "english", "code", "bytes"]
FILLER_KINDS: tuple[FillerKind, ...] = get_args(FillerKind)

CYRILLIC = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "абцдефгхийклмнопкрстуввхызАБЦДЕФГХИЙКЛМНОПКРСТУВВХЫЗ",
)
_PROGRAMS = ("argparse", "ast", "datetime", "doctest", "inspect", "ipaddress", "pydoc", "typing")


@cache
def filler_of(kind: str) -> Filler:
    """A kind's, or of a text file by its path.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty or no UTF-8.
    """
    match kind:
        case "sentences":
            return sentences
        case "shuffled":
            return shuffled
        case "names":
            return names
        case "english":
            return real_text(_language_reference())
        case "code":
            return real_text(_library_sources())
        case "bytes":
            # In letters of which the tokenizer knows none, so that each is two tokens.
            return real_text(_language_reference().translate(CYRILLIC))
        case path:
            return real_text(Path(path).read_text(encoding="utf-8"))


def _language_reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _library_sources() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((library / f"{name}.py").read_text("utf-8") for name in _PROGRAMS)
