"""The greedy answer of transformers, with the log-probabilities of every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiny_checkpoints import reference_answer
from torch import Tensor


def greedy(model_dir: Path, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """Return the `count` tokens after a prompt, and (count, vocab) fp32 log-probabilities."""
    logits_tv = reference_answer(model_dir, tuple(int(token) for token in prompt), count)
    return logits_tv.argmax(-1).tolist(), logits_tv.log_softmax(-1)


def greedy_tokens(model_dir: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens after a prompt."""
    return greedy(model_dir, prompt, count)[0]
