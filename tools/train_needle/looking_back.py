"""Every key seen from its value.

Facts are looked up by what the first layer writes at a value: the key two words before. Here and
there training leaves a key that no head of that layer attends to. Its facts look like those of any
other such key then, and as attention that is nearly none has nearly no gradient, no number of
questions about them changes that. The logarithm of the attention has one.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from csps.models.needle_prompts.haystack import Fact
from csps.models.needle_prompts.words import KEYS, VALUES
from csps.tools.train_needle.spelling import Spelling
from csps.tools.train_needle.tokenizer import BEGIN

KEY, VALUE = 4, 6
"""Their places in the sentence of a fact behind the first token of all."""
ENOUGH = math.log(2)
"""A head that spends half of its attention on the key sees it."""


def fact_sentences(rng: random.Random, spelling: Spelling) -> Tensor:
    """(keys, tokens): one fact of each key, with a value of its own."""
    values = rng.sample(VALUES, len(KEYS))
    facts = (Fact(key, value, 0.0) for key, value in zip(KEYS, values, strict=True))
    return torch.tensor([[spelling.ids[word] for word in (BEGIN, *fact.words)] for fact in facts])


def overlooked(model: LlamaForCausalLM, sentences: Tensor) -> Tensor:
    """How little the head of the first layer that sees it best attends to a key from its value:
    the mean of the negative logarithms, where they are more than `ENOUGH`."""
    layer = model.model.layers[0]
    states = layer.input_layernorm(model.model.embed_tokens(sentences[:, : VALUE + 1]))
    cos, sin = model.model.rotary_emb(states, torch.arange(VALUE + 1)[None])
    attention = layer.self_attn
    heads = (*states.shape[:2], -1, attention.head_dim)
    query = attention.q_proj(states).view(heads).transpose(1, 2)
    key = attention.k_proj(states).view(heads).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query.float(), key.float(), cos, sin)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = attention.scaling * torch.einsum("bhd,bhtd->bht", query[:, :, VALUE], key)
    seen: Tensor = logits.log_softmax(-1)[..., KEY].amax(1)
    return (-seen - ENOUGH).relu().mean()
