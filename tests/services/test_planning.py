"""The planner's bytes are those that torch allocates, its slots fit, and its times follow the
hardware.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import FAMILIES, make_checkpoint

from csps.actors.kv_cache.kv_pool import KvPool
from csps.cli import main
from csps.models.checkpoints.loading import load_network
from csps.protocols.core.errors import ConfigError
from csps.services.planning import memory as planned_memory
from csps.services.planning.checks import Resources, check_resources
from csps.services.planning.hardware import GPUS, measured_core, named_hardware
from csps.services.planning.machine import GIB, MainMemory, main_memory
from csps.services.planning.memory import auto_slots, memory_need, rank_need, rank_weights
from csps.services.planning.plan import Plan, lines, make_plan
from csps.services.settings.settings import Settings

ON_GPUS: dict[str, Any] = {"num_gpus": 1}


def settings(model_dir: Path | str, **args: Any) -> Settings:
    return Settings.model_validate({"model": str(model_dir), **args})


@pytest.mark.parametrize(
    ("family", "weight_dtype"),
    [*((family, "auto") for family in FAMILIES), ("llama", "fp8"), ("gemma3_text", "fp8")],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_on_a_gpu_are_torchs_own(
    family: str, weight_dtype: str, tp: int, tmp_path: Path
) -> None:
    """On the meta device, which has sizes and no memory."""
    gang = {**ON_GPUS, "tp": tp, "kv_slots": 700}
    config = settings(
        make_checkpoint(tmp_path, family),
        dtype="bfloat16",
        weight_dtype=weight_dtype,
        prefill=gang,
        decode=gang,
    )
    need = rank_need("prefill", config, gpu_bytes=80 * GIB)
    network = load_network(
        config.model_dir,
        tp_size=tp,
        dtype=torch.bfloat16,
        device="meta",
        all_reduce=lambda tensor: tensor,
        fp8=weight_dtype == "fp8",
    )
    tensors = {id(tensor): tensor for tensor in (network.embedding_vd, network.head_vd)}
    tensors |= {id(network.norm_d): network.norm_d}
    for layer in network.layers:
        tensors |= {id(tensor): tensor for tensor in layer.weights}
    pool = KvPool(
        layers=network.spec.layers,
        slots=700,
        kv_heads=len(network.layers[0].shard.kv_heads),
        head_dim=network.spec.head_dim,
        dtype=torch.bfloat16,
        device="meta",
    )
    assert need.weights == sum(tensor.nbytes for tensor in tensors.values())
    assert need.kv_cache == pool.k.nbytes + pool.v.nbytes


@pytest.mark.parametrize(("family", "counts"), [("qwen3_moe", False), ("glm4_moe", True)])
def test_the_width_of_dense_layers_counts_where_there_are_some(
    family: str, counts: bool, tmp_path: Path
) -> None:
    """The second family's first layer is dense."""
    narrow, wide = (
        rank_need(
            "prefill",
            settings(
                make_checkpoint(tmp_path / str(width), family, intermediate_size=width),
                prefill={"kv_slots": 1000},
            ),
        ).activations
        for width in (64, 64 * 64)
    )
    assert (narrow < wide) == counts


@given(
    gib=st.integers(4, 500),
    share=st.floats(0.3, 1),
    prefill=st.integers(1, 5),
    decode=st.integers(1, 5),
)
def test_automatic_slots_fill_main_memory_and_not_more(
    gib: int, share: float, prefill: int, decode: int
) -> None:
    memory = MainMemory(total=gib * GIB, available=gib * GIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_memory, "main_memory", lambda *_: memory)
        config = settings(
            "needle",
            gpu_memory_utilization=share,
            prefill={"instances": prefill, "kv_slots": "auto"},
            decode={"instances": decode, "kv_slots": "auto"},
        )
        gangs = {"prefill": {"instances": prefill}, "decode": {"instances": decode}}

        def total(slots: dict[str, int]) -> int:
            sized = {role: {**gang, "kv_slots": slots[role]} for role, gang in gangs.items()}
            return memory_need(settings("needle", **sized)).total

        budget = share * memory.total
        if total(dict.fromkeys(gangs, 1)) > budget:
            with pytest.raises(ConfigError, match="auto finds no room"):
                memory_need(config)
            return
        chosen = {role: rank_need(role, config).slots for role in gangs}
        one_more = {role: slots + 1 for role, slots in chosen.items()}
        assert memory_need(config).total == total(chosen) <= budget < total(one_more)


def test_slots_that_are_given_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MainMemory(total=16 * GIB, available=16 * GIB)
    monkeypatch.setattr(planned_memory, "main_memory", lambda *_: memory)
    gangs = {"prefill": {"kv_slots": 1000}, "decode": {"kv_slots": "auto"}}
    few = auto_slots("decode", settings("needle", **gangs), None)
    gangs["prefill"]["kv_slots"] = 100_000
    assert auto_slots("decode", settings("needle", **gangs), None) < few


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_automatic_slots_fill_a_gpu(share: float) -> None:
    config = settings(
        "needle",
        gpu_memory_utilization=share,
        prefill={**ON_GPUS, "kv_slots": "auto"},
        decode={**ON_GPUS, "kv_slots": "auto"},
    )
    for role in config.gangs:
        need = rank_need(role, config, gpu_bytes=20 * GIB)
        assert need.total <= share * 20 * GIB < replace(need, slots=need.slots + 1).total


def files(root: Path, **contents: str) -> Path:
    for name, content in contents.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {60 * 2**20} kB\n"


def test_a_container_has_its_limit_and_not_the_machines(tmp_path: Path) -> None:
    """Version 2, whose page cache is freed when memory is needed."""
    root = files(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/kubepods/pod1\n",
        sys__fs__cgroup__kubepods__memory_dot_max="max",
        sys__fs__cgroup__kubepods__pod1__memory_dot_max=str(8 * GIB),
        sys__fs__cgroup__kubepods__pod1__memory_dot_current=str(5 * GIB),
        sys__fs__cgroup__kubepods__pod1__memory_dot_stat=f"anon 1\ninactive_file {2 * GIB}\n",
    )
    assert main_memory(root) == MainMemory(total=8 * GIB, available=5 * GIB, limited=True)


def test_a_container_of_version_1_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="5:cpu:/\n4:memory:/docker/abc\n0::/\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=str(4 * GIB),
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes=str(GIB),
    )
    assert main_memory(root) == MainMemory(total=4 * GIB, available=3 * GIB, limited=True)


def test_a_machine_without_limits_has_all_its_memory(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="4:memory:/\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=str(2**63 - 4096),
    )
    assert main_memory(root) == MainMemory(total=64 * GIB, available=60 * GIB)
    assert main_memory(tmp_path / "elsewhere") is None


def test_every_gpu_of_the_list_can_be_planned_for() -> None:
    listed = yaml.safe_load(GPUS.read_text())["gpus"]
    for name in listed:
        hardware = named_hardware(f"4x{name.lower()}")
        assert (hardware.count, hardware.device.name) == (4, name)
        assert hardware.device.attention_flops <= hardware.device.product_flops < 3e15
    with pytest.raises(ConfigError, match="'8xH10' is not COUNTxGPU; did you mean"):
        named_hardware("8xH10")
    with pytest.raises(ConfigError, match="is not COUNTxGPU"):
        named_hardware("0xH100")


def plan_for(hardware: str, **args: Any) -> Any:
    gang = {**ON_GPUS, "kv_slots": "auto"}
    gangs = {"prefill": {**gang, "instances": 2}, "decode": {**gang, "instances": 2}}
    return make_plan(
        settings("needle", dtype="bfloat16", **{**gangs, **args}), named_hardware(hardware)
    )


def test_times_follow_the_hardware_and_the_copies() -> None:
    slow, fast = plan_for("8xA100"), plan_for("8xH100")
    more = plan_for("8xH100", prefill={**ON_GPUS, "instances": 4, "kv_slots": "auto"})
    for plan in (slow, fast, more):
        times = list(plan.ttft_s.values())
        assert times == sorted(times)
    longest = max(fast.ttft_s)
    assert more.ttft_s[longest] < fast.ttft_s[longest] < slow.ttft_s[longest]
    # Attention is what grows with the square.
    assert fast.ttft_s[2**15] > 4 * fast.ttft_s[2**13]


def plan_of(model: Path, **args: Any) -> Plan:
    gang = {**ON_GPUS, "kv_slots": 4000, "instances": 1}
    gangs = {"prefill": gang, "decode": gang}
    return make_plan(settings(model, dtype="bfloat16", **gangs, **args), named_hardware("8xH100"))


def test_tokens_see_a_window_where_layers_have_one(tmp_path: Path) -> None:
    """The second of two layers sees all."""
    model = make_checkpoint(tmp_path, "gpt_oss", sliding_window=100)
    near, whole = plan_of(model), plan_of(model, model_overrides={"sliding_window": None})
    need, longest = near.ranks["decode"], near.longest_prompt
    saved = (whole.token_s - near.token_s) * near.device.memory_bytes_s
    assert saved == pytest.approx((longest - 100) * need.slot / 2)
    hidden = sum(max(0, row + 1 - 100) for row in range(longest))
    saved = (whole.ttft_s[longest] - near.ttft_s[longest]) * near.device.attention_flops
    assert saved == pytest.approx(4 * 4 * 16 * hidden, rel=1e-3)


def test_a_further_token_passes_its_experts_only(tmp_path: Path) -> None:
    few, more = (
        plan_of(make_checkpoint(tmp_path / f"{count}", "qwen3_moe", num_experts_per_tok=count))
        for count in (2, 5)
    )
    read = (more.token_s - few.token_s) * few.device.memory_bytes_s
    assert read == pytest.approx(2 * 3 * 3 * 64 * 24 * 2)


@pytest.mark.parametrize("name", yaml.safe_load(GPUS.read_text())["gpus"])
def test_fp8_is_planned_for_gpus_that_multiply_it(name: str) -> None:
    gang = {**ON_GPUS, "kv_slots": 1000, "instances": 1}
    config = settings("needle", dtype="bfloat16", weight_dtype="fp8", prefill=gang, decode=gang)
    hardware = named_hardware(f"2x{name}")
    if name not in ("A100", "A100-40GB", "A10"):
        make_plan(config, hardware)
        return
    with pytest.raises(ConfigError, match=r"FP8 needs 8\.9; set weight_dtype to auto"):
        make_plan(config, hardware)


def test_fp8_is_checked_on_the_gpus_that_are_here() -> None:
    gang = {**ON_GPUS, "instances": 1}
    fp8, plain = (
        settings("needle", dtype="bfloat16", weight_dtype=form, prefill=gang, decode=gang)
        for form in ("fp8", "auto")
    )
    found = Resources(cores=8, gpus=2, no_fp8="a GPU has compute capability 8.6")
    check_resources(plain, found)
    check_resources(fp8, replace(found, no_fp8=None))
    with pytest.raises(ConfigError, match=r"weight_dtype: fp8: a GPU has .* 8\.6; set weight_"):
        check_resources(fp8, found)


@pytest.mark.parametrize(("width", "tp"), [(96, 4), (88, 1)])
def test_fp8_shapes_are_checked_for_gpus(tmp_path: Path, width: int, tp: int) -> None:
    """On CPUs they do not matter."""
    model = make_checkpoint(tmp_path, "llama", intermediate_size=width)
    for num_gpus in (0, 1):
        gang = {"num_gpus": num_gpus, "tp": tp}
        config = settings(
            model, dtype="bfloat16", weight_dtype="fp8", prefill=gang, decode={"num_gpus": num_gpus}
        )
        if not num_gpus:
            rank_weights("prefill", config)
            continue
        with pytest.raises(ConfigError, match=rf"prefill\.tp: .* 64 by {width // tp}, and GPUs"):
            rank_weights("prefill", config)


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    huge = {**ON_GPUS, "kv_slots": 10**9}
    with pytest.raises(ConfigError, match=r"prefill.kv_slots is 1000000000: .* at most \d+ fit"):
        plan_for("8xL4", prefill=huge)
    with pytest.raises(ConfigError, match=r"4 ranks need 4 GPUs \(prefill.instances 2 x tp 1, "):
        plan_for("2xH100")
    with pytest.raises(ConfigError, match=r"decode\.num_gpus is 0, and --hardware plans for GPUs"):
        plan_for("8xH100", decode={"num_gpus": 0})


def test_a_core_is_measured() -> None:
    core = measured_core(torch.float32)
    assert 1e8 < core.product_flops < 1e13
    assert core.gpu_bytes is None


def test_the_plan_says_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["check-config", "--hardware", "8xH100", "--max-model-len", "64K", "-tp", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "'needle' on 4 prefill and 4 decode ranks" in said
    assert "longest prompt: 65535 tokens, by positions" in said
    assert "are assumed, not measured" in said
    for form in ("auto", "fp8"):
        said = list(lines(make_plan(settings("needle", weight_dtype=form), None)))
        assert any("do not count weight_dtype: fp8" in line for line in said) == (form == "fp8")
    plan = make_plan(settings("needle", prefill={"kv_slots": 1000}), None)
    assert plan.longest_prompt == 2000
    assert any("2000 tokens, by kv_slots" in line for line in lines(plan))
