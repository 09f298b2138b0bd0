"""A short text that costs attention what a long one would: skipped positions (PoSE).

Training sequences, and a batch of them as tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Every order of magnitude from `low` to `high` as likely as any other."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def skipping_positions(
    rng: random.Random, ids: Sequence[int], length: int, full_stop: int
) -> list[int]:
    """Increasing positions that spread tokens over ``length``, skipping between sentences."""
    ends = [index for index, id_ in enumerate(ids) if id_ == full_stop]
    # Uneven shares: some sentences stay neighbours while others move far apart.
    shares = [rng.random() ** 4 for _ in ends]
    scale = max(0, length - len(ids)) / (sum(shares) or 1.0)
    skips = {index: int(share * scale) for index, share in zip(ends, shares, strict=True)}
    positions: list[int] = []
    position = 0
    for index in range(len(ids)):
        positions.append(position)
        position += 1 + skips.get(index, 0)
    return positions


FILLER, ASIDE = -1, -2
"""What a token tells that tells no fact: what the text is filled with; or it is a question's, an
answer's, or a key in passing."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """B sequences of T tokens and the N places in them where a word is to be predicted."""

    ids: Tensor
    """(B, T)"""
    positions: Tensor
    """(B, T)"""
    mask: Tensor
    """(B, 1, T, T), added to the attention logits: -inf, 0, or ln(R)."""
    rows: Tensor
    """(N,) sequence of each prediction."""
    columns: Tensor
    """(N,) the token behind which it is made."""
    targets: Tensor
    """(N,)"""
    recalled: Tensor
    """(N,) what the first layer that answers is to predict: the same, or a key to look up."""
    answers: int
    """The first of the N belong to answers, all others to filler."""


@dataclass(kw_only=True)
class TrainingSequence:
    """One training sequence while it is being written."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    """0: text that all may see; n: seen by the n-th question alone."""
    told: list[int]
    """The fact that a token tells, by its index in the haystack; or `FILLER`, or `ASIDE`."""
    copies: float = 1.0
    """How many times each filler word counts."""
    rivals: float = 1.0
    """How many times each fact counts that a question does not ask for."""

    def __post_init__(self) -> None:
        self.predictions: list[tuple[int, int]] = []
        """(index of the token before, word to predict)"""
        self.continuations: list[tuple[int, int]] = []
        """The same in filler."""
        self.needed: dict[int, Sequence[int]] = {}
        """The facts that a question needs, by its block."""
        self.recalls: dict[int, int] = {}
        """Keys to look up, by the index of the token behind which the value is predicted."""


def collate(sequences: Sequence[TrainingSequence], pad: int) -> TrainingBatch:
    """Side by side; what a sequence lacks in length is `pad`, which nobody sees."""
    width = max(len(sequence.ids) for sequence in sequences)

    def padded(rows: Iterator[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    blocks = padded((s.blocks for s in sequences), -1)
    told = padded((s.told for s in sequences), ASIDE)
    copies = torch.tensor([s.copies for s in sequences]).log().clamp(min=0)
    seen = (blocks[:, None, :] == 0) | (blocks[:, :, None] == blocks[:, None, :])
    seen &= torch.ones(width, width, dtype=torch.bool).tril()
    mask = ((told == FILLER).float() * copies[:, None])[:, None, :].expand_as(seen).clone()
    for row, sequence in enumerate(sequences):
        for block, needed in sequence.needed.items():
            rivals = (told[row] >= 0) & ~torch.isin(told[row], torch.tensor(needed))
            mask[row, blocks[row] == block] += rivals * math.log(sequence.rivals)
    answers = [(row, *p) for row, s in enumerate(sequences) for p in s.predictions]
    continuations = [(row, *p) for row, s in enumerate(sequences) for p in s.continuations]
    rows, columns, targets = torch.tensor(answers + continuations).unbind(1)
    keys = [sequences[row].recalls.get(i, word) for row, i, word in answers + continuations]
    return TrainingBatch(
        ids=padded((s.ids for s in sequences), pad),
        positions=padded((s.positions for s in sequences), 0),
        mask=mask.masked_fill(~seen, -torch.inf)[:, None],
        rows=rows,
        columns=columns,
        targets=targets,
        recalled=torch.tensor(keys),
        answers=len(answers),
    )
