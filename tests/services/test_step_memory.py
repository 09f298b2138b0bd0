"""The planner's temporaries of a step are those that torch allocates on a real rank."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_driver import Cell, GangPlan, Request, prefill_step, prompt_of
from gang_threads import thread_gang
from tiny_checkpoints import make_checkpoint
from torch.profiler import ProfilerActivity, profile

from csps.actors.engine.step_run import StepRun
from csps.models.network.spec import read_spec
from csps.services.planning.step_memory import StepMemory

TOKENS = 3072
"""Of each rank: several blocks of every kind."""
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


@dataclass(frozen=True, kw_only=True)
class TypedPlan(GangPlan):
    """A gang whose ranks have a dtype."""

    dtype: str

    def rank_fields(self, rank: int) -> dict[str, Any]:
        return {**super().rank_fields(rank), "dtype": self.dtype}


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yield a list that gets the most bytes that each step has at once on rank 0."""
    peaks: list[int] = []
    compute = StepRun.compute

    def profiled(run: StepRun, *arguments: Any) -> None:
        if not run.leads:  # one thread can be profiled at a time
            compute(run, *arguments)
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            compute(run, *arguments)
        events = profiler.profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events]
        peaks.append(max(accumulate(size for _, size in sorted(changes, key=itemgetter(0)))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRun, "compute", profiled)
        yield peaks


async def compute_prompt(plan: GangPlan) -> None:
    """Compute a prompt that fills all slots of a gang."""
    async with thread_gang(plan, data_group=None) as gang:
        cell = Cell()
        cell.prefill = await cell.attach(gang.members, "prefill")
        tokens = plan.kv_slots * plan.instances
        request = Request(sequence_id=1, prompt=prompt_of(tokens), slices=())
        step = prefill_step([request.chunk()], range(plan.instances))
        await cell.prefilled(cell.submit(step, request.prompt))


Forms = dict[str, str]
CASES = [
    ("llama", {}, "float32", 1, 1),
    ("llama", {}, "bfloat16", 1, 1),
    ("llama", {"num_key_value_heads": 2}, "bfloat16", 1, 1),
    ("llama", {"num_key_value_heads": 2}, "float32", 1, 1),
    ("llama", {"intermediate_size": 8192}, "bfloat16", 1, 1),
    ("llama", {}, "bfloat16", 1, 2),
    ("llama", {"intermediate_size": 8192}, "bfloat16", 1, 2),
    ("llama", {}, "float32", 2, 1),
    ("llama", {}, "bfloat16", 2, 1),
    ("llama", {"num_key_value_heads": 2}, "bfloat16", 2, 1),
    ("qwen3", {}, "bfloat16", 1, 1),
    ("gemma3_text", {}, "bfloat16", 1, 1),
    ("qwen3_moe", {}, "bfloat16", 1, 1),
    ("glm4_moe", {}, "bfloat16", 1, 1),
]


@pytest.mark.parametrize(("family", "config", "dtype", "instances", "tp"), CASES)
def test_temporaries_are_what_a_step_allocates(
    family: str, config: dict[str, int], dtype: str, instances: int, tp: int, tmp_path: Path
) -> None:
    planned, allocated = temporaries(tmp_path, family, config, dtype, instances, tp, {})
    assert 0.95 < planned / allocated < 1.08


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "forms"),
    [
        ({}, {"kv_dtype": "int8"}),
        ({"num_key_value_heads": 8, "intermediate_size": 96}, {"kv_dtype": "int8"}),
        ({"intermediate_size": 8192}, {"weight_dtype": "fp8"}),
    ],
)
def test_temporaries_of_eight_bits(
    config: dict[str, int], forms: Forms, dtype: str, tmp_path: Path
) -> None:
    planned, allocated = temporaries(tmp_path, "llama", config, dtype, 1, 1, forms)
    assert 0.95 < planned / allocated < 1.08


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_expert_may_get_all_tokens(family: str, tmp_path: Path) -> None:
    """The experts of a random model get many, and the planner says how many bytes suffice."""
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    planned, allocated = temporaries(tmp_path, family, {width: 2048}, "float32", 1, 1, {})
    assert 1 < planned / allocated < 2


def temporaries(
    model: Path,
    family: str,
    config: dict[str, int],
    dtype: str,
    instances: int,
    tp: int,
    forms: Forms,
) -> tuple[int, int]:
    """Return the bytes that a step is planned to have at once on a rank, and those it has."""
    make_checkpoint(model, family, **{**SHAPE, **config})
    plan = TypedPlan(
        model_dir=str(model),
        role="prefill",
        instances=instances,
        tp=tp,
        kv_slots=TOKENS,
        dtype=dtype,
        **forms,  # type: ignore[arg-type]
    )
    with watched() as peaks:
        asyncio.run(compute_prompt(plan))
    memory = StepMemory(
        spec=read_spec(model, {}),
        instances=instances,
        tp=tp,
        element=getattr(torch, dtype).itemsize,
        on_gpu=False,
        eight_bit_kv="kv_dtype" in forms,
        fp8="weight_dtype" in forms,
    )
    return memory.bytes(TOKENS), peaks[0]
