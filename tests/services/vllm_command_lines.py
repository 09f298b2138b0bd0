"""Command lines of `vllm serve` from vLLM's documentation, its recipes and model cards, verbatim,
and what becomes of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
    """A command line after `vllm serve`."""

    source: str
    words: str
    settings: dict[str, Any] | None = None
    """Settings that it gives, by path; None if it is refused."""
    refused: str = ""
    """Part of the reason."""
    without_effect: tuple[str, ...] = ()
    """Options that are taken and change nothing."""


LINES = [
    Line("docs: api/cli/serve", "facebook/opt-125m", {"model": "facebook/opt-125m"}),
    Line(
        "docs: api/cli/serve",
        "meta-llama/Llama-2-70b-hf \\\n  --tensor-parallel-size 4",
        {"model": "meta-llama/Llama-2-70b-hf", "prefill.tp": 4, "decode.tp": 4},
    ),
    Line(
        "docs: api/cli/serve",
        "mistralai/Mistral-7B-v0.1 \\\n  --gpu-memory-utilization 0.95 \\\n  --max-model-len 8192",
        {
            "gpu_memory_utilization": 0.95,
            "prefill.kv_slots": "auto",
            "decode.kv_slots": "auto",
            "max_positions": 8192,
        },
    ),
    Line(
        "docs: api/cli/serve",
        "meta-llama/Llama-2-7b-hf \\\n  --enable-prefix-caching",
        {"kv_reuse.enabled": True},
    ),
    Line(
        "docs: api/cli/serve",
        "TheBloke/Llama-2-13B-AWQ \\\n  --quantization awq",
        refused="--quantization: csps does not quantize to 'awq'. Checkpoints that are already in",
    ),
    Line(
        "docs: api/cli/serve",
        "facebook/opt-125m \\\n  --host 0.0.0.0 \\\n  --port 8080",
        {"http_options.host": "0.0.0.0", "http_options.port": 8080},
    ),
    Line(
        "docs: serving/openai_compatible_server",
        "NousResearch/Meta-Llama-3-8B-Instruct \\\n  --dtype auto \\\n  --api-key token-abc123",
        {"model": "NousResearch/Meta-Llama-3-8B-Instruct", "keys": ("token-abc123",)},
    ),
    Line(
        "docs: serving/cli-usage",
        "meta-llama/Llama-3.2-1B-Instruct \\\n  --dtype auto \\\n  --max-model-len 4096 \\\n"
        "  --trust-remote-code",
        refused="--trust-remote-code: no code from a checkpoint is ever run",
    ),
    Line(
        "docs: serving/cli-usage",
        "meta-llama/Llama-3.2-1B-Instruct \\\n  --data-parallel-size 4 \\\n"
        "  --tensor-parallel-size 2",
        refused="--data-parallel-size: a server has one router; --prefill and --decode set",
    ),
    Line(
        "docs: serving/parallelism_scaling",
        "gpt2 \\\n     --tensor-parallel-size 4 \\\n     --pipeline-parallel-size 2",
        refused="--pipeline-parallel-size: layers are not split over machines",
    ),
    Line(
        "docs: serving/parallelism_scaling",
        "/path/to/the/model/in/the/container \\\n     --tensor-parallel-size 16 \\\n"
        "     --distributed-executor-backend ray",
        {"model": "/path/to/the/model/in/the/container", "prefill.tp": 16, "decode.tp": 16},
        without_effect=("--distributed-executor-backend",),
    ),
    Line(
        "docs: serving/context_parallel_deployment",
        "nvidia/GLM-5.2-NVFP4 \\\n  --enforce-eager \\\n  --no-async-scheduling \\\n"
        "  --tensor-parallel-size 1 \\\n  --prefill-context-parallel-size 4 \\\n"
        "  --decode-context-parallel-size 1 \\\n  --model-class-overrides \\\n"
        """    '{"GlmMoeDsaForCausalLM":"vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCaus"""
        """alLM"}' \\\n  --enable-expert-parallel \\\n  --moe-backend flashinfer_cutlass \\\n"""
        "  --attention-backend FLASHINFER_MLA_SPARSE \\\n  --no-enable-prefix-caching \\\n"
        "  --kv-cache-dtype fp8",
        refused="--prefill-context-parallel-size: a prompt is computed by as many copies",
    ),
    Line(
        "docs: features/tool_calling",
        "meta-llama/Llama-3.1-8B-Instruct \\\n    --enable-auto-tool-choice \\\n"
        "    --tool-call-parser llama3_json \\\n"
        "    --chat-template examples/tool_chat_template_llama3.1_json.jinja",
        {
            "tool_format": "llama3",
            "chat_template": "/examples/tool_chat_template_llama3.1_json.jinja",
        },
        without_effect=("--enable-auto-tool-choice",),
    ),
    Line(
        "docs: benchmarking/cli",
        "meta-llama/Meta-Llama-3-8B-Instruct \\\n"
        """    --speculative-config '{"method": "ngram",\n    "num_speculative_tokens": 5, """
        """"prompt_lookup_max": 5,\n    "prompt_lookup_min": 2}'""",
        {"model": "meta-llama/Meta-Llama-3-8B-Instruct"},
        without_effect=("--speculative-config",),
    ),
    Line(
        "recipes: Qwen/Qwen3",
        "Qwen/Qwen3-235B-A22B \\\n--trust-remote-code \\\n-tp 4 \\\n--disable-log-requests \\\n"
        "--swap-space 32 \\\n--distributed-executor-backend mp \\\n"
        "--max-num-batched-tokens 32768 \\\n--max-model-len 32768 \\\n"
        "--no-enable-prefix-caching \\\n--gpu-memory-utilization 0.8",
        refused="--trust-remote-code: no code from a checkpoint is ever run",
    ),
    Line(
        "recipes: Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B \\\n    --max-num-batched-tokens 16384 \\\n    --gpu-memory-utilization 0.8",
        {"model": "Qwen/Qwen3-8B", "gpu_memory_utilization": 0.8},
        without_effect=("--max-num-batched-tokens",),
    ),
    Line(
        "recipes: OpenAI/GPT-OSS",
        "openai/gpt-oss-120b \\\n  --tensor_parallel_size 8 \\\n  --max-model-len 131072 \\\n"
        "  --max-num-batched-tokens 10240 \\\n  --max-num-seqs 128 \\\n"
        "  --gpu-memory-utilization 0.85 \\\n  --no-enable-prefix-caching",
        {
            "prefill.tp": 8,
            "decode.tp": 8,
            "max_positions": 131072,
            "scheduling.max_batch": 128,
            "gpu_memory_utilization": 0.85,
            "kv_reuse.enabled": False,
        },
        without_effect=("--max-num-batched-tokens",),
    ),
    Line(
        "recipes: OpenAI/GPT-OSS",
        "openai/gpt-oss-120b --tensor-parallel-size=8 --attention-backend "
        "ROCM_AITER_UNIFIED_ATTN -cc.pass_config.fuse_rope_kvcache=True "
        "-cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 --block-size=64",
        {"prefill.tp": 8, "gpu_memory_utilization": 0.95},
        without_effect=(
            "--attention-backend",
            "--compilation-config",
            "--compilation-config",
            "--block-size",
        ),
    ),
    Line(
        "recipes: Microsoft/Phi-4",
        "microsoft/Phi-4-mini-instruct \\\n  --host 0.0.0.0 \\\n  --max-model-len 4000",
        {"http_options.host": "0.0.0.0", "max_positions": 4000},
    ),
    Line(
        "recipes: Seed/Seed-OSS-36B",
        "ByteDance-Seed/Seed-OSS-36B-Instruct \\\n    --host localhost \\\n    --port 8000 \\\n"
        "    --tensor-parallel-size 8 \\\n    --enable-auto-tool-choice \\\n"
        "    --tool-call-parser seed_oss",
        refused="--tool-call-parser: the format 'seed_oss' is not known here",
    ),
    Line(
        "recipes: Qwen/Qwen3-Next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct \\\n  --tensor-parallel-size 4 \\\n"
        "  --served-model-name qwen3-next \\\n  --enable-prefix-caching",
        {"served_model_name": "qwen3-next", "prefill.tp": 4, "kv_reuse.enabled": True},
    ),
    Line(
        "recipes: Qwen/Qwen3-Next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct  \\\n--tokenizer-mode auto  "
        "--gpu-memory-utilization 0.8 \\\n--speculative-config "
        """'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}' \\\n"""
        "--tensor-parallel-size 4 --no-enable-chunked-prefill",
        {"gpu_memory_utilization": 0.8, "decode.tp": 4},
        without_effect=("--speculative-config", "--no-enable-chunked-prefill"),
    ),
    Line(
        "recipes: Mistral/Ministral-3-Instruct",
        "mistralai/Ministral-3-14B-Instruct-2512 \\\n  --tokenizer_mode mistral "
        "--config_format mistral --load_format mistral \\\n"
        "  --enable-auto-tool-choice --tool-call-parser mistral",
        refused="--tokenizer-mode: the checkpoint's own tokenizer.json is used",
    ),
    Line(
        "recipes: Qwen/Qwen3.5",
        "Qwen/Qwen3.5-397B-A17B-FP8 \\\n  -dp 8 \\\n  --enable-expert-parallel \\\n"
        "  --language-model-only \\\n  --reasoning-parser qwen3 \\\n  --enable-prefix-caching",
        refused="--data-parallel-size: a server has one router",
    ),
    Line(
        "recipes: Qwen/Qwen3.5",
        """Qwen/Qwen3.5-397B-A17B --hf-overrides '{"text_config": {"rope_parameters": """
        """{"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "yarn", """
        """"rope_theta": 10000000, "partial_rotary_factor": 0.25, "factor": 4.0, """
        """"original_max_position_embeddings": 262144}}}' --max-model-len 1010000""",
        refused="model_overrides: 'text_config' cannot be overridden",
    ),
    Line(
        "recipes: Google/Gemma4",
        "google/gemma-4-31B-it \\\n  --tensor-parallel-size 2 \\\n  --max-model-len 32768 \\\n"
        "  --no-enable-prefix-caching \\\n"
        """  --limit-mm-per-prompt '{"image": 0, "audio": 0}' \\\n"""
        "  --async-scheduling",
        {"prefill.tp": 2, "max_positions": 32768, "kv_reuse.enabled": False},
        without_effect=("--limit-mm-per-prompt", "--async-scheduling"),
    ),
    Line(
        "recipes: moonshotai/Kimi-K2",
        "moonshotai/Kimi-K2-Instruct --trust-remote-code --tokenizer-mode auto "
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --dtype bfloat16 "
        "--quantization fp8 --max-model-len 2048 --max-num-seqs 1 --max-num-batched-tokens 1024 "
        "--enable-chunked-prefill --disable-log-requests --kv-cache-dtype fp8 -dcp 8",
        refused="--trust-remote-code: no code from a checkpoint is ever run",
    ),
    Line(
        "model card: Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-7B-Instruct-1M \\\n  --tensor-parallel-size 4 \\\n"
        "  --max-model-len 1010000 \\\n  --enable-chunked-prefill "
        "--max-num-batched-tokens 131072 \\\n  --enforce-eager \\\n  --max-num-seqs 1",
        {"prefill.tp": 4, "max_positions": 1010000, "scheduling.max_batch": 1},
        without_effect=(
            "--enable-chunked-prefill",
            "--max-num-batched-tokens",
            "--enforce-eager",
        ),
    ),
    Line(
        "model card: Qwen3-8B",
        """Qwen/Qwen3-8B --rope-scaling '{"rope_type":"yarn","factor":4.0,"""
        """"original_max_position_embeddings":32768}' --max-model-len 131072""",
        {"model_overrides.rope_scaling.factor": 4.0, "max_positions": 131072},
    ),
]
