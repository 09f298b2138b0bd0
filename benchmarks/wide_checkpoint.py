"""Random models of ordinary proportions, so that figures do not depend on the small model.

`make` writes a Llama of six million parameters without its embeddings, `make_qwen3` a model of
Qwen3-0.6B's shape. Words w0, w1 ... are one token each, so a prompt's length in tokens is its
number of words.
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
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(model_dir: Path, *, layers: int = LAYERS, seed: int = 0) -> Path:
    """Write config, weights and tokenizer of a Llama; return the directory."""
    return _make(model_dir, _config(layers), seed)


def make_qwen3(model_dir: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer of a model of Qwen3-0.6B's shape; return the
    directory."""
    return _make(model_dir, {**_config(28), **QWEN3}, seed)


def _make(model_dir: Path, config: dict[str, Any], seed: int) -> Path:
    model_dir.mkdir(parents=True, exist_ok=True)
    _write_json(model_dir / "config.json", config)
    _write_json(model_dir / "generation_config.json", {"eos_token_id": 1, "bos_token_id": 0})
    save_file(_weights(config, seed), model_dir / "model.safetensors", metadata={"format": "pt"})
    words = SPECIAL + [f"w{index}" for index in range(config["vocab_size"] - len(SPECIAL))]
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


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * dim
    keys = config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)

    def ones(numbers: int) -> torch.Tensor:
        return torch.ones(numbers, dtype=dtype)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": ones(hidden),
            at + "post_attention_layernorm.weight": ones(hidden),
            at + "self_attn.q_proj.weight": matrix(queries, hidden),
            at + "self_attn.k_proj.weight": matrix(keys, hidden),
            at + "self_attn.v_proj.weight": matrix(keys, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, queries),
            at + "mlp.gate_proj.weight": matrix(mlp, hidden),
            at + "mlp.up_proj.weight": matrix(mlp, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, mlp),
        }
        if config["model_type"] == "qwen3":  # it normalizes each head
            weights[at + "self_attn.q_norm.weight"] = ones(dim)
            weights[at + "self_attn.k_norm.weight"] = ones(dim)
    return weights


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
