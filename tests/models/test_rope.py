"""RoPE against transformers: frequencies of every scaling type, and the rotation itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from csps.models.network.checkpoint_json import CheckpointJson
from csps.models.network.rope import RopeSpec, read_rope, rotary_at, rotate

THETA = 500_000.0
POSITIONS = 131_072
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    "yarn with attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn of the whole context": {"rope_type": "yarn", "factor": 2.0},
}


def transformers_rope(scaling: dict[str, Any]) -> modeling_llama.LlamaRotaryEmbedding:
    config: Any = AutoConfig.for_model(
        "llama",
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": THETA, **scaling},
    )
    return modeling_llama.LlamaRotaryEmbedding(config)


def read(config: dict[str, Any], **options: Any) -> RopeSpec:
    source = CheckpointJson(path=Path("config.json"), values=config)
    return read_rope(source, **{"head_dim": 64, "max_positions": POSITIONS, **options})


def rotated_dims(spec: RopeSpec) -> int:
    return 2 * len(spec.inverse_frequencies)


def new_style(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": THETA, **scaling}}


def old_style(scaling: dict[str, Any]) -> dict[str, Any]:
    renamed = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    return {
        "rope_theta": THETA,
        "rope_scaling": None if renamed == {"type": "default"} else renamed,
    }


@pytest.mark.parametrize("style", [new_style, old_style])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaling_is_that_of_transformers(scaling: dict[str, Any], style: Any) -> None:
    expected = transformers_rope(dict(scaling))
    spec = read(json.loads(json.dumps(style(scaling))))
    torch.testing.assert_close(
        torch.tensor(spec.inverse_frequencies), expected.inv_freq, rtol=1e-5, atol=0
    )
    assert spec.amplitude == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cosines_and_sines_at_far_positions(scaling: dict[str, Any]) -> None:
    """Dynamic included: up to max_position_embeddings it is the identity in transformers too."""
    positions = torch.tensor([0, 1, 77, 32_768, POSITIONS - 1])
    cos, sin = transformers_rope(dict(scaling))(torch.empty(1), positions[None])
    rotary = rotary_at(read(new_style(scaling)), positions, torch.float32)
    # fp32 angles of 1e5 radians are only good to 0.01, and ours round where theirs do
    torch.testing.assert_close(rotary.cos_t1r[:, 0], cos[0, :, :32], rtol=0, atol=0.02)
    torch.testing.assert_close(rotary.sin_t1r[:, 0], sin[0, :, :32], rtol=0, atol=0.02)


def test_half_split_rotation_is_llamas() -> None:
    x_thd, positions = torch.randn(5, 3, 64), torch.tensor([9, 0, 4, 1000, 31])
    cos, sin = transformers_rope({"rope_type": "default"})(x_thd, positions[None])
    expected, _ = modeling_llama.apply_rotary_pos_emb(
        x_thd[None], x_thd[None], cos, sin, unsqueeze_dim=2
    )
    rotated = torch.empty_like(x_thd)
    rotate(x_thd, rotary_at(read(new_style({})), positions, torch.float32), rotated)
    torch.testing.assert_close(rotated, expected[0], rtol=1e-5, atol=1e-5)


def test_interleaved_partial_rotation_is_glms() -> None:
    x_thd, positions = torch.randn(5, 3, 64), torch.tensor([9, 0, 4, 1000, 31])
    parameters = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
    config: Any = AutoConfig.for_model("glm", head_dim=64, rope_parameters=parameters)
    cos, sin = modeling_glm.GlmRotaryEmbedding(config)(x_thd, positions[None])
    apply: Any = modeling_glm.apply_rotary_pos_emb
    expected, _ = apply(x_thd[None], x_thd[None], cos, sin, unsqueeze_dim=2)
    spec = read(new_style({}), partial=0.5, interleaved=True)
    assert rotated_dims(spec) == 32
    rotated = torch.empty_like(x_thd)
    rotate(x_thd, rotary_at(spec, positions, torch.float32), rotated)
    torch.testing.assert_close(rotated, expected[0], rtol=1e-5, atol=1e-5)


def test_partial_rotary_factor_of_the_config_wins() -> None:
    assert rotated_dims(read({"partial_rotary_factor": 0.25}, partial=0.5)) == 16
    nested = {"rope_parameters": {"partial_rotary_factor": 0.75}}
    assert rotated_dims(read(nested, partial=0.5)) == 48


def test_angles_are_exact_in_bf16() -> None:
    """Neighbouring positions that bf16 cannot tell apart still rotate differently."""
    rotary = rotary_at(read(new_style({})), torch.tensor([40_000, 40_001]), torch.bfloat16)
    assert rotary.cos_t1r.dtype == torch.bfloat16
    exact = torch.tensor([40_000.0, 40_001.0]).cos()
    torch.testing.assert_close(rotary.cos_t1r[:, 0, 0].float(), exact, rtol=0, atol=0.01)
