"""A random Llama of ordinary proportions, so that figures do not depend on the small model.

Words w0 ... w31999 are one token each, so a prompt's length in tokens is its number of words.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 256, 4, 8, 2, 688, 32_000
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<s>", "</s>", "<unk>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(model_dir: Path, *, layers: int = LAYERS, seed: int = 0) -> Path:
    """Write config, weights and tokenizer; return the directory."""
    model_dir.mkdir(parents=True, exist_ok=True)
    _write_json(model_dir / "config.json", _config(layers))
    _write_json(model_dir / "generation_config.json", {"eos_token_id": 1, "bos_token_id": 0})
    save_file(_weights(layers, seed), model_dir / "model.safetensors", metadata={"format": "pt"})
    words = SPECIAL + [f"w{index}" for index in range(VOCAB - len(SPECIAL))]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    _write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return model_dir


def prompt(tokens: int, *, seed: int) -> str:
    """Return text of exactly so many tokens, different for every seed."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(VOCAB - len(SPECIAL))}" for _ in range(tokens))


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def _weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            at + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            at + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            at + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
