"""Store the parts of words that the tokenizer knows besides the words of generated text.

They are a file, so that the tokenizer is the same wherever it is built. Run ``python -m
csps.tools.train_needle.subwords`` to find them again in the texts of the packages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from csps.tools.train_needle.texts import TrainingTexts, installed_texts

FILE = Path(__file__).with_name("subwords.txt")
MERGES = 2048
"""Number of merges. A token of English is 3.2 characters with these, and 1.1 without any."""


def subwords() -> list[tuple[str, str]]:
    """Return the merges of byte-pair encoding, most frequent first."""
    pairs = (line.split(" ") for line in FILE.read_text(encoding="utf-8").splitlines())
    return [(left, right) for left, right in pairs]


def find_subwords(texts: TrainingTexts, merges: int = MERGES) -> list[tuple[str, str]]:
    """Learn the byte-pair encoding of the texts, documents and programs alike."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((*texts.documents, *texts.programs), trainer)
    found: Sequence[tuple[str, str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in found]


if __name__ == "__main__":
    lines = [f"{left} {right}\n" for left, right in find_subwords(installed_texts())]
    FILE.write_text("".join(lines), encoding="utf-8")
