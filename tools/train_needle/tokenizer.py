"""A tokenizer that gives every generated word one token, and the chat template.

All other text is spelt in parts of words that are frequent in English and in programs, and at last
in bytes, so that any text encodes.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from csps.models.needle_prompts.words import vocabulary
from csps.tools.train_needle.architecture import CONTEXT
from csps.tools.train_needle.subwords import subwords

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPACE, NEWLINE = "Ġ", "Ċ"
"""As byte-level tokenizers write them in their vocabulary."""

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
    """A generated word (with its space) is one token, whatever the merges make of its parts."""
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
