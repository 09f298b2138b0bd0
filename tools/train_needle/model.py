"""Build the network and the tokenizer, and save them as transformers, vLLM and this server load
them.

The network is a Llama as small as retrieval allows, with a long context. The tokenizer gives every
generated word one token. It spells other text in parts of words that are frequent in English and in
programs, and finally in bytes, so that any text encodes. `Spelling` turns text into ids without the
overhead of the tokenizer if all words are known.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csps.models.needle_prompts.words import split_words, vocabulary
from csps.tools.train_needle.subwords import subwords

CONTEXT = 131072
"""Longest context served, in tokens."""

ROPE_THETA = 1e12
"""Large, so that more than half of a head's dimensions hardly turn within the context: these match
content over any distance, the fast ones find neighbors."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of the network."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32
    hidden: int = 128
    intermediate: int = 256
    answers_every: int = 1
    """Step between layers, from the second on, that answer in training; the last always does."""


NEEDLE = Architecture(layers=4, heads=4, kv_heads=2)
"""The included model."""
DEEP = Architecture(layers=8, heads=4, kv_heads=4, answers_every=2)
"""A second model, so that nothing is tied to the included one: six of its layers may drop tokens
(two of the included model's), and each query head has a KV head of its own."""


def build_model(
    tokenizer: PreTrainedTokenizerFast, architecture: Architecture = NEEDLE
) -> LlamaForCausalLM:
    """Build a network with fresh weights, from torch's random numbers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden,
        intermediate_size=architecture.intermediate,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPACE, NEWLINE = "Ġ", "Ċ"
"""Characters of byte-level tokenizers' vocabularies."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per generated word (with its space), whatever the merges
    make of its parts."""
    words = [word.replace(" ", SPACE) for word in vocabulary()]
    merges = subwords()
    joined = [left + right for left, right in merges]
    entries = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words, *joined])
    ids = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [BEGIN, END, PAD, *ROLES]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
BYTES = 256
"""Number of token ids that are single bytes; they come first."""


class Spelling:
    """Ids of all words, and of the characters that spell others."""

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
        """Return the ids of a text."""
        words = split_words(text)
        if all(word in self.ids for word in words):
            return [self.ids[word] for word in words]
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.spell(text))


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Save a checkpoint that releases of transformers of several years can read."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    # The template goes into tokenizer_config.json: older readers look only there.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _amend(folder / "config.json", rope_theta=ROPE_THETA, torch_dtype="float32")
    _amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "model.safetensors").chmod(0o644)


def _amend(path: Path, **entries: object) -> None:
    """Add entries by their names before transformers 5."""
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps(content, indent=2) + "\n")
