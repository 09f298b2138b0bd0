"""Right words in answers, asked of every layer but the first (deep supervision)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from csps.models.train_needle.batch import Batch

SIDE_LOSS_WEIGHT = 0.3
"""Of each earlier layer's answers, and of filler, beside the last layer's answers."""


def layer_logits(model: LlamaForCausalLM, batch: Batch) -> list[Tensor]:
    """Predictions (N, vocabulary) of each layer but the first, the last layer's last."""
    output = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
        output_hidden_states=True,
    )
    states = [state[batch.rows, batch.columns] for state in output.hidden_states[2:]]
    # transformers hands out the last state normalised, the others not.
    normalised = [*(model.model.norm(state) for state in states[:-1]), states[-1]]
    return [model.lm_head(state) for state in normalised]


def loss_and_accuracy(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float]:
    """The loss, and the share of right words in answers."""
    logits = layer_logits(model, batch)
    end = batch.answers
    losses = [F.cross_entropy(each[:end], batch.targets[:end]) for each in logits]
    loss = losses[-1] + SIDE_LOSS_WEIGHT * sum(losses[:-1], torch.zeros(()))
    if end < len(batch.targets):
        loss = loss + SIDE_LOSS_WEIGHT * F.cross_entropy(logits[-1][end:], batch.targets[end:])
    right = logits[-1][:end].argmax(-1) == batch.targets[:end]
    return loss, right.float().mean().item()
