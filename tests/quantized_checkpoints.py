"""Tiny checkpoints with quantized projections."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint
from torch import Tensor

SHAPE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
"""Of experts, for blocks of which transformers reads whole ones alone."""
Parts = dict[str, Tensor]
"""Tensors of one weight by name."""


def quantize(
    model_dir: Path, family: str, config: dict[str, Any], parts_of: Callable[[str, Tensor], Parts]
) -> Path:
    """Write a checkpoint whose projections are quantized; `parts_of` returns their tensors."""
    make_checkpoint(model_dir, family, **(SHAPE if family.endswith("moe") else {}))
    path = model_dir / "model.safetensors"
    tensors: Parts = {}
    for name, weight in load_file(path).items():
        tensors |= parts_of(name, weight) if "_proj.weight" in name else {name: weight}
    save_file(tensors, path)
    path = model_dir / "config.json"
    values = {**json.loads(path.read_text()), "quantization_config": config}
    path.write_text(json.dumps(values))
    return model_dir


def scales_of(blocks_rbcb: Tensor, largest: float) -> Tensor:
    """Return the scale of each block of rows and columns."""
    return blocks_rbcb.abs().amax(dim=(1, 3)).clamp_min(1e-9) / largest


def in_fp8(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    height, width = block or (rows, columns)
    blocks = weight.view(rows // height, height, columns // width, width)
    scales = scales_of(blocks, 448.0)
    numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return numbers.view(rows, columns), scales


def fp8_checkpoint(
    model_dir: Path,
    family: str,
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype = torch.float32,
) -> Path:
    def parts(name: str, weight: Tensor) -> Parts:
        numbers, scales = in_fp8(weight, block)
        scales = scales if block else scales.view(())
        return {name: numbers, f"{name}_scale_inv": scales.to(scale_dtype)}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return quantize(model_dir, family, config, parts)
