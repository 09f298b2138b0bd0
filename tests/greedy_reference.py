"""What transformers answers, greedily, with the log-probabilities of every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tiny_checkpoints import reference_model, reference_steps
from torch import Tensor
from transformers import PreTrainedModel


def greedy(model_dir: Path, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """The `count` tokens after a prompt, and (count, vocab) fp32 log-probabilities."""
    steps = list(reference_steps(_model(model_dir), [int(token) for token in prompt], count))
    tokens = [int(logits_v.argmax()) for logits_v in steps]
    return tokens, torch.stack([logits_v.log_softmax(-1) for logits_v in steps])


def greedy_tokens(model_dir: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after a prompt."""
    return greedy(model_dir, prompt, count)[0]


@cache
def _model(model_dir: Path) -> PreTrainedModel:
    return reference_model(model_dir)
