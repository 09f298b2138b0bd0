"""Weights: one file or many, only the rank's share, and clear refusals."""

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, make_checkpoint

from csps.models.checkpoints import checkpoint as checkpoint_module
from csps.models.checkpoints.checkpoint import open_checkpoint, tensor_checksum
from csps.models.checkpoints.loading import load_network, measure_weights, weights_checksum
from csps.models.network.checkpoint_json import (
    CheckpointError,
    MissingTensorError,
    UnsupportedModelError,
)
from csps.models.network.spec import ModelSpec, TpShard, read_spec, tp_shard_of


class CountingFile:
    """An open safetensors file that counts the elements read of each tensor."""

    def __init__(self, opened: Any, counts: Counter[str]) -> None:
        self._opened, self._counts = opened, counts

    def __enter__(self) -> "CountingFile":
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self._opened.get_slice(name), name, self._counts)


class CountingSlice:
    def __init__(self, stored: Any, name: str, counts: Counter[str]) -> None:
        self._stored, self._name, self._counts = stored, name, counts
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._stored[index]
        self._counts[self._name] += part.numel()
        return part


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()

    def counting_open(path: str, framework: str) -> CountingFile:
        return CountingFile(safe_open(path, framework=framework), counted)

    monkeypatch.setattr(checkpoint_module, "safe_open", counting_open)
    return counted


def rewrite(model_dir: Path, change: Any) -> None:
    """Apply `change` to the dictionary of a checkpoint's tensors."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


UNREAD = ("vision_tower.", "multi_modal_projector.")
"""Parts of a wrapped model other than its text part."""


def mlp_columns(spec: ModelSpec, shard: TpShard, layer: int) -> int:
    """Count the columns of all of a layer's MLPs that a rank owns."""
    if (experts := spec.experts_of(layer)) is None:
        return len(shard.intermediate)
    return experts.count * len(shard.expert_intermediate) + len(shard.shared_intermediate)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_shard_and_nothing_else(
    tmp_path: Path, counts: Counter[str], family: str, tp_size: int
) -> None:
    make_checkpoint(tmp_path, family)
    spec, stored = read_spec(tmp_path), load_file(tmp_path / "model.safetensors")
    shard = tp_shard_of(spec, 0, tp_size)
    network = load_network(tmp_path, tp_rank=0, tp_size=tp_size, all_reduce=lambda part: part)
    held_heads = len(shard.query_heads) + 2 * len(shard.kv_heads)
    all_heads = spec.heads + 2 * spec.kv_heads
    attention = spec.hidden * (held_heads + len(shard.query_heads)) * spec.head_dim
    biases = held_heads * spec.head_dim if spec.qkv_bias else 0
    biases += spec.hidden if spec.output_bias else 0
    if spec.experts and spec.experts.biases:  # the first rank adds those of the outputs
        biases += spec.experts.count * (2 * len(shard.expert_intermediate) + spec.hidden)
    mlps = sum(3 * spec.hidden * mlp_columns(spec, shard, layer) for layer in range(spec.layers))
    split = ("proj", "wqkv", "wo.", "feed_forward", "experts")
    text = {name: tensor for name, tensor in stored.items() if not name.startswith(UNREAD)}
    shared = sum(
        tensor.numel() for name, tensor in text.items() if not any(part in name for part in split)
    )
    assert counts.total() == spec.layers * (attention + biases) + mlps + shared
    assert network.layers[0].weights.qkv.shape == (held_heads * spec.head_dim, spec.hidden)
    if tp_size == 1:
        assert held_heads == all_heads
        assert counts == {name: tensor.numel() for name, tensor in text.items()}


def test_the_head_of_a_tied_checkpoint_is_not_read(tmp_path: Path, counts: Counter[str]) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    load_network(tmp_path)
    assert "lm_head.weight" not in counts


def test_a_wrapped_model_has_a_head_of_its_own_if_the_files_do(tmp_path: Path) -> None:
    """Its config.json may say that it is tied all the same."""
    path = make_checkpoint(tmp_path, "mistral3", tie_word_embeddings=False) / "config.json"
    config = json.loads(path.read_text())
    for tied in ({}, {"tie_word_embeddings": True}):
        path.write_text(json.dumps({k: v for k, v in config.items() if k[:3] != "tie"} | tied))
        network = load_network(tmp_path)
        assert not torch.equal(network.head_vd, network.embedding_vd)


def test_new_names_of_a_wrapped_model(tmp_path: Path) -> None:
    old = load_network(make_checkpoint(tmp_path, "mistral3"))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            new = name.replace("language_model.lm_head", "lm_head")
            tensors[new.replace("language_model.model", "model.language_model")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    new = load_network(tmp_path)
    assert torch.equal(new.head_vd, old.head_vd)
    assert torch.equal(new.layers[1].weights.qkv, old.layers[1].weights.qkv)


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    whole = load_network(make_checkpoint(tmp_path / "whole"))
    cut_dir = make_checkpoint(tmp_path / "cut", shard_size="40KB")
    assert len(list(cut_dir.glob("model-*.safetensors"))) > 1
    cut = load_network(cut_dir)
    for ours, theirs in zip(cut.layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.weights.qkv, theirs.weights.qkv, rtol=0, atol=0)
        torch.testing.assert_close(ours.weights.down, theirs.weights.down, rtol=0, atol=0)


def test_weights_are_converted_while_they_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    assert load_network(tmp_path).layers[0].weights.qkv.dtype == torch.float32
    assert load_network(tmp_path, dtype=torch.bfloat16).norm_d.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("glm", "model.layers.1.mlp.gate_up_proj.weight"),
        ("glm4", "model.layers.0.post_mlp_layernorm.weight"),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("mistral3", "language_model.model.layers.1.mlp.up_proj.weight"),
        ("mistral3", "language_model.lm_head.weight"),
        ("internlm2", "model.layers.1.attention.wqkv.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4_moe", "model.layers.1.mlp.shared_experts.down_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, family: str, tensor: str) -> None:
    make_checkpoint(tmp_path, family)
    rewrite(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(MissingTensorError, match=tensor):
        load_network(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(95, 64)}))
    with pytest.raises(CheckpointError, match=rf"{name}.*\(95, 64\).*\(96, 64\)"):
        load_network(tmp_path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({k: v.char() for k, v in tensors.items()}))
    with pytest.raises(UnsupportedModelError, match="stored as I8"):
        load_network(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not read"):
        load_network(tmp_path)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_network(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [("model-1.safetensors", "cannot be read"), ("../other.safetensors", "outside its own folder")],
)
def test_an_index_that_points_nowhere(tmp_path: Path, file: str, message: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_network(tmp_path)


def test_tensor_parallelism_needs_an_all_reduce(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="all_reduce"):
        load_network(tmp_path, tp_size=2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_counting_parameters_reads_none(
    tmp_path: Path, family: str, tp_size: int, counts: Counter[str]
) -> None:
    make_checkpoint(tmp_path, family)
    counted = measure_weights(tmp_path, tp_size=tp_size).parameters
    assert not counts
    load_network(tmp_path, tp_size=tp_size, all_reduce=lambda tensor: tensor)
    assert counted == counts.total()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_counting_parameters_finds_what_loading_would(tmp_path: Path, tp_size: int) -> None:
    make_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        MissingTensorError, match=r"no tensor model\.layers\.1\.self_attn\.k_proj\.w"
    ):
        measure_weights(tmp_path, tp_size=tp_size)


# --- checksums of what is loaded -----------------------------------------------------------


def checksum(model_dir: Path, **options: int) -> int:
    with open_checkpoint(model_dir) as checkpoint:
        return weights_checksum(checkpoint, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checksum_of_weights_does_not_depend_on_who_takes_it(tmp_path: Path, family: str) -> None:
    """Nor on files: the same tensors in several have the same one."""
    whole = make_checkpoint(tmp_path / "one", family)
    expected = checksum(whole)
    assert checksum(make_checkpoint(tmp_path / "again", family), threads=3) == expected
    for parts in (2, 3, 7):
        shares = [checksum(whole, part=part, parts=parts) for part in range(parts)]
        assert sum(shares) % 2**63 == expected
    if family != "internlm2":
        assert checksum(make_checkpoint(tmp_path / "many", family, shard_size="20KB")) == expected


def test_every_weight_that_is_loaded_counts_and_no_other(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, tie_word_embeddings=True)
    path = model / "model.safetensors"
    expected, stored = checksum(model), load_file(path)
    for name, tensor in stored.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1e-3
        save_file(stored | {name: changed}, path)
        assert checksum(model) != expected, name
    save_file(stored | {"lm_head.weight": torch.ones(3)}, path)
    assert checksum(model) == expected
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}, path)
    assert checksum(model) != expected


@given(
    stored=st.binary(min_size=16, max_size=64).filter(lambda content: len(content) % 16 == 0),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
)
def test_a_tensor_s_checksum_is_that_of_its_bytes(stored: bytes, dtype: torch.dtype) -> None:
    tensor = torch.frombuffer(bytearray(stored), dtype=dtype)
    assert tensor_checksum(tensor) == zlib.crc32(stored)
    assert tensor_checksum(tensor.view(2, -1).t().contiguous().t()) == zlib.crc32(stored)
    assert tensor_checksum(tensor, zlib.crc32(b"before")) == zlib.crc32(b"before" + stored)
