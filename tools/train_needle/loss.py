"""Compute the training loss: answers of every layer but the first, and keys that no head sees.

Facts are looked up by what the first layer writes at a value: the key two words before. Training
leaves a key here and there to which no head of that layer attends. Its facts then look like those
of any other such key. Attention that is nearly none has nearly no gradient, so no number of
questions changes that; the logarithm of the attention has one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from csps.models.needle_prompts.haystack import Fact
from csps.models.needle_prompts.words import KEYS, VALUES
from csps.tools.train_needle.batch import TrainingBatch
from csps.tools.train_needle.model import BEGIN, Spelling

ATTENTION_NAME = "train_needle"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in float32 within autocast, for transformers' registry.

    Args:
        query: (B, heads, T, head dim); key and value have KV heads instead.
        attention_mask: (B, 1, T, T), added to the logits.
        scaling: factor on the logits.

    Returns:
        (B, T, heads, head dim), and no weights.
    """
    group = query.shape[1] // key.shape[1]
    # Backward through torch's bfloat16 attention takes five times as long.
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(),
            key.float().repeat_interleave(group, 1),
            value.float().repeat_interleave(group, 1),
            attn_mask=attention_mask,
            scale=scaling,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, attend)


KEY, VALUE = 4, 6
"""Positions of key and value in the sentence of a fact behind the first token."""
ENOUGH = math.log(2)
"""Loss below which a key is seen: a head spends half of its attention on it."""


def fact_sentences(rng: random.Random, spelling: Spelling) -> Tensor:
    """Return one fact of each key, with a value of its own, (keys, tokens)."""
    values = rng.sample(VALUES, len(KEYS))
    facts = (Fact(key, value, 0.0) for key, value in zip(KEYS, values, strict=True))
    return torch.tensor([[spelling.ids[word] for word in (BEGIN, *fact.words)] for fact in facts])


def overlooked(model: LlamaForCausalLM, sentences: Tensor) -> Tensor:
    """Return the loss of keys that the first layer overlooks from their values.

    It is the mean negative logarithm of the attention of the head that sees a key best, beyond
    `ENOUGH`.
    """
    layer = model.model.layers[0]
    states = layer.input_layernorm(model.model.embed_tokens(sentences[:, : VALUE + 1]))
    cos, sin = model.model.rotary_emb(states, torch.arange(VALUE + 1)[None])
    attention = layer.self_attn
    heads = (*states.shape[:2], -1, attention.head_dim)
    query = attention.q_proj(states).view(heads).transpose(1, 2)
    key = attention.k_proj(states).view(heads).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query.float(), key.float(), cos, sin)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = attention.scaling * torch.einsum("bhd,bhtd->bht", query[:, :, VALUE], key)
    seen: Tensor = logits.log_softmax(-1)[..., KEY].amax(1)
    return (-seen - ENOUGH).relu().mean()


ROWS = 128
"""Predictions per chunk."""
SIDE_LOSS_WEIGHT = 0.3
"""Weight of each earlier layer's answers, and of filler, relative to the last layer's answers."""


def layer_states(model: LlamaForCausalLM, batch: TrainingBatch, every: int = 1) -> list[Tensor]:
    """Return the states from which layers predict, (N, hidden) each, in order.

    They are those of the second layer, of each `every`-th behind it, and of the last.
    """
    output = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
        output_hidden_states=True,
    )
    *earlier, last = (state[batch.rows, batch.columns] for state in output.hidden_states[2:])
    # transformers returns the last state normalized, the others not.
    return [*(model.model.norm(state) for state in earlier[::every]), last]


def loss_and_accuracy(
    model: LlamaForCausalLM, batch: TrainingBatch, every: int = 1
) -> tuple[Tensor, float]:
    """Return the loss, and the fraction of right words in answers.

    Args:
        every: layers from one that answers to the next (`layer_states`).
    """
    states = layer_states(model, batch, every)
    end = batch.answers
    head = model.lm_head.weight
    loss = torch.zeros(())
    for layer, state in enumerate(states[:-1]):
        targets = batch.targets if layer else batch.recalled
        loss = loss + SIDE_LOSS_WEIGHT * cross_entropy(state[:end], head, targets[:end])[0]
    # Same weight as the answers: without the key there is nothing to look up.
    (keys,) = torch.where(batch.recalled != batch.targets)
    if len(keys):
        loss = loss + cross_entropy(states[0][keys], head, batch.recalled[keys])[0]
    answers, right = cross_entropy(states[-1][:end], head, batch.targets[:end])
    loss = loss + answers
    if end < len(batch.targets):
        filler, _ = cross_entropy(states[-1][end:], head, batch.targets[end:])
        loss = loss + SIDE_LOSS_WEIGHT * filler
    return loss, right.float().mean().item()


def cross_entropy(states: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and which predictions (N,) are right.

    Args:
        states: (N, hidden), normalized.
        head: (vocabulary, hidden), weights of the language-model head.
        targets: (N,) token ids.
    """
    loss, right = _CrossEntropy.apply(states, head, targets)  # type: ignore[no-untyped-call]
    return loss, right


class _CrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy in one function that also computes the gradients.

    Logits (N, vocabulary) are most of the work of a copying step: here they stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            x, w = states.bfloat16(), head.bfloat16()
            starts = range(0, len(targets), ROWS)
            chunks = [_chunk(x[i : i + ROWS], targets[i : i + ROWS], w) for i in starts]
            losses, right, state_gradients, head_gradients = zip(*chunks, strict=True)
            scale = 1.0 / len(targets)
            ctx.save_for_backward(scale * torch.cat(state_gradients), scale * sum(head_gradients))
        hits = torch.cat(right)
        ctx.mark_non_differentiable(hits)
        return scale * torch.stack(losses).sum(), hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        states, head = ctx.saved_tensors
        return states * gradients[0], head * gradients[0], None


def _chunk(x: Tensor, targets: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, right predictions, and the loss's gradients for states and head."""
    logits = (x @ w.T).float()
    rows = torch.arange(len(targets))
    own = logits[rows, targets]
    top = logits.amax(-1)
    exponentials = logits.sub_(top[:, None]).exp_()
    total = exponentials.sum(-1)
    gradients = exponentials.div_(total[:, None])
    gradients[rows, targets] -= 1.0
    gradients = gradients.bfloat16()
    loss = (total.log() + top - own).sum()
    return loss, own == top, (gradients @ w).float(), (gradients.T @ x).float()
