"""Texts as token ids, without the overhead of the tokenizer where words are known."""

from __future__ import annotations

import string

from transformers import PreTrainedTokenizerFast

from csps.models.needle_prompts.words import split_words, vocabulary
from csps.tools.train_needle.tokenizer import BEGIN, END, NEWLINE, PAD, ROLES, SPACE

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
BYTES = 256
"""Token ids below are single bytes."""


class Spelling:
    """The tokenizer's ids of all words, and of the characters that spell others."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        entries: dict[str, int] = tokenizer.get_vocab()
        self.ids = {
            word: entries[word.replace(" ", SPACE).replace("\n", NEWLINE)]
            for word in [*vocabulary(), *CHARACTERS, BEGIN, END, PAD, *ROLES]
        }
        self.words = list(range(BYTES, len(tokenizer) - len((BEGIN, END, PAD, *ROLES))))
        """Generated words and parts of others: all tokens but bytes and special ones."""
        self._tokenizer = tokenizer

    def spell(self, text: str) -> list[int]:
        """The ids of a text."""
        words = split_words(text)
        if all(word in self.ids for word in words):
            return [self.ids[word] for word in words]
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count(self, text: str) -> int:
        """How many they are."""
        return len(self.spell(text))
