"""The trained model as transformers, vLLM and this server load it."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csps.tools.train_needle.architecture import ROPE_THETA


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Readable by releases of several years."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    # The template inside tokenizer_config.json: older readers look there only.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _amend(folder / "config.json", rope_theta=ROPE_THETA, torch_dtype="float32")
    _amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "model.safetensors").chmod(0o644)


def _amend(path: Path, **entries: object) -> None:
    """Entries by their names before transformers 5."""
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps(content, indent=2) + "\n")
