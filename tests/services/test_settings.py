"""Settings: a mistake is one line that says what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from csps.protocols.core.errors import ConfigError
from csps.services.settings import processor
from csps.services.settings.settings import Settings

ELASTIC = {"elastic": {"instances": 2}, "scheduling": {"policy": "chunked_prefill"}}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefil": {}}, "unknown setting 'prefil'; did you mean 'prefill'?"),
        ({"prefill": {"instnces": 2}}, "prefill: unknown setting 'instnces'; did you mean"),
        (
            {"prefill": {"instances": "two"}},
            "instances: must be a valid integer, got 'two'",
        ),
        ({"decode": {"instances": 0}}, "decode.instances: must be greater than or equal"),
        ({"dtype": "f32"}, "dtype: must be 'float32'"),
        (
            {"model_overrides": {"rope_scalling": {}}},
            "model_overrides: 'rope_scalling' cannot be overridden; did you mean 'rope_scaling'?",
        ),
        ({"model_overrides": ["rope_theta"]}, "model_overrides: must be a valid dictionary"),
        ({"quantum_ms": 0}, "quantum_ms: must be greater than 0, got 0"),
        ({"telemetry": {"sample": 2}}, "telemetry.sample: must be less than or equal"),
        (
            {"telemetry": {"otlp_endpoint": "localhost"}},
            "telemetry.otlp_endpoint: must be a URL that begins with http:// or https://",
        ),
        ({"telemetry": {"timeline_sample": -1}}, "telemetry.timeline_sample: must"),
        ({"topology": {"prefill": ["0-0-0"]}}, "1 locations for a gang of 2 ranks; allowed is one"),
        ({"topology": {"decode": ["0-0-0"] * 3}}, "topology.decode: 3 locations for a gang of 2"),
        (
            {"topology": {"prefill": ["0-0-0", "0-0-0"]}},
            "topology puts both 0 and 1 at 0-0-0; allowed is one rank per place",
        ),
        ({"topology": {"prefill": ["here", "0-0-0"]}}, "topology.prefill: 'here' is not a Rack-"),
        ({"topology": {"prefill": ["0-11-010", "0-11-10"]}}, "'0-11-010' is not a Rack-Server-GPU"),
        (
            {"prefill": {"tp": 2, "instances": 1}, "topology": {"prefill": ["0-0-0", "0-1-0"]}},
            "topology.prefill: ranks 0 to 1 are one instance, but rank 0 is at 0-0-0 and rank 1",
        ),
        ({"decode": {"prefill_tokens_max": -1}}, "decode.prefill_tokens_max: must be"),
        (
            {"scheduling": {"prefill_tokens_max": 9}},
            "scheduling: prefill_tokens_max belongs under decode:, not scheduling:",
        ),
        (
            {"decode": {"prefill_tokens_max": 9}, "scheduling": {"policy": "fixed_sp"}},
            "decode.prefill_tokens_max: policy fixed_sp",
        ),
        (
            {"decode": {"prefill_tokens_max": 9}, "kv_reuse": {"enabled": False}},
            "decode.prefill_tokens_max: kv_reuse.enabled is false, so no prefix is cached",
        ),
        (
            {"decode": {"prefill_tokens_max": 9, "window_slots": "auto"}},
            "decode.prefill_tokens_max: with decode.window_slots, the gang lacks KV before ends of",
        ),
        (
            {"decode": {"window_slots": 9}, "scheduling": {"policy": "chunked_prefill"}},
            "decode.window_slots: policy chunked_prefill computes prompts beside decoding",
        ),
        ({"decode": {"window_slots": 0}}, "decode.window_slots: must be a number of tokens from"),
        ({**ELASTIC, "elastic": {"window_slots": 9}}, "elastic: unknown setting 'window_slots'"),
        (
            {"kv_reuse": {"enabled": False, "files": {"path": "kv"}}},
            "kv_reuse: files: enabled is false, so there is no KV to save",
        ),
        ({"kv_reuse": {"files": {"mib": 5}}}, "kv_reuse.files.path: "),
        ({"topology": {"link_ratio": 0.5}}, "topology.link_ratio: must be greater than or"),
        ({"topology": {"link_ratio": float("inf")}}, "topology.link_ratio: must be a fini"),
        ({"scheduling": {"polcy": "csps"}}, "has no option 'polcy'; did you mean 'policy'?"),
        (
            {"scheduling": {"policy": "fixed_sp", "short_tokens": 5}},
            "scheduling: policy fixed_sp has no option 'short_tokens'; it is one of "
            "context_parallel and csps",
        ),
        (
            {"scheduling": {"overtaking_s": float("inf")}},
            "scheduling: option overtaking_s must be finite, not inf",
        ),
        (
            {"scheduling": {"max_batch": 0}},
            "scheduling: option max_batch must be at least 1, not 0",
        ),
        ({"deadlines": {"landing_s": float("inf")}}, "deadlines.landing_s: must be a fini"),
        (
            {"elastic": {}},
            "scheduling: policy csps cannot use an elastic gang: csps, fixed_sp and tetris need "
            "prefill and decode gangs, loongserve needs an elastic gang, chunked_prefill and "
            "context_parallel take either",
        ),
        (
            {**ELASTIC, "prefill": {}, "decode": {"instances": 3}},
            "elastic replaces the prefill and decode gangs: remove prefill and decode",
        ),
        ({**ELASTIC, "decode": {}}, "replaces the prefill and decode gangs: remove decode"),
        ({"elastic": {"instnces": 2}}, "elastic: unknown setting 'instnces'; did you mean"),
        ({"topology": {"elastic": ["0-0-0"]}}, "topology.elastic: this cell has no elastic gang"),
        ({**ELASTIC, "topology": {"prefill": ["0-0-0"]}}, "topology.prefill: this cell has no pre"),
        ({**ELASTIC, "topology": {"elastic": ["0-0-0"]}}, "topology.elastic: 1 locations for a ga"),
        (
            {"scheduling": {"policy": "chunked_prefill", "token_budget": 63}},
            "scheduling: option token_budget must be at least max_batch, 64, not 63",
        ),
        ([], "must be a valid dictionary"),
    ],
)
def test_a_mistake_is_one_line(args: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.model_validate(args)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_several_mistakes_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        Settings.model_validate({"dtype": "f32", "device": "tpu"})


def test_a_cell_has_a_pair_of_gangs_or_an_elastic_one() -> None:
    pair = Settings()
    assert pair.gangs == {"prefill": pair.prefill, "decode": pair.decode}
    assert (pair.prefilling, pair.decoding) == (pair.prefill, pair.decode)
    both = Settings.model_validate({"scheduling": {"policy": "chunked_prefill"}})
    assert list(both.gangs) == ["prefill", "decode"]
    elastic = Settings.model_validate({**ELASTIC, "topology": {"elastic": ["0-0-0", "0-1-0"]}})
    assert elastic.gangs == {"elastic": elastic.elastic}
    assert elastic.prefilling is elastic.decoding is elastic.elastic


def test_a_deployed_elastic_gang_may_leave_where_it_is_what_it_decodes() -> None:
    options = {"policy": "loongserve", "migrate": False}
    settings = Settings.model_validate({**ELASTIC, "scheduling": options})
    assert settings.scheduling.options == {"migrate": False}


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().dtype = "float16"  # type: ignore[misc]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere"):
        Settings(model=str(tmp_path / "nowhere")).resolved()


def test_resolved_settings_are_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    settings = Settings(model="model").resolved()
    assert settings.model == str(tmp_path / "model")
    assert settings.model_name == "model"
    assert settings.telemetry.spans_dir == str(tmp_path / "run" / "traces")


def test_a_setting_of_the_gang_that_decodes_is_an_option_of_the_policy() -> None:
    settings = Settings.model_validate({"decode": {"prefill_tokens_max": 200}})
    assert settings.policy_options == {"prefill_tokens_max": 200}
    assert Settings.model_validate(ELASTIC).policy_options == {}


X86 = "processor\t: 0\nmodel name\t: a CPU\nflags\t\t: fpu avx512f {} sha_ni\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {} i8mm\n\n"


@pytest.mark.parametrize(
    ("cpu", "more", "dtype"),
    [
        (X86.format("avx512_bf16"), {}, "bfloat16"),
        (X86.format("amx_bf16 amx_tile"), {}, "bfloat16"),
        (ARM.format("bf16"), {}, "bfloat16"),
        (X86.format("avx2"), {}, "float32"),
        (ARM.format("asimddp"), {}, "float32"),
        (None, {}, "float32"),
        (X86.format(""), {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}, "bfloat16"),
        (X86.format(""), {"prefill": {"num_gpus": 1}, "device": "cpu"}, "float32"),
        (X86.format("avx512_bf16"), {"dtype": "float32"}, "float32"),
    ],
)
def test_auto_is_the_dtype_that_this_machine_multiplies_fastest(
    cpu: str | None,
    more: dict[str, Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpu is not None:
        (tmp_path / "cpuinfo").write_text(cpu)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    settings = Settings.model_validate({"dtype": "auto", **more})
    assert settings.dtype == settings.resolved().dtype == dtype
    assert settings.model_dump()["dtype"] == dtype
    assert settings.element_bytes == (2 if dtype == "bfloat16" else 4)
