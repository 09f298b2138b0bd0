"""Every family under every strategy: logits of gangs are those of transformers to 3e-6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_ranks import StrategyRanks, step_of, strategy_ranks
from tiny_checkpoints import FAMILIES, make_checkpoint, reference_logits
from uniform_plan import uniform_plan

from csps.actors.attention.choice import WITH_PLAN, WITHOUT_PLAN, strategy_of
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillStep

WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "mixtral": {"sliding_window": 9},
    "phi3": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 7},
}
"""Windows of families that often have none; shorter than the rows of a member."""
MODELS = [*((family, {}) for family in FAMILIES), *WINDOWED.items()]


@dataclass(frozen=True)
class Gang:
    """Ranks of one checkpoint."""

    model: Path
    ranks: StrategyRanks


@pytest.fixture(scope="module")
def gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gang]:
    """Return a gang of a family with so many instances of so many ranks."""
    (family, config), instances, tp = request.param
    model = make_checkpoint(tmp_path_factory.mktemp(family), family, **config)
    with strategy_ranks(model, instances=instances, tp=tp) as ranks:
        yield Gang(model, ranks)


def step(strategy: str, members: int, layers: int) -> PrefillStep:
    """Return a step of a whole prompt, and of two chunks whose KV so far lies on all members."""
    lengths, starts = (38, 21, 17), (0, 24, 11)
    bounds = {1: [0, 76], 2: [0, 31, 76], 3: [0, 13, 40, 76], 4: [0, 13, 13, 40, 76]}[members]
    last = members - 1
    history = [
        [],
        [KvSlice(last, 0, 9), KvSlice(0, 9, 20), KvSlice(last, 20, 24)],
        [KvSlice(0, 0, 11)],
    ]
    where = ("0-0-0", "0-0-1", "0-1-0", "1-0-0")[:members]
    csa = uniform_plan(where, levels=min(members, 2), layers=layers, micro_partitions=2)
    return step_of(
        bounds,
        lengths,
        starts=starts,
        history=history,
        strategy=strategy,
        csa=csa if strategy in WITH_PLAN else None,
    )


def error(gang: Gang, step: PrefillStep) -> float:
    """Return the largest error of a logit on any rank, relative to transformers' largest one."""
    ranks = gang.ranks
    whole = ranks.all_logits(step, strategy_of)
    prompts = [ranks.prompt(chunk.sequence_id, chunk.start + chunk.length) for chunk in step.chunks]
    expected = torch.cat(
        [
            reference_logits(gang.model, prompt.tolist())[chunk.start :]
            for chunk, prompt in zip(step.chunks, prompts, strict=True)
        ]
    )
    assert all(len(part) == len(expected) for part in whole)
    return max(float((part - expected).abs().max()) for part in whole) / float(expected.abs().max())


def gangs(*sizes: tuple[int, int]) -> Any:
    """Run a test on a gang of every model in each of these sizes."""
    named = [
        (family if not config else f"{family}, window", (family, config))
        for family, config in MODELS
    ]
    return pytest.mark.parametrize(
        "gang",
        [
            pytest.param((model, *size), id=f"{name}-{size[0]}x{size[1]}")
            for size in sizes
            for name, model in named
        ],
        indirect=True,
    )


@gangs((2, 2))
def test_every_strategy_computes_the_logits_of_transformers(gang: Gang) -> None:
    check(gang)


@pytest.mark.slow
@gangs((3, 1), (4, 1))
def test_the_same_on_more_instances_of_one_rank(gang: Gang) -> None:
    check(gang)


def check(gang: Gang) -> None:
    members = len(gang.ranks.engines) // gang.ranks.engines[0].layout.tp
    layers = gang.ranks.network.spec.layers
    errors = {
        strategy: error(gang, step(strategy, members, layers))
        for strategy in sorted(WITHOUT_PLAN | WITH_PLAN)
    }
    assert max(errors.values()) < 3e-6, errors
