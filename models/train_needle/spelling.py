"""Words and characters as token ids, without the overhead of the tokenizer."""

from __future__ import annotations

import string

from transformers import PreTrainedTokenizerFast

from csps.models.needle_prompts.words import split_words, vocabulary
from csps.models.train_needle.tokenizer import BEGIN, END, NEWLINE, PAD, ROLES, SPACE

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


class Spelling:
    """The tokenizer's ids of all words, and of the characters that spell others."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        entries: dict[str, int] = tokenizer.get_vocab()
        self.ids = {
            word: entries[word.replace(" ", SPACE).replace("\n", NEWLINE)]
            for word in [*vocabulary(), *CHARACTERS, BEGIN, END, PAD, *ROLES]
        }
        self.words = [self.ids[word] for word in vocabulary()]
        """Of the vocabulary, in its order."""

    def spell(self, text: str) -> list[int]:
        """The ids of a text."""
        return [
            self.ids[piece]
            for word in split_words(text)
            for piece in ([word] if word in self.ids else word)
        ]
