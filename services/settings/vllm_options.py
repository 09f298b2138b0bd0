"""List the options of `vllm serve`: which setting is the same here, and what the others come to.

`csps serve` takes vLLM's command lines by this list, and an unknown setting that is one of vLLM's
names is refused with ours beside it. vLLM's names are written with dashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OURS: Mapping[str, str] = {
    "model": "model",
    "model-tag": "model",
    "served-model-name": "served_model_name",
    "host": "http_options.host",
    "port": "http_options.port",
    "api-key": "api_keys_file",
    "dtype": "dtype",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "weight_dtype",
    "max-model-len": "max_positions",
    "tensor-parallel-size": "prefill.tp and decode.tp",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "kv-cache-memory-bytes": "prefill.kv_slots and decode.kv_slots, in tokens",
    "num-gpu-blocks-override": "prefill.kv_slots and decode.kv_slots, in tokens",
    "hf-overrides": "model_overrides",
    "rope-scaling": "model_overrides.rope_scaling",
    "rope-theta": "model_overrides.rope_theta",
    "chat-template": "chat_template",
    "enable-prefix-caching": "kv_reuse.enabled",
    "max-num-seqs": "scheduling.max_batch",
    "max-num-batched-tokens": "quantum_ms, the time of a step",
    "device": "device",
    "otlp-traces-endpoint": "telemetry.otlp_endpoint",
    "decode-context-parallel-size": "decode.instances",
    "prefill-context-parallel-size": "prefill.instances",
    "scheduling-policy": "scheduling.policy",
    "tool-call-parser": "tool_format",
    "reasoning-parser": "reasoning",
}
"""Settings by vLLM's name."""

KV_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    "int8": "int8",
    "int8_per_token_head": "int8",
}
"""The setting `kv_dtype` by vLLM's names."""
WEIGHT_DTYPES: Mapping[str, str] = {
    "fp8": "fp8",
    "ptpc_fp8": "fp8",
}
"""The setting `weight_dtype` by vLLM's names."""
TOOL_FORMATS: Mapping[str, str] = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "openai": "harmony",
}
"""The setting `tool_format` by vLLM's parser."""
REASONING: Mapping[str, str] = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "openai_gptoss": "harmony",
    "qwen3": "think",
    "step3": "think",
}
"""The setting `reasoning` by vLLM's parser."""

ALIASES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
"""Short names of vLLM's."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option that changes nothing here, and why."""

    why: str
    takes_value: bool = True
    """False for a switch, which may also be written `--no-...`."""


def _switch(why: str) -> Ignored:
    return Ignored(why, takes_value=False)


_EAGER = "CUDA graphs are not captured, and nothing is compiled when a model is loaded"
_KERNELS = "kernels are chosen by device, dtype and heads"
_NO_LOG = "requests are never logged"
_IMAGES = "only text is served"
_CHUNKS = "prompts are always computed in steps that yield to other work"
_ONE_LOOP = "the router's processes are fixed"
_EXPERTS = "every instance has all experts, split over its tp ranks"

IGNORED: Mapping[str, Ignored] = {
    "enforce-eager": _switch(_EAGER),
    "optimization-level": Ignored(_EAGER),
    "compilation-config": Ignored(_EAGER),
    "max-cudagraph-capture-size": Ignored(_EAGER),
    "max-seq-len-to-capture": Ignored(_EAGER),
    "attention-backend": Ignored(_KERNELS),
    "attention-config": Ignored(_KERNELS),
    "linear-backend": Ignored(_KERNELS),
    "moe-backend": Ignored(_KERNELS),
    "kernel-config": Ignored(_KERNELS),
    "disable-cascade-attn": _switch(_KERNELS),
    "disable-custom-all-reduce": _switch(_KERNELS),
    "enable-flashinfer-autotune": _switch(_KERNELS),
    "block-size": Ignored("KV slots are single tokens"),
    "max-num-batched-tokens": Ignored("a step is bounded by its time, quantum_ms"),
    "enable-chunked-prefill": _switch(_CHUNKS),
    "max-num-partial-prefills": Ignored(_CHUNKS),
    "long-prefill-token-threshold": Ignored(_CHUNKS),
    "async-scheduling": _switch("scheduling and computing always overlap"),
    "speculative-config": Ignored("tokens are sampled one by one; the answers are the same"),
    "enable-expert-parallel": _switch(_EXPERTS),
    "enable-eplb": _switch(_EXPERTS),
    "distributed-executor-backend": Ignored("processes are always started by Ray"),
    "swap-space": Ignored("no KV is swapped to host memory"),
    "enable-log-requests": _switch(_NO_LOG),
    "disable-log-requests": _switch(_NO_LOG),
    "disable-log-stats": _switch("figures are in /metrics and not in the log"),
    "disable-uvicorn-access-log": _switch(_NO_LOG),
    "uvicorn-log-level": Ignored("logging_config.log_level in config.yaml sets it"),
    "max-log-len": Ignored(_NO_LOG),
    "limit-mm-per-prompt": Ignored(_IMAGES),
    "language-model-only": _switch(_IMAGES),
    "mm-processor-kwargs": Ignored(_IMAGES),
    "mm-processor-cache-gb": Ignored(_IMAGES),
    "mm-processor-cache-type": Ignored(_IMAGES),
    "mm-encoder-tp-mode": Ignored(_IMAGES),
    "mm-encoder-attn-backend": Ignored(_IMAGES),
    "media-io-kwargs": Ignored(_IMAGES),
    "video-pruning-rate": Ignored(_IMAGES),
    "allowed-local-media-path": Ignored(_IMAGES),
    "disable-chunked-mm-input": _switch(_IMAGES),
    "use-tqdm-on-load": _switch("ranks load without a progress bar"),
    "max-parallel-loading-workers": Ignored("ranks load at once"),
    "safetensors-load-strategy": Ignored("files are mapped and read once"),
    "disable-hybrid-kv-cache-manager": _switch(
        "all layers store all positions, unless decode.window_slots is set"
    ),
    "disable-frontend-multiprocessing": _switch(_ONE_LOOP),
    "api-server-count": Ignored(_ONE_LOOP),
    "enable-auto-tool-choice": _switch("tools are always allowed"),
    "enable-prompt-tokens-details": _switch("answers always have them"),
    "seed": Ignored("a request may have a seed; without one it is random"),
    "max-logprobs": Ignored("a request may ask for 20"),
    "trust-request-chat-template": _switch("requests bring no chat template"),
    "chat-template-content-format": Ignored("it follows from the template"),
}
"""Options that are taken and change nothing; `csps serve` says why."""

_TOKENIZER = "the checkpoint's own tokenizer.json is used"
_CLUSTER = "start Ray on each machine, and run `serve deploy config.yaml` on one (docs/install.md)"
_GATEWAY = "put a reverse proxy in front"

REFUSED: Mapping[str, str] = {
    "trust-remote-code": (
        "no code from a checkpoint is ever run: its architecture must be one that csps implements. "
        "Drop the option; check-config says if the model is served without it"
    ),
    "kv-cache-dtype-skip-layers": "all layers keep KV in one form (kv_dtype)",
    "calculate-kv-scales": (
        "KV in 8 bits (kv_dtype) always has a scale for each token and head; drop the option"
    ),
    "pipeline-parallel-size": (
        "layers are not split over machines; raise --tensor-parallel-size, or spread prompts over "
        "more copies with --prefill"
    ),
    "data-parallel-size": (
        "a server has one router; --prefill and --decode set the copies of the weights that it "
        "uses together, and more servers behind a load balancer multiply it"
    ),
    "data-parallel-size-local": "copies of the weights are set by --prefill and --decode",
    "data-parallel-address": _CLUSTER,
    "data-parallel-rpc-port": _CLUSTER,
    "data-parallel-start-rank": _CLUSTER,
    "data-parallel-rank": _CLUSTER,
    "data-parallel-backend": _CLUSTER,
    "data-parallel-hybrid-lb": _CLUSTER,
    "headless": _CLUSTER,
    "nnodes": _CLUSTER,
    "node-rank": _CLUSTER,
    "master-addr": _CLUSTER,
    "master-port": _CLUSTER,
    "decode-context-parallel-size": (
        "KV is spread over the copies of the weights that decode: --decode sets how many, "
        "independently of tensor parallelism"
    ),
    "prefill-context-parallel-size": (
        "a prompt is computed by as many copies of the weights as --prefill says"
    ),
    "cp-kv-cache-interleave-size": "how KV is spread is the policy's decision",
    "dcp-comm-backend": "how KV is spread is the policy's decision",
    "kv-transfer-config": (
        "prefill and decode gangs exchange KV by themselves: --prefill and --decode set them"
    ),
    "kv-offloading-size": "KV stays in the memory of its device",
    "cpu-offload-gb": "weights stay in the memory of their device; use more ranks",
    "enable-lora": "LoRA adapters are not served; merge the adapter into the weights",
    "lora-modules": "LoRA adapters are not served; merge the adapter into the weights",
    "max-lora-rank": "LoRA adapters are not served; merge the adapter into the weights",
    "tool-parser-plugin": "no code from elsewhere is run; tool_format names the formats",
    "tool-server": "clients run their tools themselves",
    "reasoning-parser-plugin": "no code from elsewhere is run",
    "default-chat-template-kwargs": "requests bring chat_template_kwargs",
    "tokenizer": _TOKENIZER,
    "tokenizer-mode": _TOKENIZER,
    "tokenizer-revision": _TOKENIZER,
    "skip-tokenizer-init": _TOKENIZER,
    "load-format": "weights are read from safetensors",
    "config-format": "the model is read from config.json",
    "hf-config-path": "the model is read from the checkpoint's own config.json",
    "model-impl": "csps has implementations of its own",
    "code-revision": "no code from a checkpoint is ever run",
    "model-class-overrides": "no code from elsewhere is run",
    "runner": "only text generation is served",
    "task": "only text generation is served",
    "convert": "only text generation is served",
    "logits-processors": "no code from elsewhere is run; use logit_bias",
    "generation-config": (
        "sampling that a request leaves out is as the checkpoint's generation_config.json says"
    ),
    "override-generation-config": "edit the checkpoint's generation_config.json",
    "enable-sleep-mode": "a server that is not needed is stopped",
    "uds": f"the server listens on TCP; {_GATEWAY}",
    "root-path": f"the API is at /v1; {_GATEWAY}",
    "middleware": f"no code from elsewhere is run; {_GATEWAY}",
    "ssl-keyfile": f"the server speaks plain HTTP; {_GATEWAY}",
    "ssl-certfile": f"the server speaks plain HTTP; {_GATEWAY}",
    "ssl-ca-certs": f"the server speaks plain HTTP; {_GATEWAY}",
    "ssl-cert-reqs": f"the server speaks plain HTTP; {_GATEWAY}",
    "allowed-origins": f"no CORS headers are sent; {_GATEWAY}",
    "allowed-methods": f"no CORS headers are sent; {_GATEWAY}",
    "allowed-headers": f"no CORS headers are sent; {_GATEWAY}",
    "allow-credentials": f"no CORS headers are sent; {_GATEWAY}",
    "response-role": "answers have the role assistant",
    "mamba-ssm-cache-dtype": "models with state-space layers are not served",
    "mamba-cache-mode": "models with state-space layers are not served",
    "mamba-backend": "models with state-space layers are not served",
}
"""Options that are refused, and why."""

HARMLESS: Mapping[str, frozenset[str]] = {
    "trust-remote-code": frozenset(),
    "pipeline-parallel-size": frozenset({"1"}),
    "data-parallel-size": frozenset({"1"}),
    "decode-context-parallel-size": frozenset({"1"}),
    "prefill-context-parallel-size": frozenset({"1"}),
    "cpu-offload-gb": frozenset({"0"}),
    "tokenizer-mode": frozenset({"auto", "hf", "slow"}),
    "load-format": frozenset({"auto", "hf", "safetensors"}),
    "config-format": frozenset({"auto", "hf"}),
    "runner": frozenset({"auto", "generate"}),
    "task": frozenset({"auto", "generate"}),
    "convert": frozenset({"auto", "none"}),
    "generation-config": frozenset({"auto"}),
    "model-impl": frozenset({"auto", "vllm"}),
    "nnodes": frozenset({"1"}),
}
"""Values with which a refused option says what is so anyway."""


def canonical(name: str) -> str:
    """Return the name of an option as this list has it: without dashes in front, underscores or a
    path into a JSON value."""
    return name.lstrip("-").partition(".")[0].replace("_", "-")


def hint_of(name: str) -> str:
    """Return text to append to a message about an unknown setting: what it is called here if it is
    one of vLLM's; empty if it is not."""
    known = canonical(name)
    if known in OURS:
        return f"; vLLM's {known} is {OURS[known]} here"
    if known in REFUSED:
        return f"; of vLLM's {known}: {REFUSED[known]}"
    if known in IGNORED:
        return f"; vLLM's {known} is not needed: {IGNORED[known].why}"
    return ""
