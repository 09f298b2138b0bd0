"""Tiny random checkpoints of every supported family, made by transformers, and its answers.

Every parameter is random, norms and biases too: transformers starts them at one and at zero,
where a norm applied twice or a bias forgotten would not show.
"""

import json
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = (
    "llama",
    "mistral",
    "ministral3",
    "mistral3",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "phi3",
    "internlm2",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
)

BOS, EOS = "<s>", "</s>"
SPECIAL_TOKENS = (BOS, EOS, "<|im_start|>", "<|im_end|>")
VOCAB = 272
"""The tokenizer's 260 tokens and a few more, as padded embeddings have."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_REFERENCE = "reference"
"""Subfolder with the same weights for transformers, for families that it lacks."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32_768,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
ORIGINAL_POSITIONS = 16
"""Context after which LongRoPE takes other frequencies, and Ministral's queries grow."""
_PECULIARITIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "phi3": {
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 16.0],
        },
    },
    "gemma3_text": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "sliding_window": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "truncate": False,
        },
    },
    "qwen3_moe": {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
}


_WRAPPED = {"mistral3": "ministral3", "gemma3": "gemma3_text"}
"""Models with a part that sees, and the family of the part that reads."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
_VISION_TYPES = {"mistral3": "pixtral", "gemma3": "siglip_vision_model"}


def make_checkpoint(
    model_dir: Path, family: str = "llama", *, seed: int = 0, shard_size: str = "1GB", **config: Any
) -> Path:
    """Write a checkpoint with tokenizer and chat template to `model_dir` and return it.

    Args:
        config: fields of the family's config.json that differ from a tiny default.
        shard_size: of one weight file; a small one gives several files and an index.
    """
    if family == "internlm2":
        _make_internlm2(model_dir, seed, config)
    else:
        _random_model(family, seed, config).save_pretrained(model_dir, max_shard_size=shard_size)
    make_tokenizer(model_dir)
    return model_dir


@cache
def reference_model(model_dir: Path) -> PreTrainedModel:
    """Return transformers' own model of a checkpoint, in fp32; reading it takes longest."""
    reference = model_dir / _REFERENCE
    path = reference if reference.exists() else model_dir
    model: PreTrainedModel = _auto(path).from_pretrained(path, dtype=torch.float32).eval()
    return model


def _auto(model_dir: Path) -> Any:
    config = json.loads((model_dir / "config.json").read_text())
    return AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM


def reference_logits(model_dir: Path, token_ids: list[int]) -> Tensor:
    """Return (tokens, vocab): transformers' logits of one sequence."""
    with torch.inference_mode():
        logits: Tensor = reference_model(model_dir)(torch.tensor([token_ids])).logits[0]
    return logits


def reference_steps(model: PreTrainedModel, token_ids: list[int], count: int) -> Iterator[Tensor]:
    """Return the (vocab,) logits from which each of the `count` tokens after a prompt is sampled,
    greedily.
    """
    past, step = None, token_ids
    for _ in range(count):
        with torch.inference_mode():
            out = model(torch.tensor([step]), past_key_values=past, use_cache=True)
        past, logits_v = out.past_key_values, out.logits[0, -1]
        step = [int(logits_v.argmax())]
        yield logits_v


@lru_cache(maxsize=256)
def reference_answer(model_dir: Path, prompt: tuple[int, ...], count: int) -> Tensor:
    """Return (count, vocab): `reference_steps` of a checkpoint. Tests ask the same more than
    once.
    """
    return torch.stack(list(reference_steps(reference_model(model_dir), list(prompt), count)))


def reference_tokens(model_dir: Path, token_ids: list[int], count: int) -> list[int]:
    """Return the `count` tokens that greedy decoding in transformers appends, past any end
    token.
    """
    tokens: list[int] = reference_answer(model_dir, tuple(token_ids), count).argmax(-1).tolist()
    return tokens


def random_tokens(count: int, *, seed: int = 0) -> list[int]:
    """Return token ids that every tiny vocabulary has."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 256, (count,), generator=generator).tolist()
    return ids


def make_tokenizer(model_dir: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one token a byte, which begins texts with BOS, to `model_dir`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    bos = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    tokenizer: PreTrainedTokenizerFast = fast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model_dir)
    return tokenizer


def _random_model(family: str, seed: int, config: dict[str, Any]) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM  # its methods are untyped
    settings = {**_SHAPE, **_PECULIARITIES.get(family, {}), **config}
    if family in _WRAPPED:
        auto, inner = AutoModelForImageTextToText, _WRAPPED[family]
        tied = {"tie_word_embeddings": config.pop("tie_word_embeddings", False)}
        text = {"model_type": inner, **_SHAPE, **_PECULIARITIES[inner], **config, **tied}
        vision = {"model_type": _VISION_TYPES[family], **_VISION}
        settings = {"text_config": text, "vision_config": vision, **tied}
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(family, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *_stored_buffers(model)]:
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(0.2 * noise + (1.0 if "norm" in name else 0.0))
    return model


def _stored_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint contains: the corrections of experts' scores."""
    stored = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _make_internlm2(model_dir: Path, seed: int, config: dict[str, Any]) -> None:
    """Make an InternLM2 checkpoint, which transformers does not have: a Llama's weights in its
    layout.
    """
    bias = config.pop("bias", False)
    reference = model_dir / _REFERENCE
    _random_model("llama", seed, {**config, "attention_bias": bias}).save_pretrained(reference)
    settings = json.loads((reference / "config.json").read_text())
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    weights = load_file(reference / "model.safetensors")
    save_file(
        _as_internlm2(weights, heads, kv_heads, settings["head_dim"]),
        model_dir / "model.safetensors",
    )
    (model_dir / "config.json").write_text(json.dumps(_internlm2_config(settings, bias)))


def _internlm2_config(llama: dict[str, Any], bias: bool) -> dict[str, Any]:
    """Return a configuration in the style of its repository: RoPE in top-level keys, no
    head_dim.
    """
    rope = dict(llama["rope_parameters"])
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    shared = {key: llama[key] for key in _SHAPE if key != "head_dim" and key in llama}
    return {
        **shared,
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": bias,
        "rms_norm_eps": llama["rms_norm_eps"],
        "rope_theta": theta,
        "rope_scaling": None if rope_type == "default" else {"type": rope_type, **rope},
        "tie_word_embeddings": llama["tie_word_embeddings"],
    }


_INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _as_internlm2(
    weights: dict[str, Tensor], heads: int, kv_heads: int, head_dim: int
) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            fused = [
                (tensor := weights[name.replace("q_proj", f"{kind}_proj")]).view(
                    kv_heads, heads // kv_heads if kind == "q" else 1, head_dim, *tensor.shape[1:]
                )
                for kind in "qkv"
            ]
            target = name.replace("self_attn.q_proj", "attention.wqkv")
            renamed[target] = torch.cat(fused, dim=1).flatten(0, 2)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in _INTERNLM2_NAMES.items():
                name = name.replace(old, new)
            renamed[name] = tensor.clone()
    return renamed
