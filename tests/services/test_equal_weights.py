"""Two gangs are linked only if they loaded the same weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gang_driver import GangPlan
from gang_threads import ThreadGang, eventually, thread_gang
from router_process import make_router
from safetensors.torch import load_file, save_file

from csps.protocols.gang.messages import RankDescription
from csps.services.cluster.attachment import UNUSABLE


def changed(model: Path, copy: Path, tensor: str) -> Path:
    """Return the same checkpoint with one number changed."""
    shutil.copytree(model, copy)
    path = copy / "model.safetensors"
    stored = load_file(path)
    stored[tensor].view(-1)[5] += 1e-3
    save_file(stored, path, metadata={"format": "pt"})
    return copy


def plan(model: Path, role: str, tp: int = 1) -> GangPlan:
    return GangPlan(model_dir=str(model), role=role, instances=2 // tp, tp=tp)  # type: ignore[arg-type]


async def linked(prefill: ThreadGang, decode: ThreadGang, folder: Path) -> str:
    """Return why the gangs are not linked; empty if they are."""
    cluster, service = make_router(prefill.members, decode.members, folder / "generations")
    await service.start()
    try:
        await eventually(lambda: not cluster.phase or UNUSABLE in cluster.phase)
        return cluster.trouble
    finally:
        await service.close(0.0)


def descriptions(gang: ThreadGang) -> list[RankDescription]:
    return [rank._describe() for rank in gang.ranks]


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
async def test_one_different_weight_makes_another_model(
    tiny_llama: Path, tmp_path: Path, tensor: str
) -> None:
    other = changed(tiny_llama, tmp_path / "other", tensor)
    async with (
        thread_gang(plan(tiny_llama, "prefill")) as prefill,
        thread_gang(plan(other, "decode")) as decode,
    ):
        trouble = await linked(prefill, decode, tmp_path)
    assert trouble.startswith("prefill and decode serve different models: model_fingerprint ")


@pytest.mark.parametrize("form", [{"kv_dtype": "int8"}, {"weight_dtype": "fp8"}])
async def test_another_form_of_numbers_makes_another_model(
    tiny_llama: Path, tmp_path: Path, form: dict[str, str]
) -> None:
    """Bytes of KV pass from pool to pool as they are, and other weights compute other KV."""
    other = replace(plan(tiny_llama, "decode"), **form)  # type: ignore[arg-type]
    async with (
        thread_gang(plan(tiny_llama, "prefill")) as prefill,
        thread_gang(other) as decode,
    ):
        trouble = await linked(prefill, decode, tmp_path)
    assert trouble.startswith("prefill and decode serve different models: model_fingerprint ")


async def test_overrides_make_another_model(tiny_llama: Path, tmp_path: Path) -> None:
    other = replace(plan(tiny_llama, "decode"), model_overrides={"rope_theta": 20_000.0})
    async with (
        thread_gang(plan(tiny_llama, "prefill")) as prefill,
        thread_gang(other) as decode,
    ):
        trouble = await linked(prefill, decode, tmp_path)
    assert trouble.startswith("prefill and decode serve different models: model_fingerprint ")


async def test_equal_weights_are_one_model_however_instances_are_cut(
    tiny_llama: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    async with (
        thread_gang(plan(tiny_llama, "prefill", tp=2)) as prefill,
        thread_gang(plan(copy, "decode")) as decode,
    ):
        found = {
            description.model_fingerprint
            for description in descriptions(prefill) + descriptions(decode)
        }
        assert len(found) == 1
        assert await linked(prefill, decode, tmp_path) == ""
