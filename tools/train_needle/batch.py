"""Write training sequences with skipped positions (PoSE), and collate them into a batch of
tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Return a random number with every order of magnitude from `low` to `high` equally likely."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def skipping_positions(
    rng: random.Random, ids: Sequence[int], length: int, full_stop: int
) -> list[int]:
    """Return increasing positions that spread tokens over ``length``, skipping between
    sentences."""
    ends = [index for index, id_ in enumerate(ids) if id_ == full_stop]
    # Uneven weights: some sentences stay neighbors while others move far apart.
    weights = [rng.random() ** 4 for _ in ends]
    scale = max(0, length - len(ids)) / (sum(weights) or 1.0)
    skips = {index: int(weight * scale) for index, weight in zip(ends, weights, strict=True)}
    positions: list[int] = []
    position = 0
    for index in range(len(ids)):
        positions.append(position)
        position += 1 + skips.get(index, 0)
    return positions


FILLER, ASIDE = -1, -2
"""Marks of tokens that state no fact: filler of the text; and tokens of a question, of an answer,
or a key mentioned in passing."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """B sequences of T tokens, and the N places in them at which a word is predicted."""

    ids: Tensor
    """Token ids, (B, T)."""
    positions: Tensor
    """Positions, (B, T)."""
    mask: Tensor
    """Addition to the attention logits, (B, 1, T, T): -inf, 0, or ln(R)."""
    rows: Tensor
    """Sequence of each prediction, (N,)."""
    columns: Tensor
    """Token behind which each prediction is made, (N,)."""
    targets: Tensor
    """Token ids to predict, (N,)."""
    recalled: Tensor
    """Token ids for the first layer that answers, (N,): the same, or a key to look up."""
    answers: int
    """Number of predictions that belong to answers; they come first, all others are filler."""


@dataclass(kw_only=True)
class TrainingSequence:
    """One training sequence while it is written."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    """Block of each token. 0: text that all may see; n: visible to the n-th question alone."""
    facts: list[int]
    """Fact that each token states, by its index in the haystack; or `FILLER`, or `ASIDE`."""
    copies: float = 1.0
    """Weight of each filler word, in copies."""
    rivals: float = 1.0
    """Weight of each fact that a question does not ask for, in copies."""

    def __post_init__(self) -> None:
        self.predictions: list[tuple[int, int]] = []
        """Pairs (index of the token before, word to predict)."""
        self.continuations: list[tuple[int, int]] = []
        """Such pairs in filler."""
        self.needed: dict[int, Sequence[int]] = {}
        """Facts that a question needs, by its block."""
        self.recalls: dict[int, int] = {}
        """Keys to look up, by the index of the token behind which the value is predicted."""


def collate(sequences: Sequence[TrainingSequence], pad: int) -> TrainingBatch:
    """Stack sequences; fill short ones with `pad`, which nobody sees."""
    width = max(len(sequence.ids) for sequence in sequences)

    def padded(rows: Iterator[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    blocks = padded((sequence.blocks for sequence in sequences), -1)
    facts = padded((sequence.facts for sequence in sequences), ASIDE)
    copies = torch.tensor([sequence.copies for sequence in sequences]).log().clamp(min=0)
    seen = (blocks[:, None, :] == 0) | (blocks[:, :, None] == blocks[:, None, :])
    seen &= torch.ones(width, width, dtype=torch.bool).tril()
    mask = ((facts == FILLER).float() * copies[:, None])[:, None, :].expand_as(seen).clone()
    for row, sequence in enumerate(sequences):
        for block, needed in sequence.needed.items():
            rivals = (facts[row] >= 0) & ~torch.isin(facts[row], torch.tensor(needed))
            mask[row, blocks[row] == block] += rivals * math.log(sequence.rivals)
    answers = [
        (row, *pair) for row, sequence in enumerate(sequences) for pair in sequence.predictions
    ]
    continuations = [
        (row, *pair) for row, sequence in enumerate(sequences) for pair in sequence.continuations
    ]
    rows, columns, targets = torch.tensor(answers + continuations).unbind(1)
    keys = [sequences[row].recalls.get(i, word) for row, i, word in answers + continuations]
    return TrainingBatch(
        ids=padded((sequence.ids for sequence in sequences), pad),
        positions=padded((sequence.positions for sequence in sequences), 0),
        mask=mask.masked_fill(~seen, -torch.inf)[:, None],
        rows=rows,
        columns=columns,
        targets=targets,
        recalled=torch.tensor(keys),
        answers=len(answers),
    )
