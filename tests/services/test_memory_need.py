"""The memory that a server is said to need, held against what is really allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import FAMILIES, make_checkpoint

from csps.actors.kv_cache.kv_pool import KvPool
from csps.models.checkpoints.loading import load_network
from csps.models.network.spec import read_spec
from csps.protocols.core.errors import ConfigError
from csps.services.launch import preflight
from csps.services.launch.deploy_config import read_config
from csps.services.planning.checks import check_settings
from csps.services.planning.machine import GIB
from csps.services.planning.memory import MemoryNeed, memory_need, rank_need
from csps.services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def settings(model_dir: Path, **args: Any) -> Settings:
    return Settings.model_validate({"model": str(model_dir), "device": "cpu", **args})


def allocated(config: Settings, section: Any) -> tuple[int, int]:
    """Return the bytes of weights and of the KV pool of one rank, as it allocates them."""
    dtype = getattr(torch, config.dtype)
    network = load_network(
        config.model_dir,
        tp_size=section.tp,
        dtype=dtype,
        all_reduce=lambda tensor: tensor,
        fp8=config.weight_dtype == "fp8",
    )
    seen = {network.embedding_vd.data_ptr(): network.embedding_vd}
    tensors = [network.head_vd, network.norm_d]
    tensors += [tensor for layer in network.layers for tensor in layer.weights]
    seen |= {tensor.data_ptr(): tensor for tensor in tensors}
    pool = KvPool(
        layers=network.spec.layers,
        slots=section.kv_slots,
        kv_heads=len(network.layers[0].shard.kv_heads),
        head_dim=network.spec.head_dim,
        dtype=dtype,
        device="cpu",
        eight_bits=config.kv_dtype == "int8",
    )
    return sum(tensor.nbytes for tensor in seen.values()), pool.k.nbytes + pool.v.nbytes


FORMS = [
    (1, "float32", "auto"),
    (2, "bfloat16", "auto"),
    (4, "float32", "auto"),
    (2, "bfloat16", "int8"),
]


@pytest.mark.parametrize(
    ("family", "tp", "dtype", "kv_dtype", "weight_dtype"),
    [
        *((family, *form, "auto") for family in FAMILIES for form in FORMS),
        *(("llama", *form, "fp8") for form in FORMS),
        ("gemma3_text", 2, "bfloat16", "auto", "fp8"),
    ],
)
def test_weights_and_kv_are_what_ranks_allocate(
    family: str, tp: int, dtype: str, kv_dtype: str, weight_dtype: str, tmp_path: Path
) -> None:
    config = settings(
        make_checkpoint(tmp_path, family),
        dtype=dtype,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
        prefill={"instances": 3, "tp": tp, "kv_slots": 700},
        decode={"instances": 1, "tp": 2, "kv_slots": 900},
    )
    prefill, decode = allocated(config, config.prefill), allocated(config, config.decode)
    need = memory_need(config)
    assert need.ranks == 3 * tp + 2
    assert need.weights == 3 * tp * prefill[0] + 2 * decode[0]
    assert need.kv_cache == 3 * tp * prefill[1] + 2 * decode[1]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "mistral"])
@pytest.mark.parametrize("tp", [1, 2])
def test_slots_of_windows_are_what_ranks_allocate(family: str, tp: int, tmp_path: Path) -> None:
    """In the last family, all layers have a window."""
    model = make_checkpoint(tmp_path, family, sliding_window=12)
    decode = {"instances": 3, "tp": tp, "kv_slots": 900}
    plain, config = (
        settings(model, decode={**decode, **more}) for more in ({}, {"window_slots": 70})
    )
    spec = read_spec(model)
    pool = KvPool(
        layers=spec.layers,
        slots=900,
        kv_heads=spec.kv_heads // tp,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device="cpu",
        windowed=spec.near_layers,
        window_slots=70,
    )
    found = sum(tensor.nbytes for layer in range(spec.layers) for tensor in pool.layer(layer))
    need = rank_need("decode", config)
    assert need.kv_cache == found < rank_need("decode", plain).kv_cache
    prefill = 2 * rank_need("prefill", config).kv_cache
    assert memory_need(config).kv_cache == 3 * tp * found + prefill
    assert need.total - need.kv_cache == rank_need("decode", plain).weights + need.fixed
    automatic = settings(
        model, decode={"window_slots": "auto"}, scheduling={"policy": "csps", "max_batch": 7}
    )
    assert rank_need("decode", automatic).window_slots == 7 * 12
    assert rank_need("prefill", automatic).window_slots == 0


def test_a_window_has_to_fit(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gpt_oss", sliding_window=12)
    check_settings(settings(model, decode={"window_slots": 12}))
    with pytest.raises(ConfigError, match="is 11, less than the window of 12 tokens"):
        check_settings(settings(model, decode={"window_slots": 11}))


def test_as_many_slots_as_fit_are_more_where_windows_have_their_own(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gpt_oss", sliding_window=12)
    gang = {"num_gpus": 1, "kv_slots": "auto"}
    plain, config = (
        rank_need(
            "decode",
            settings(model, device="auto", prefill=gang, decode={**gang, **more}),
            gpu_bytes=80 * GIB,
        )
        for more in ({}, {"window_slots": 5000})
    )
    assert config.total <= 0.9 * 80 * GIB < config.total + config.slot
    assert plain.slots < 1.99 * plain.slots < config.slots
    mistral = make_checkpoint(tmp_path / "mistral", "mistral", sliding_window=12)
    with pytest.raises(ConfigError, match="all layers have a window and "):
        rank_need(
            "decode",
            settings(mistral, device="auto", decode={**gang, "window_slots": 5000}),
            gpu_bytes=80 * GIB,
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_rank_needs_host_memory_for_kv_in_transfer(tiny_llama: Path, device: str) -> None:
    """Count it on GPUs too. An elastic gang sends none."""
    gangs: dict[str, Any] = {
        "prefill": {"instances": 3, "num_gpus": 1},
        "decode": {"instances": 1, "tp": 2, "num_gpus": 1},
    }
    small, large = (
        memory_need(
            settings(tiny_llama, device=device, kv_transfer={"in_flight_mib": mib}, **gangs)
        )
        for mib in (8, 108)
    )
    assert large.kv_transfer == 5 * 108 * 2**20
    assert large.total - small.total == 5 * 100 * 2**20


def test_activations_grow_with_the_prompt(tiny_llama: Path) -> None:
    short, long = (
        memory_need(settings(tiny_llama, prefill={"kv_slots": slots})) for slots in (1_000, 4_000)
    )
    assert long.activations == 4 * short.activations > 0


def test_the_default_server_fits_into_4_gib(tmp_path: Path) -> None:
    """Measured: 2.8 GiB with a prompt that fills the prefill slots."""
    need = memory_need(read_config(ROOT / "config.yaml").settings)
    assert 2.8 * GIB < need.total < 3.7 * GIB
    preflight.check_memory(need, root=meminfo(tmp_path, gib=4))


def test_an_8b_model_in_fp32_does_not_fit_into_24_gib(tmp_path: Path) -> None:
    """Four ranks of it were let through once, to be killed while they loaded."""
    need = MemoryNeed(ranks=4, weights=4 * 8_030_261_248 * 4)
    expected = r"^24\.0 GiB of memory are available, but 121\.4 GiB are needed \(.*weights 119\.7"
    with pytest.raises(ConfigError, match=expected):
        preflight.check_memory(need, root=meminfo(tmp_path, gib=24))


def test_a_server_too_large_for_the_machine_is_refused_before_anything_is_stopped(
    tmp_path: Path,
) -> None:
    preflight.check_memory_at_all(
        MemoryNeed(ranks=4, weights=60 * GIB), root=meminfo(tmp_path, gib=1)
    )
    with pytest.raises(ConfigError, match=r"^this machine has 64\.0 GiB of memory, but 101\."):
        preflight.check_memory_at_all(
            MemoryNeed(ranks=4, weights=100 * GIB), root=meminfo(tmp_path, gib=1)
        )


def test_ray_that_runs_is_not_counted_again(tiny_llama: Path) -> None:
    config = settings(tiny_llama)
    assert memory_need(config, ray_runs=True).total < memory_need(config).total


def test_what_lies_on_gpus_is_not_counted(tiny_llama: Path) -> None:
    gpus = {"num_gpus": 1}
    need = memory_need(settings(tiny_llama, device="cuda", prefill=gpus, decode=gpus))
    assert need.weights == need.kv_cache == need.activations == 0


def test_a_machine_with_unknown_memory_is_not_refused(tmp_path: Path) -> None:
    preflight.check_memory(MemoryNeed(ranks=4, weights=2**60), root=tmp_path / "not there")


def meminfo(folder: Path, *, gib: int) -> Path:
    path = folder / "proc" / "meminfo"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {gib * 2**20} kB\n")
    return folder
