"""Write the page of served models: `python -m csps.models.checkpoints.models_page >docs/models.md`.

Everything that the page lists is read from the code that serves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

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
window are not asked. The KV of all tokens stays in all layers, so a prefix hit is exact, and memory
is that of a model without windows.

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

Files hold floats ({floats}) or quantized weights. Quantized weights
are dequantized to `dtype` while they are read, bit for bit as transformers does. Activations are
not quantized. A rank takes the memory of `dtype`, however small the files are. `csps check-config`
and `csps serve` say how much before anything is loaded.

{formats}
"""

NEAR_KV = """\
## Memory of layers with a window

A slot of the KV pool is one token in all layers, those with a window included. So KV takes as much
memory as without windows, although in half of the layers (gpt-oss) or five sixths of them (Gemma 3)
only the next tokens read it. A second pool would hold the windowed layers. What follows is its
design; it is not built.

- **Where.** While a sequence decodes, its near KV lies at the master alone, in a ring of `window`
  slots of the second pool. Nobody is asked in windowed layers then. A prefill step leaves the last
  `window - 1` positions of each chunk with the members that computed them, for the next chunk
  (`near_keys.py` finds them as history).
- **Ledger.** An instance has two counts: a reservation takes slots for prompt and answer on the
  holders as today, and `min(window, prompt + answer)` near slots on the master. Admission needs
  both.
- **Transfer and moves.** Windowed layers send the last window, to the master, behind the last
  chunk. A move sends it with its last entry.
- **Prefix cache.** Recomputing the last window before a hit is *not* exact. The near keys of a
  position depend on the windowed layers below, so a hit has to compute `window - 1` tokens for each
  windowed layer again: 2,300 for gpt-oss-120b, which is cheap, and 53,000 for Gemma 3 27B, which is
  not. So `retain` also keeps near KV: of the last window of a sequence, and at every 16,384th
  position while the pool has room. A hit ends where near KV was kept, or begins its recomputation
  there; the prefix tree stores these positions beside its blocks, and evicts them on their own.
- **Policies** see the second count as one more limit on starts, and change nothing else.
"""

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
        QUANTIZED.format(floats=_listed(FLOATS), formats=_formats()),
        NEAR_KV,
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
