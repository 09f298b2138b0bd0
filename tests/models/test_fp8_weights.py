"""Networks whose MLPs are kept in FP8: the logits of transformers with MLPs by definition."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fp8_reference import fp8_logits, quantized_rows
from quantized_checkpoints import Parts, fp8_checkpoint, quantize
from safetensors.torch import load_file
from test_network import forward_in_parallel
from tiny_checkpoints import make_checkpoint, random_tokens, reference_logits
from torch import Tensor

from csps.kernels.rowwise_fp8 import FP8
from csps.models.checkpoints.loading import load_network, measure_weights
from csps.models.network.checkpoint_json import UnsupportedModelError
from csps.models.network.network import Network

TOKENS = 37


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"mlp_bias": True}),
        ("phi3", {}),
        ("gemma3_text", {}),
        ("glm4", {}),
        ("internlm2", {}),
    ],
)
def test_logits_are_those_of_the_definition(
    tmp_path: Path, family: str, config: dict[str, bool], tp: int
) -> None:
    """Rounding turns differences of 1e-7 into those of an FP8 number, now and then: most logits are
    as near as ever, and all far nearer than to a model that is not quantized."""
    model, token_ids = make_checkpoint(tmp_path, family, **config), random_tokens(TOKENS)
    expected, exact = fp8_logits(model, token_ids, tp), reference_logits(model, token_ids)
    lost = (exact - expected).abs()
    for chunks in ((), (5, 20, 12)):
        error = (forward_in_parallel(model, tp, token_ids, chunks, fp8=True)[0] - expected).abs()
        assert error.median() < 1e-3 * lost.median()
        assert error.max() < 0.5 * lost.max()


def matrices(network: Network) -> list[tuple[Tensor, Tensor]]:
    """Return the FP8 matrices of a network and their scales."""
    found = []
    for layer in network.layers:
        weights = layer.weights
        for matrix, scales in (
            (weights.gate_up, weights.gate_up_scales),
            (weights.down, weights.down_scales),
        ):
            assert matrix is not None
            assert scales is not None
            assert matrix.dtype == FP8
            found.append((matrix, scales))
    return found


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_stored_numbers_are_kept(tmp_path: Path, by: str) -> None:
    """Files with a scale for each tensor or row are not rounded a second time."""

    def parts(name: str, weight: Tensor) -> Parts:
        largest = weight.abs().amax() if by == "tensor" else weight.abs().amax(1, keepdim=True)
        scales = largest / 300  # not the one that csps would choose
        return {name: (weight / scales).to(FP8), f"{name}_scale_inv": scales}

    model = quantize(tmp_path, "llama", {"quant_method": "fp8"}, parts)
    stored = load_file(model / "model.safetensors")
    for tp_rank in (0, 1):
        network = load_network(model, tp_rank=tp_rank, tp_size=2, all_reduce=lambda x: x, fp8=True)
        width = 96 // 2
        own = slice(tp_rank * width, (tp_rank + 1) * width)
        for layer, ((gate_up, gate_up_scales), (down, down_scales)) in enumerate(
            zip(*[iter(matrices(network))] * 2, strict=True)
        ):
            prefix = f"model.layers.{layer}.mlp."
            names = ("gate_proj", "up_proj")
            expected = torch.cat([stored[f"{prefix}{name}.weight"].float()[own] for name in names])
            assert torch.equal(gate_up.float(), expected)
            scales = [stored[f"{prefix}{name}.weight_scale_inv"] for name in names]
            rows = [scale.expand(96, 1)[own] for scale in scales]
            assert torch.equal(gate_up_scales, torch.cat(rows))
            name = f"{prefix}down_proj.weight"
            assert torch.equal(down.float(), stored[name].float()[:, own])
            assert torch.equal(down_scales, stored[f"{name}_scale_inv"].expand(64, 1))


def test_blocks_are_rounded_again(tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path, "llama", (16, 32))
    plain, kept = load_network(model), load_network(model, fp8=True)
    floats = [
        matrix for layer in plain.layers for matrix in (layer.weights.gate_up, layer.weights.down)
    ]
    for (numbers, scales), exact in zip(matrices(kept), floats, strict=True):
        assert exact is not None
        expected, rows = quantized_rows(exact)
        assert torch.equal(numbers.double(), torch.from_numpy(expected))
        assert torch.equal(scales.double(), torch.from_numpy(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_take_a_byte_for_each_number(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=512)
    floats = measure_weights(model, dtype=dtype)
    kept = measure_weights(model, dtype=dtype, fp8=True)
    assert kept.parameters == floats.parameters
    network = load_network(model, dtype=dtype, fp8=True)
    numbers = sum(matrix.numel() for matrix, _ in matrices(network))
    rows = sum(len(scales) for _, scales in matrices(network))
    saved = numbers * (dtype.itemsize - 1) - 4 * rows
    assert floats.loaded_bytes - kept.loaded_bytes == saved
    assert sum(m.nbytes + s.nbytes for m, s in matrices(network)) == numbers + 4 * rows


def test_experts_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe")
    for refuses in (load_network, measure_weights):
        with pytest.raises(UnsupportedModelError, match="without experts only"):
            refuses(model, fp8=True)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "reason"),
    [
        ((8, 6), torch.bfloat16, 96, "compute capability 8.6"),
        ((9, 0), torch.float32, 96, "have the type bfloat16"),
        ((9, 0), torch.bfloat16, 88, "are 64 by 88, and GPUs need multiples of 16"),
    ],
)
def test_devices_that_cannot_are_refused(
    tmp_path: Path,
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    reason: str,
) -> None:
    model = make_checkpoint(tmp_path, "llama", intermediate_size=width)
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
        patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
        pytest.raises(UnsupportedModelError, match=reason) as refused,
    ):
        load_network(model, device="cuda", dtype=dtype, fp8=True)
    assert "set weight_dtype to auto" in str(refused.value)
