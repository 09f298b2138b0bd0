"""What 8-bit KV is by definition, and transformers' models with such a KV cache.

Nothing here is shared with the product: numbers are rounded one head at a time, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_checkpoints import reference_model
from torch import Tensor
from transformers import DynamicCache


def scale_of(numbers: NDArray[np.float32]) -> float:
    """Return the scale of one head of a token: the least number of 17 significant bits with which
    none of its numbers comes to more than 127.
    """
    largest = float(np.abs(numbers).max() / np.float32(127))
    if not largest:
        return 2.0**-120
    mantissa, exponent = math.frexp(largest)
    return math.ldexp(math.ceil(math.ldexp(mantissa, 17)), exponent - 17)


def whole_numbers(x_thd: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the numbers (t, h, d) and scales (t, h) of 8-bit KV."""
    numbers = x_thd.float().numpy()
    heads = numbers.reshape(-1, numbers.shape[-1])
    scales = np.array([scale_of(head) for head in heads])
    whole = np.rint(heads.astype(np.float64) / scales[:, None]).astype(np.int64)
    return whole.reshape(numbers.shape), scales.reshape(numbers.shape[:-1])


def rounded(x_thd: Tensor) -> Tensor:
    """Return keys or values rounded to what 8 bits hold."""
    whole, scales = whole_numbers(x_thd)
    return torch.from_numpy(whole * scales[..., None]).to(x_thd.dtype)


class RoundedCache(DynamicCache):
    """Transformers' cache, of which all rows see rounded keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round what is added, and return all."""
        new = rounded(key_states), rounded(value_states)
        both: tuple[Tensor, Tensor] = super().update(*new, layer_idx, *args, **kwargs)
        return both


def rounded_logits(model_dir: Path, token_ids: Sequence[int]) -> Tensor:
    """Return (tokens, vocab): transformers' logits of one sequence, all with 8-bit KV."""
    model = reference_model(model_dir)
    cache = RoundedCache(config=model.config.get_text_config())
    with torch.inference_mode():
        out = model(torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True)
    logits: Tensor = out.logits[0]
    return logits


def rounded_greedy(model_dir: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens that greedy decoding over 8-bit KV appends to a prompt."""
    model = reference_model(model_dir)
    cache = RoundedCache(config=model.config.get_text_config())
    tokens, step = [], [int(token) for token in prompt]
    for _ in range(count):
        with torch.inference_mode():
            out = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
        step = [int(out.logits[0, -1].argmax())]
        tokens += step
    return tokens
