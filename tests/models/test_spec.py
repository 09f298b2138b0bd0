"""config.json in, a model's spec out: values, refusals, and the shares of tensor parallelism."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from csps.models.network.checkpoint_json import CheckpointError, UnsupportedModelError
from csps.models.network.rope import RopeSpec
from csps.models.network.spec import (
    ModelSpec,
    kv_head_range,
    query_head_range,
    read_spec,
    tp_shard_of,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 272,
}

SPEC = ModelSpec(
    family="llama",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    intermediate=97,
    vocab=272,
    max_positions=2048,
    rms_eps=1e-6,
    rope=RopeSpec(inverse_frequencies=(1.0, 0.1, 0.01, 0.001)),
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    bos_token_id=1,
    eos_token_ids=(2,),
)


GEMMA_SCALING = {"rope_type": "linear", "factor": 8.0}


def write_config(model_dir: Path, **fields: Any) -> Path:
    (model_dir / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return model_dir


def test_absent_fields_take_the_family_default(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path))
    assert (spec.kv_heads, spec.head_dim, spec.max_positions) == (4, 16, 2048)
    assert (spec.rms_eps, spec.tie_embeddings, spec.qkv_bias) == (1e-6, False, False)
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, ())


def test_generation_config_decides_what_ends_an_answer(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=2)
    assert read_spec(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_spec(tmp_path).eos_token_ids == (5, 6)


def test_yarn_promises_the_extended_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    write_config(tmp_path, max_position_embeddings=32_768, rope_scaling=scaling)
    assert read_spec(tmp_path).max_positions == 131_072


def test_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Intern"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "ntk"}}, "'ntk'.*supported: default"),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {**LLAMA, "model_type": "mistral4"},
            },
            "'mistral4' is not supported; supported: mistral, ministral3",
        ),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "attends within chunks"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "linear_attention layers are not supported",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, "'gelu'"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping is not supported",
        ),
    ],
)
def test_unsupported_features_are_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(write_config(tmp_path, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 2048},
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 262_144},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": None, "use_sliding_window": True},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
    ],
)
def test_a_window_that_no_layer_uses_is_no_window(tmp_path: Path, fields: dict[str, Any]) -> None:
    positions = {"max_position_embeddings": 2048, **fields}
    spec = read_spec(write_config(tmp_path, num_key_value_heads=4, **positions))
    assert [spec.window_of(layer) for layer in range(spec.layers)] == [None, None]
    assert not spec.near_layers


WINDOWS = [
    (["MistralForCausalLM"], {"max_position_embeddings": 32_768}, [4096, 4096]),
    (["MixtralForCausalLM"], {"sliding_window": 1024}, [1024, 1024]),
    (["Phi3ForCausalLM"], {"sliding_window": 2047}, [2047, 2047]),
    (
        ["Qwen2ForCausalLM"],
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        [None, 9],
    ),
    (
        ["Qwen3ForCausalLM"],
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        [4096, None],
    ),
    (["Gemma3ForCausalLM"], {"sliding_window": 512, "sliding_window_pattern": 2}, [512, None]),
    (["GptOssForCausalLM"], {}, [128, None]),
]


@pytest.mark.parametrize(("architectures", "fields", "windows"), WINDOWS, ids=str)
def test_windows_are_those_of_each_family(
    tmp_path: Path, architectures: list[str], fields: dict[str, Any], windows: list[int | None]
) -> None:
    write_config(tmp_path, architectures=architectures, num_key_value_heads=4, **fields)
    spec = read_spec(tmp_path)
    assert [spec.window_of(layer) for layer in range(spec.layers)] == windows
    whole = read_spec(tmp_path, {"sliding_window": None})
    assert [whole.window_of(layer) for layer in range(spec.layers)] == [None, None]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": GEMMA_SCALING},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, **GEMMA_SCALING},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }
        },
    ],
    ids=["old", "new"],
)
def test_layers_with_a_window_have_a_rotation_of_their_own(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    write_config(tmp_path, architectures=["Gemma3ForCausalLM"], head_dim=4, **fields)
    spec = read_spec(tmp_path)
    assert spec.rope.inverse_frequencies == pytest.approx((1 / 8, 1e-3 / 8))
    assert spec.windowed_rope is not None
    assert spec.windowed_rope.inverse_frequencies == pytest.approx((1.0, 1e-2))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_has_a_position(tmp_path: Path, window: int) -> None:
    write_config(tmp_path, architectures=["Phi3ForCausalLM"], sliding_window=window)
    with pytest.raises(CheckpointError, match="window must be at least 1"):
        read_spec(tmp_path)


def test_dual_chunk_attention_ends_with_its_first_chunk(tmp_path: Path) -> None:
    """Plain attention is Qwen2.5-1M's own there and nowhere else."""
    chunks = {
        "chunk_size": 262_144,
        "local_size": 8192,
        "original_max_position_embeddings": 262_144,
    }
    fields = {"num_key_value_heads": 4, "max_position_embeddings": 1_010_000}
    for architecture in ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM"):
        write_config(
            tmp_path, architectures=[architecture], dual_chunk_attention_config=chunks, **fields
        )
        assert read_spec(tmp_path).max_positions == 253_952
    write_config(tmp_path, architectures=["Qwen2ForCausalLM"], **fields)
    assert read_spec(tmp_path).max_positions == 1_010_000


# --- overrides ------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "stored",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
    ids=["plain", "old", "new"],
)
def test_overridden_rope_keeps_its_base(tmp_path: Path, name: str, stored: dict[str, Any]) -> None:
    edited = read_spec(write_config(tmp_path, rope_theta=5e5, rope_scaling=YARN))
    assert edited.max_positions == 8192
    write_config(tmp_path, **stored)
    assert read_spec(tmp_path) != edited
    assert read_spec(tmp_path, {name: YARN}) == edited
    assert read_spec(tmp_path, {name: {**YARN, "rope_theta": 1e4}}) != edited


def test_overrides_of_a_wrapped_model_are_those_of_its_text_part(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 4, "eos_token_id": 7}
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    write_config(tmp_path, **fields)
    assert read_spec(tmp_path).window == 4096
    spec = read_spec(tmp_path, {"sliding_window": None, "max_position_embeddings": 99})
    assert spec.window is None
    assert (spec.max_positions, spec.wrapped, spec.eos_token_ids) == (99, True, (7,))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 3}, "hidden_size cannot be overridden; possible: max_position_embeddings"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "override one of them"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings must be an integer"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(write_config(tmp_path), overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, not '64'"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a token id"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"rope_scaling": 2}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor above 0"),
        ({"rope_theta": 1}, "theta above 1"),
        ({"head_dim": 15}, "even"),
        ({"partial_rotary_factor": 2.0}, "RoPE rotates 32 of 16"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_hidden_layers": 0}, "layers must be at least 1"),
        ({"num_attention_heads": 0}, "heads must be at least 1"),
    ],
)
def test_mistakes_in_config_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(write_config(tmp_path, **fields))


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(tmp_path)


@given(
    kv_heads=st.integers(1, 8), group=st.integers(1, 8), tp_size=st.integers(1, 16), data=st.data()
)
def test_every_query_head_finds_its_kv_head_on_its_rank(
    kv_heads: int, group: int, tp_size: int, data: st.DataObject
) -> None:
    heads = kv_heads * group
    assume(kv_heads % tp_size == 0 or (tp_size % kv_heads == 0 and heads % tp_size == 0))
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads)
    owned = [head for rank in range(tp_size) for head in query_head_range(spec, rank, tp_size)]
    assert owned == list(range(heads))
    rank = data.draw(st.integers(0, tp_size - 1))
    queries = query_head_range(spec, rank, tp_size)
    keys = kv_head_range(spec, rank, tp_size)
    assert len(queries) % len(keys) == 0
    local_group = len(queries) // len(keys)
    for local, head in enumerate(queries):
        assert keys[local // local_group] == head // group


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_mlp_is_split_completely_even_if_unevenly(tp_size: int) -> None:
    shares = [tp_shard_of(SPEC, rank, tp_size).intermediate for rank in range(tp_size)]
    assert [column for share in shares for column in share] == list(range(97))


def test_uneven_tensor_parallelism_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ValueError, match="possible: 1, 2, 4, 8"):
        tp_shard_of(SPEC, 0, 3)
    with pytest.raises(ValueError, match="possible"):
        tp_shard_of(SPEC, 0, 0)
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2"):
        tp_shard_of(SPEC, 2, 2)
