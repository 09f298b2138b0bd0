"""Write the page of served models: `python -m csps.models.checkpoints.models_page >docs/models.md`.

Everything that the page lists is read from the code that serves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from csps.kernels.rowwise_fp8 import ALIGNMENT, LEAST_CAPABILITY
from csps.models.checkpoints.stored_tensor import FLOATS, FORMATS
from csps.models.network.checkpoint_json import OVERRIDABLE, CheckpointJson
from csps.models.network.rope import SCALINGS
from csps.models.network.spec import ARCHITECTURES, REFUSED, ModelSpec

_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 60,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 8,
    "max_position_embeddings": 8192,
    "use_qk_norm": True,
    "rope_parameters": {"llama_4_scaling_beta": 0.1},
}
"""The least that any architecture asks for."""

INTRODUCTION = """\
# Models

csps serves Hugging Face checkpoints of the classes below, from `config.json`, `*.safetensors` and
`tokenizer.json`. `csps check-config` says in a second whether a directory can be served. This page
is generated from the code that reads checkpoints
(`python -m csps.models.checkpoints.models_page`).

**Exact** means: in fp32, no logit differs from that of transformers by more than 3e-6 of the
largest one. This is so for a prompt computed whole, in chunks behind cached KV, and split over
tensor-parallel ranks. Tests compare tiny random checkpoints of every class with transformers.

**Features.** All of these models run with all strategies, policies and features. Attention stays
exact until you have [measured your model](profiling.md#for-your-own-model), unless a request sets
drop ratios itself.

**Sliding windows.** In a layer with a window, a token attends to the last positions only, its own
included. What ranks exchange there depends on how they share the work:

- Where each rank computes some tokens with all heads (`ulysses`, rings, `levels`, `csa`), it
  fetches the keys in the windows of its tokens, and exchanges nothing else.
- Where each rank computes some heads of all tokens (`sp_tp`, `gathered_weights`), it does not ask
  for history outside the windows.

Of Mistral's models, only 7B v0.1 has a window; `sliding_window` of the others is null. Sparse
attention drops nothing in layers with a window. While decoding, ranks that hold no KV in the
window are not asked. The KV of all tokens stays in all layers, so a prefix hit is exact; of the
decode gang, these layers [may have slots of their own](#memory-of-layers-with-a-window).

## Served
"""

LONGER = """\
## Longer contexts

`model_overrides:` replaces values of `config.json`, such as those that Qwen2.5 and Qwen3 need
beyond 32,768 tokens:

```yaml
model_overrides:
  rope_scaling: {{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}
```

RoPE's base frequency and the fraction of rotated dimensions stay unless they are given. For a text
model that is part of a larger one, the values are those of the text part. `sliding_window: null`
makes a model that was trained with a window attend to the whole context. Its answers then differ
from those of transformers.

- Possible keys: {keys}.
- RoPE scalings: {scalings}.
- **YaRN** and linear scaling change short prompts as well, as in transformers. The context is the
  original one times the factor.
- **Dynamic NTK** is the identity inside `max_position_embeddings`, where the context ends.
- **LongRoPE** has two sets of factors, short and long. transformers chooses one for each sequence,
  by its length. Here, as in vLLM, one set serves all sequences. It is the long one if the context
  (`max_position_embeddings`) is longer than the original one, and otherwise the short one. The long
  set is exact for sequences beyond the original context only. If yours are shorter, override
  `max_position_embeddings` with the original context.
- **Dual chunk attention** (Qwen2.5-1M) is plain attention inside its first chunk, 253,952 tokens.
  The context ends there.
"""

QUANTIZED = """\
## Weights

Files hold floats ({floats}) or quantized weights. Unless
`weight_dtype` is `fp8` (below), quantized weights are dequantized to `dtype` while they are read,
bit for bit as transformers does. Activations are then not quantized, and a rank takes the memory of
`dtype`, however small the files are. `csps check-config` and `csps serve` say how much before
anything is loaded.

{formats}

### Kept in FP8

`weight_dtype: fp8` (`csps serve --quantization fp8`) keeps the matrices of feed-forward layers in
FP8 (E4M3) with a scale for each row, a byte for each number, as Context Parallelism does. Before a
product, each token is quantized with a scale of its own. Tests compare the logits with an
independent implementation of this definition.

- **Files** that hold FP8 with a scale for each tensor or row are kept bit for bit. All others are
  rounded to FP8 while they are read. FP8 with block scales is therefore rounded twice;
  `csps check-config` and `csps serve` say so.
- **GPUs** (`torch._scaled_mm`) need compute capability {capability}, `dtype: bfloat16`, and matrix
  dimensions divisible by {alignment}; otherwise `csps check-config` and ranks refuse. No GPU has
  run it yet.
- **CPUs** compute the same product in fp32. That saves memory and costs time.
- **Models with experts** are refused.
- **With `tp`**, each rank has a scale for its part of a row, unless the files have one, and for its
  part of a token between the two products. So logits differ a little between values of `tp`.

`csps eval --weight-dtype fp8` measures what a model loses;
[the included one](tuning.md#fp8-weights) loses next to nothing.
"""

NEAR_KV = """\
## Memory of layers with a window

By default, a slot of the KV pool is one token in all layers, those with a window included. So KV
takes as much memory as without windows, although few tokens read most of it. This setting gives
layers with a window slots of their own on the decode gang:

```yaml
decode: {{window_slots: auto}}
```

{table}

- **Slots.** At its master, a request takes `window` of these slots, or fewer if prompt and answer
  are shorter. A new token replaces the one that has left the window. `kv_slots` then counts tokens
  in the other layers only, so the same memory holds more of them. `csps check-config` says how many
  bytes either takes.
- **Limit.** A request starts when its master has slots of both kinds. `auto` is enough for
  `scheduling.max_batch` requests; a smaller number limits how many decode at a time.
- **Transfer.** In these layers, only the KV in the last window of a prompt is sent, to the master.
  While decoding, no rank is asked about these layers.
- **The prefix cache stays exact, and nothing is computed again.** The prefill gang keeps KV of all
  layers. The decode gang keeps that of the other layers, and gets the last window again with each
  turn.
- **Not with** elastic gangs, `chunked_prefill` and `decode.prefill_tokens_max`: there a gang
  computes tokens behind cached KV itself, for which it would need all layers. The settings refuse
  them together.

The prefill gang has one kind of slots. With the second kind, a hit would have to end where near KV
was kept, or compute tokens again: the near KV of a position depends on the windowed layers below
it, so it takes `window - 1` tokens for each of them, 2,286 for gpt-oss-120b and 53,196 for Gemma 3
27B.
"""

_NEAR_SHAPES = (
    ("gpt-oss-20b", 24, 12, 128, 8, 64),
    ("gpt-oss-120b", 36, 18, 128, 8, 64),
    ("Gemma 3 27B", 62, 52, 1024, 16, 128),
    ("Mistral 7B v0.1", 32, 32, 4096, 8, 128),
)
"""Name, layers, those with a window, the window, KV heads and head size."""


def _near_kv() -> str:
    """Return the section about slots of layers with a window."""
    rows = []
    for name, layers, near, window, kv_heads, head_dim in _NEAR_SHAPES:
        layer = 2 * kv_heads * head_dim * 2
        sizes = (layer * layers, layer * (layers - near), layer * near * window)
        rows.append((name, str(window), *(_size(size) for size in sizes)))
    columns = ("bfloat16", "window", "a token", "with `window_slots`", "and for a request")
    return NEAR_KV.format(table=_table(columns, rows).rstrip())


def _size(count: int) -> str:
    """Return a number of bytes in KiB, or in MiB from one on."""
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


REFUSED_TEXT = """\
## Refused

Besides every class and every quantization that this page does not name:
"""


def models_page() -> str:
    """Return the page."""
    served = [
        (
            f"`{name}`",
            architecture.models,
            _layers(architecture.read(_config(name))),
            architecture.limits or "none",
        )
        for name, architecture in ARCHITECTURES.items()
    ]
    refused = [(f"`{name}`", _linked(why)) for name, why in REFUSED.items()]
    sections = [
        INTRODUCTION,
        _table(("class", "such as", "layers", "limits"), served),
        LONGER.format(scalings=_listed(SCALINGS), keys=_listed(OVERRIDABLE)),
        QUANTIZED.format(
            floats=_listed(FLOATS),
            formats=_formats(),
            capability=".".join(map(str, LEAST_CAPABILITY)),
            alignment=ALIGNMENT,
        ),
        _near_kv(),
        REFUSED_TEXT,
        _table(("class", "because"), refused),
    ]
    return "\n".join(sections)


def _config(architecture: str) -> CheckpointJson:
    # No such folder, so there is no generation_config.json in it.
    values = {**_CONFIG, "architectures": [architecture], "text_config": _CONFIG}
    return CheckpointJson(path=Path("no checkpoint", "config.json"), values=values)


def _layers(spec: ModelSpec) -> str:
    """Describe how a model's layers differ from Llama's."""
    experts = spec.experts
    rotated = 2 * len(spec.rope.inverse_frequencies)
    found = [
        (experts is not None, "experts" if experts is None else f"experts by {experts.scores}"),
        (experts is not None and experts.shared_intermediate, "shared experts"),
        (spec.qkv_bias, "biases of queries, keys and values"),
        (spec.qk_norm, "norm of queries and keys"),
        (spec.post_norms, "norms before and after"),
        (rotated < spec.head_dim, "partial RoPE"),
        (spec.rope.query_growth, "queries scaled by position"),
        (spec.window, _windows(spec)),
        (spec.windowed_rope, "another RoPE there"),
        (spec.sinks, "attention sinks"),
        (spec.activation != "silu", "GeGLU"),
        (experts is not None and experts.clamped, "clamped gates"),
        (spec.wrapped, "text part of a larger model"),
    ]
    return ", ".join(words for differs, words in found if differs) or "as Llama's"


def _windows(spec: ModelSpec) -> str:
    """Describe which layers have a window; empty if none has one."""
    share = Fraction(len(spec.windowed), spec.layers)
    words = {
        Fraction(0): "",
        Fraction(1, 2): "a window in every other layer",
        Fraction(5, 6): "a window in five of six layers",
        Fraction(1): "a window in every layer unless `sliding_window` is null",
    }
    return words[share]


def _linked(why: str) -> str:
    """Return a reason with links to pages in this folder."""
    return re.sub(r"\(docs/(.+)\)", r"([design](\1))", why)


def _formats() -> str:
    return "\n".join(f"- `quant_method: {method}`: {what}" for method, what in FORMATS.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- ", "|---") for line in lines)


if __name__ == "__main__":
    print(models_page(), end="")
