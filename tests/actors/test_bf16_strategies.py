"""Every exact strategy in bf16: as near to fp32 as one rank in bf16 is.

Weights, activations and KV are rounded to 8 bits. What a strategy adds are the merges and sums of
partial results, which are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from strategy_ranks import LAYERS, MODELS, StrategyRanks, step_of, strategy_ranks
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention.choice import strategy_of
from csps.protocols.gang.step_messages import PrefillStep

LENGTHS = [5, 40, 3]
BOUNDS = {1: [0, 48], 2: [0, 21, 48], 4: [0, 9, 14, 30, 48]}
SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
TOLERANCE = 1.5, 4e-3
"""Factor on the largest error of one rank, and what may be added to it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"num_hidden_layers": LAYERS, **MODELS["gqa"]}
    return make_checkpoint(tmp_path_factory.mktemp("gqa"), **config)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[float]:
    """Yield the error of one rank."""
    with strategy_ranks(checkpoint, instances=1, dtype=torch.bfloat16) as gang:
        yield error(gang, step_of(BOUNDS[1], LENGTHS))


def error(gang: StrategyRanks, step: PrefillStep) -> float:
    """Return the largest difference of the residual stream from that of an fp32 network."""
    exact = gang.forwards(step)
    rows_td = torch.cat([forward.x_td for forward in exact])
    results = gang.run(step, strategy_of)
    tp = gang.engines[0].layout.tp

    def of_member(member: int) -> Tensor:
        same = [results[member * tp + tp_rank].x_td for tp_rank in range(tp)]
        assert all(torch.equal(same[0], other) for other in same), "ranks of an instance differ"
        return same[0]

    found_td = torch.cat([of_member(member) for member in range(len(step.group))])
    assert found_td.dtype == torch.bfloat16
    return float((found_td.double() - rows_td.double()).abs().max())


@pytest.mark.parametrize(
    ("strategy", "instances", "tp"),
    [
        ("ulysses", 2, 1),
        ("ulysses", 4, 1),
        ("ring_kv", 4, 1),
        ("ring_q", 4, 1),
        ("gathered_weights", 2, 2),
        ("sp_tp_flat", 2, 2),
        ("sp_tp", 4, 1),
        ("levels", 4, 1),
    ],
)
def test_a_group_in_bf16_is_as_near_to_fp32_as_one_rank(
    checkpoint: Path, alone: float, strategy: str, instances: int, tp: int
) -> None:
    fields: dict[str, object] = {"strategy": strategy}
    if strategy in ("sp_tp", "levels"):
        fields["csa"] = uniform_plan(SERVERS, levels=2, layers=LAYERS)
    step = step_of(BOUNDS[instances], LENGTHS, **fields)
    factor, more = TOLERANCE
    with strategy_ranks(checkpoint, instances=instances, tp=tp, dtype=torch.bfloat16) as gang:
        assert error(gang, step) <= factor * alone + more
    assert alone > 1e-4, "nothing was rounded"
