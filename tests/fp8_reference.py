"""Reference for FP8 with a scale for each row, and transformers' models with such MLPs.

Nothing here is shared with the product: numbers are looked up in the list of all FP8 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_checkpoints import reference_model
from torch import Tensor, nn
from transformers import PreTrainedModel

MARGIN = 0.17
"""Least lead of the best logit where tokens are compared. In 40 prompts of 200 tokens of the tiny
Llama, sums in another order changed FP8 numbers before 136 tokens, and their logits by up to 0.164.
"""
_POSITIVE = np.array(
    [
        code % 8 * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(127)
    ]
)
"""Numbers of E4M3 by their code: three bits of fraction and four of exponent; 127 is none."""


def in_fp8(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest FP8 numbers; of two that are equally near, the one with an even code."""
    size = np.minimum(np.abs(numbers), _POSITIVE[-1])
    above = np.searchsorted(_POSITIVE, size)
    below = np.maximum(above - 1, 0)
    up, down = _POSITIVE[above] - size, size - _POSITIVE[below]
    takes_below = (down < up) | ((down == up) & (below % 2 == 0))
    return np.sign(numbers) * _POSITIVE[np.where(takes_below, below, above)]


def quantized_rows(x_rn: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return FP8 numbers (r, n) and the scales of their rows (r, 1)."""
    rows = x_rn.float().numpy()
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scales = np.maximum(largest / np.float32(448), np.float32(2.0**-120))
    return in_fp8((rows / scales).astype(np.float64)), scales.astype(np.float64)


def product(x_ti: Tensor, weight_oi: Tensor) -> Tensor:
    """Return tokens times a weight, both quantized by row, in fp64."""
    (x, x_scales), (weight, weight_scales) = quantized_rows(x_ti), quantized_rows(weight_oi)
    return torch.from_numpy(x @ weight.T * x_scales * weight_scales.T)


class Fp8Linear(nn.Module):
    """A linear layer whose inputs are divided among ranks, each with scales of its own. Its bias is
    not quantized."""

    def __init__(self, layer: nn.Linear, parts: int) -> None:
        super().__init__()
        self._parts = layer.weight.detach().chunk(parts, dim=1)
        self._bias = None if layer.bias is None else layer.bias.detach().double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products."""
        flat = x.flatten(0, -2).chunk(len(self._parts), dim=1)
        products = (product(part, weight) for part, weight in zip(flat, self._parts, strict=True))
        total: Tensor = torch.stack(list(products)).sum(0)
        if self._bias is not None:
            total = total + self._bias
        return total.to(x.dtype).view(*x.shape[:-1], -1)


def fp8_model(model_dir: Path, tp: int = 1) -> PreTrainedModel:
    """Return transformers' model of a checkpoint, its MLPs in FP8 on so many ranks."""
    model = deepcopy(reference_model(model_dir))
    replaced = 0
    for module in model.modules():
        for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"):
            if isinstance(linear := getattr(module, name, None), nn.Linear):
                setattr(module, name, Fp8Linear(linear, tp if name == "down_proj" else 1))
                replaced += 1
    assert replaced, "a model without MLPs"
    return model


def fp8_logits(model_dir: Path, token_ids: Sequence[int], tp: int = 1) -> Tensor:
    """Return (tokens, vocab): the logits of one sequence."""
    with torch.inference_mode():
        logits: Tensor = fp8_model(model_dir, tp)(torch.tensor([list(token_ids)])).logits[0]
    return logits


def fp8_greedy(model_dir: Path, prompt: Sequence[int], count: int, tp: int = 1) -> list[int]:
    """Return the `count` tokens that greedy decoding appends to a prompt.

    The best logit of each is ahead by more than an FP8 number that is rounded the other way, by
    another order of sums, changes.
    """
    model = fp8_model(model_dir, tp)
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second > MARGIN, "another order of sums may change this token"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
