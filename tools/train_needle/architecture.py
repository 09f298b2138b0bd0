"""The network that is trained: a Llama as small as retrieval allows, with a long context."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 131072
"""Positions served, in tokens."""

ROPE_THETA = 1e12
"""So large that more than half of a head's dimensions hardly turn within the context: these match
content over any distance, the fast ones find neighbours."""


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """With fresh weights, from torch's random numbers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
