"""Steps of every strategy with 8-bit KV: the logits of transformers, whose cache rounds as well.

Rounding turns differences of 1e-7 into differences of a whole scale, now and then: results are as
near as that, and far nearer than to transformers with KV as it was computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_reference import rounded_logits
from strategy_ranks import StrategyRanks, step_of, strategy_ranks
from tiny_checkpoints import make_checkpoint, reference_logits
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention.choice import WITH_PLAN, WITHOUT_PLAN, strategy_of
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillStep

LENGTHS, STARTS = (38, 21, 17), (0, 24, 11)
"""A whole prompt, and two chunks whose KV so far lies on both members."""
HISTORY = [
    [],
    [KvSlice(1, 0, 9), KvSlice(0, 9, 20), KvSlice(1, 20, 24)],
    [KvSlice(0, 0, 11)],
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 9},
}


def step(strategy: str, layers: int) -> PrefillStep:
    csa = uniform_plan(("0-0-0", "0-0-1"), levels=2, layers=layers, micro_partitions=2)
    return step_of(
        [0, 31, 76],
        LENGTHS,
        starts=STARTS,
        history=HISTORY,
        strategy=strategy,
        csa=csa if strategy in WITH_PLAN else None,
    )


def logits(ranks: StrategyRanks, strategy: str) -> Tensor:
    """Return the logits of all rows of a step."""
    return ranks.all_logits(step(strategy, ranks.network.spec.layers), strategy_of)[0]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_see_rounded_keys_and_values(tmp_path: Path, family: str, tp: int) -> None:
    model = make_checkpoint(tmp_path, family, **FAMILIES[family])
    with strategy_ranks(model, instances=2, tp=tp, eight_bit_kv=True) as ranks:
        prompts = [
            ranks.prompt(number, start + length).tolist()
            for number, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True))
        ]

        def rows(of: Any) -> Tensor:
            found = zip(prompts, STARTS, strict=True)
            return torch.cat([of(model, prompt)[start:] for prompt, start in found])

        expected, exact = rows(rounded_logits), rows(reference_logits)
        lost = (exact - expected).abs()
        for strategy in sorted(WITHOUT_PLAN | WITH_PLAN):
            error = (logits(ranks, strategy) - expected).abs()
            assert error.median() < 0.02 * lost.median(), strategy
            assert error.max() < lost.max(), strategy
