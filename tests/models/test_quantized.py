"""Quantized weights: the numbers that transformers dequantizes, bit for bit, and by definition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from quantized_checkpoints import Parts, fp8_checkpoint, in_fp8, quantize, scales_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import (
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from csps.models.checkpoints import checkpoint as checkpoint_module
from csps.models.checkpoints.checkpoint import empty, open_checkpoint
from csps.models.checkpoints.loading import load_network, measure_weights, weights_checksum
from csps.models.checkpoints.stored_tensor import WeightFiles, read_quantization
from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    MissingTensorError,
    UnsupportedModelError,
)
from csps.models.network.network import Network
from csps.models.network.parameters import TensorBlock

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

Auto: Any = AutoModelForCausalLM
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def weights(network: Network) -> Iterator[Tensor]:
    """Yield all weights that may be quantized, which expert routers are not."""
    yield from (network.embedding_vd, network.head_vd, network.norm_d)
    for layer in network.layers:
        yield from replace(layer.weights, experts=None)
        if (experts := layer.weights.experts) is not None:
            yield from (experts.gate_up, experts.down)


def assert_same(ours: Network, theirs: Network) -> None:
    pairs = list(zip(weights(ours), weights(theirs), strict=True))
    assert len(pairs) > 10
    for our, their in pairs:
        assert torch.equal(our, their)
        assert not our.isnan().any()


def dequantized_by_transformers(model_dir: Path, dtype: torch.dtype, config: Any) -> Path:
    """Return a plain checkpoint of what transformers makes of a quantized one."""
    model = Auto.from_pretrained(model_dir, dtype=dtype, quantization_config=config)
    # That model would quantize again when it is saved.
    settings = json.loads((model_dir / "config.json").read_text())
    del settings["quantization_config"]
    fresh = Auto.from_config(AutoConfig.for_model(**settings), dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    plain = model_dir / "plain"
    fresh.save_pretrained(plain)
    return plain


# --- FP8 ------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("block", [(16, 32), (32, 8), None], ids=str)
def test_fp8_is_that_of_transformers(
    tmp_path: Path, family: str, block: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    model_dir = fp8_checkpoint(tmp_path, family, block)
    config = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    plain = dequantized_by_transformers(model_dir, dtype, config)
    assert_same(load_network(model_dir, dtype=dtype), load_network(plain, dtype=dtype))


def test_scales_as_powers_of_two(tmp_path: Path) -> None:
    """DeepSeek's newer files have one byte for each: its exponent."""

    def parts(name: str, weight: Tensor) -> Parts:
        numbers, scales = in_fp8(weight, (16, 16))
        powers = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
        stored = powers if "q_proj" in name else powers.view(torch.uint8)
        return {name: numbers, f"{name}_scale_inv": stored}

    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    model_dir = quantize(tmp_path, "llama", config, parts)
    plain = dequantized_by_transformers(
        model_dir,
        torch.float32,
        FineGrainedFP8Config(weight_block_size=(16, 16), scale_fmt="ue8m0", dequantize=True),
    )
    assert_same(load_network(model_dir), load_network(plain))


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    data=st.data(),
)
def test_any_part_of_a_matrix_in_blocks(
    rows: int, columns: int, height: int, width: int, data: st.DataObject
) -> None:
    """The last blocks may be cut off, which transformers does not read."""
    numbers = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // height), -(-columns // width)) + 0.5
    files = {"w": numbers, "w_scale_inv": scales}
    found = in_memory(files, {"quant_method": "fp8", "weight_block_size": [height, width]})
    at = tuple(part_of(size, data) for size in (rows, columns))
    expected = torch.stack(
        [
            torch.stack(
                [numbers[r, c].float() * scales[r // height, c // width] for c in range(columns)]
            )
            for r in range(rows)
        ]
    )
    assert torch.equal(found.find("w").read(at, None), expected[at])


def part_of(size: int, data: st.DataObject) -> slice:
    start = data.draw(st.integers(0, size - 1))
    return slice(start, data.draw(st.integers(start + 1, size)))


class StoredInMemory:
    """A safetensors file that was never written."""

    KINDS: ClassVar = {
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.uint8: "U8",
    }

    def __init__(self, tensors: Parts) -> None:
        self._tensors = tensors

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> Any:
        tensor = self._tensors[name]
        stored = MagicMock()
        stored.get_shape = lambda: list(tensor.shape)
        stored.get_dtype = lambda: self.KINDS[tensor.dtype]
        stored.__getitem__ = lambda _, at: tensor[at]
        return stored


def in_memory(tensors: Parts, config: dict[str, Any]) -> WeightFiles:
    path = Path("config.json")
    values = CheckpointJson(path=path, values={"quantization_config": config})
    opened = StoredInMemory(tensors)
    return WeightFiles(
        folder=path.parent,
        files=dict.fromkeys(tensors, opened),
        quantization=read_quantization(values),
    )


# --- compressed-tensors ---------------------------------------------------------------------


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return rows of small integers as 32-bit words, by Python's own integers."""
    per_word, words = 32 // bits, []
    for row in (numbers + 2 ** (bits - 1)).tolist():
        row += [0] * (-len(row) % per_word)
        groups = [row[at : at + per_word] for at in range(0, len(row), per_word)]
        unsigned = [
            sum(number << bits * place for place, number in enumerate(group)) for group in groups
        ]
        words.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
    return torch.tensor(words, dtype=torch.int32)


def integers_of(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Return a weight as integers, and the scales of its rows or of groups in them."""
    rows, columns = weight.shape
    size, largest = group or columns, 2 ** (bits - 1) - 1
    groups = weight.view(rows, 1, columns // size, size)
    scales = scales_of(groups, largest).view(rows, -1).to(torch.bfloat16)
    numbers = (groups / scales.float().view(rows, 1, -1, 1)).round().clamp(-largest - 1, largest)
    return numbers.view(rows, columns).int(), scales


def compressed_config(weights: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def packed_checkpoint(model_dir: Path, family: str, bits: int, group: int | None) -> Path:
    def parts(name: str, weight: Tensor) -> Parts:
        numbers, scales = integers_of(weight, bits, group)
        return {
            f"{name}_packed": packed(numbers, bits),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(weight.shape),
        }

    arguments = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    config = compressed_config(arguments, "pack-quantized")
    return quantize(model_dir, family, config, parts)


@DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 16), (4, 32)])
def test_packed_integers_are_those_of_transformers(
    tmp_path: Path, family: str, bits: int, group: int | None, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors")
    model_dir = packed_checkpoint(tmp_path, family, bits, group)
    plain = dequantized_by_transformers(model_dir, dtype, CompressedTensorsConfig(dequantize=True))
    assert_same(load_network(model_dir, dtype=dtype), load_network(plain, dtype=dtype))


@DTYPES
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("llama", "tensor"),
        ("llama", "channel"),
        ("llama", "block"),
        # transformers multiplies experts by scales of tensors and rows alone.
        ("qwen3_moe", "tensor"),
        ("qwen3_moe", "channel"),
    ],
)
def test_compressed_fp8_is_that_of_transformers(
    tmp_path: Path, family: str, strategy: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors")

    def parts(name: str, weight: Tensor) -> Parts:
        block = {"tensor": None, "channel": (1, weight.shape[1]), "block": (16, 32)}[strategy]
        numbers, scales = in_fp8(weight, block)
        scales = scales.view(1) if block is None else scales
        return {name: numbers, f"{name}_scale": scales.to(torch.bfloat16)}

    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        arguments["block_structure"] = [16, 32]
    config = compressed_config(arguments, "float-quantized")
    model_dir = quantize(tmp_path, family, config, parts)
    plain = dequantized_by_transformers(model_dir, dtype, CompressedTensorsConfig(dequantize=True))
    assert_same(load_network(model_dir, dtype=dtype), load_network(plain, dtype=dtype))


@given(
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 12),
    groups=st.integers(1, 5),
    size=st.integers(1, 11),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    data=st.data(),
)
def test_any_part_of_packed_integers(
    bits: int, rows: int, groups: int, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    assume(groups * size > 4)  # fewer integers of 4 bits take as many words as those of 8
    columns, half = groups * size, 2 ** (bits - 1)
    numbers = torch.randint(-half, half, (rows, columns))
    scales = (torch.rand(rows, groups) + 0.5).to(dtype)
    files = {
        "w_packed": packed(numbers, bits),
        "w_scale": scales,
        "w_shape": torch.tensor([rows, columns]),
    }
    config = compressed_config({"num_bits": bits, "type": "int"}, "pack-quantized")
    at = tuple(part_of(width, data) for width in (rows, columns))
    expected = numbers.to(dtype) * scales.repeat_interleave(size, 1)
    stored = in_memory(files, config).find("w")
    assert (stored.shape, stored.format) == ((rows, columns), f"INT{bits}")
    assert torch.equal(stored.read(at, None), expected[at])


# --- MXFP4 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of gpt-oss with random experts in MXFP4."""
    model_dir = tmp_path_factory.mktemp("gpt_oss")
    config = AutoConfig.for_model(
        "gpt_oss",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=272,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    Auto.from_config(config).save_pretrained(model_dir)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*blocks, 16), generator=random, dtype=torch.uint8
        )
        # From the least to the largest power that bf16 and fp32 can hold with these numbers.
        tensors[f"{name}_scales"] = torch.randint(
            1, 252, blocks, generator=random, dtype=torch.uint8
        )
    save_file(tensors, path)
    path = model_dir / "config.json"
    values = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(values))
    return model_dir


@DTYPES
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_mxfp4_is_that_of_transformers(gpt_oss: Path, name: str, dtype: torch.dtype) -> None:
    model = Auto.from_pretrained(
        gpt_oss, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
    )
    theirs = model.get_parameter(f"model.layers.0.mlp.experts.{name}")
    count, columns, rows = theirs.shape
    with open_checkpoint(gpt_oss) as checkpoint:
        for index in range(count):
            for wanted in (range(columns), range(5, 37)):
                block = TensorBlock(
                    tensor=f"model.layers.0.mlp.experts.{name}",
                    shape=(count, rows, columns),
                    rows=range(rows),
                    columns=wanted,
                    index=index,
                )
                ours = empty((block,), dtype, "cpu")
                checkpoint.read((block,), ours)
                assert torch.equal(ours, theirs[index].T[:, wanted.start : wanted.stop])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_load_their_part_of_mxfp4_experts(gpt_oss: Path, tp_size: int) -> None:
    """Bounds of ranks lie inside of groups with one scale: 96 columns in two."""
    model = Auto.from_pretrained(gpt_oss, quantization_config=Mxfp4Config(dequantize=True))
    gate_up_ehi, down_eih = (
        model.get_parameter(f"model.layers.0.mlp.experts.{name}_proj")
        for name in ("gate_up", "down")
    )
    for tp_rank in range(tp_size):
        network = load_network(
            gpt_oss, tp_rank=tp_rank, tp_size=tp_size, all_reduce=lambda part: part
        )
        experts = network.layers[0].weights.experts
        assert experts is not None
        own = network.layers[0].shard.expert_intermediate
        pairs = slice(2 * own.start, 2 * own.stop)
        assert torch.equal(experts.gate_up, gate_up_ehi[:, :, pairs].mT.flatten(0, 1))
        assert torch.equal(experts.down, down_eih[:, own.start : own.stop].mT.flatten(0, 1))
        assert (experts.down_bias is None) == (tp_rank > 0)


def test_mxfp4_takes_four_bits_for_a_number(gpt_oss: Path) -> None:
    with open_checkpoint(gpt_oss) as checkpoint:
        stored = checkpoint.weights.find("model.layers.0.mlp.experts.down_proj")
        size = sum(map(checkpoint.weights.bytes_of, stored.parts))
    assert (stored.format, stored.shape) == ("MXFP4", (3, 64, 96))
    assert size == math.prod(stored.shape) // 2 + math.prod(stored.shape) // 32


# --- all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FP8", "INT8"])
def test_ranks_read_their_part(tmp_path: Path, kind: str) -> None:
    """Bounds of ranks lie inside of blocks: 96 columns of the MLP in four."""
    if kind == "FP8":
        model_dir = fp8_checkpoint(tmp_path, "llama", (32, 32))
    else:
        model_dir = packed_checkpoint(tmp_path, "llama", 8, 32)
    whole = load_network(model_dir).layers[1].weights
    assert whole.gate_up is not None
    assert whole.down is not None
    gates, ups = whole.gate_up.chunk(2)
    for rank in range(4):
        shard = load_network(model_dir, tp_rank=rank, tp_size=4, all_reduce=lambda part: part)
        part = shard.layers[1].weights
        assert part.gate_up is not None
        assert part.down is not None
        mine = slice(rank * 24, rank * 24 + 24)
        assert torch.equal(part.gate_up, torch.cat((gates[mine], ups[mine])))
        assert torch.equal(part.down, whole.down[:, mine])


@pytest.mark.parametrize("elements", [1, 100, 5000])
def test_reading_in_parts_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    model_dir = fp8_checkpoint(tmp_path, "qwen3_moe", (16, 32))
    expected = load_network(model_dir)
    monkeypatch.setattr(checkpoint_module, "READ_ELEMENTS", elements)
    assert_same(load_network(model_dir), expected)


def test_sizes_before_and_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = fp8_checkpoint(tmp_path, "llama", (16, 32))
    stored = load_file(model_dir / "model.safetensors")
    sizes = measure_weights(model_dir, dtype=torch.bfloat16)
    assert sizes.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
    with caplog.at_level("INFO"):
        network = load_network(model_dir, dtype=torch.bfloat16)
    assert sizes.loaded_bytes == sum(tensor.nbytes for tensor in weights(network))
    assert sizes.quantized == ("FP8",)
    assert "weights stored as FP8 (0.0 GiB) take 0.0 GiB as bfloat16 on this rank" in caplog.text


def test_scales_count_in_the_checksum(tmp_path: Path) -> None:
    model_dir = fp8_checkpoint(tmp_path, "llama", (16, 32))

    def checksum() -> int:
        with open_checkpoint(model_dir) as checkpoint:
            return weights_checksum(checkpoint)

    before, path = checksum(), model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"][0, 0] *= 1.5
    save_file(tensors, path)
    assert checksum() != before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "quantized by gptq cannot be read; supported: FP8"),
        ({"bits": 4}, "quantized by an unnamed method"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "experts in fp4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "must be rows and columns"),
        (compressed_config({"num_bits": 4}, "nvfp4-pack-quantized"), "of format 'nvfp4"),
        (compressed_config({"num_bits": 8, "symmetric": False}, "pack-quantized"), "zero points"),
        (compressed_config({"num_bits": 3}, "pack-quantized"), "integers of 3 bits"),
    ],
)
def test_other_quantizations_are_named(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    model_dir = quantize(tmp_path, "llama", config, lambda name, weight: {name: weight})
    with pytest.raises(CheckpointError, match=message):
        load_network(model_dir)


def change(model_dir: Path, edit: Callable[[Parts], object]) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            lambda parts: parts.pop(f"{NAME}_scale_inv"),
            MissingTensorError,
            f"no tensor {NAME}_scale_inv",
        ),
        (
            lambda parts: parts.update({f"{NAME}_scale_inv": torch.ones(4, 4)}),
            CheckpointError,
            r"shape \(4, 4\), which fits no weight of shape \(64, 96\) in blocks of \(16, 32\)",
        ),
        (
            lambda parts: parts.update({NAME: torch.ones(64, 96, dtype=torch.int8)}),
            UnsupportedModelError,
            f"{NAME} is stored as I8",
        ),
    ],
)
def test_damaged_parts_are_named(
    tmp_path: Path, edit: Callable[[Parts], object], error: type[Exception], message: str
) -> None:
    model_dir = fp8_checkpoint(tmp_path, "llama", (16, 32))
    change(model_dir, edit)
    with pytest.raises(error, match=message):
        measure_weights(model_dir)


def test_damaged_words_are_named(tmp_path: Path) -> None:
    model_dir = packed_checkpoint(tmp_path, "llama", 8, None)
    change(model_dir, lambda parts: parts.update({f"{NAME}_shape": torch.tensor([64, 97])}))
    with pytest.raises(CheckpointError, match=r"shape \(64, 24\), which holds no \(64, 97\)"):
        measure_weights(model_dir)
