"""Load a network from a model directory."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from csps.kernels.rowwise_fp8 import ALIGNMENT, unsupported_device
from csps.models.checkpoints.checkpoint import Checkpoint, empty, memory_dtype, open_checkpoint
from csps.models.checkpoints.families import (
    expert_places,
    gemma3_places,
    glm_places,
    gpt_oss_places,
    internlm2_places,
    llama_places,
    phi3_places,
)
from csps.models.checkpoints.stored_tensor import FLOATS, StoredTensor
from csps.models.network.checkpoint_json import UnsupportedModelError
from csps.models.network.network import AllReduce, Network
from csps.models.network.parameters import (
    LayerParameters,
    ModelParameters,
    Place,
    TensorBlock,
    in_fp8,
)
from csps.models.network.spec import ModelSpec, TpShard, read_spec, tp_shard_of

_log = logging.getLogger(__name__)

_PLACES: Mapping[str, Callable[[ModelSpec, TpShard], ModelParameters[Place]]] = {
    "llama": llama_places,
    "mistral": llama_places,
    "ministral3": llama_places,
    "qwen2": llama_places,
    "qwen3": llama_places,
    "qwen3_moe": expert_places,
    "mixtral": expert_places,
    "glm4_moe": expert_places,
    "glm": glm_places,
    "phi3": phi3_places,
    "internlm2": internlm2_places,
    "gemma3": gemma3_places,
    "gpt_oss": gpt_oss_places,
}


_WRAPPED_NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_NEW_WRAPPED_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
"""Beginnings of names where a larger model wraps this one, in old files and in new ones."""


def _places(checkpoint: Checkpoint, spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank needs, by the names that the files use."""
    if not spec.wrapped:
        return _PLACES[spec.family](spec, shard)
    old = any(name.startswith("language_model.") for name in checkpoint.weights.files)
    names = _WRAPPED_NAMES if old else _NEW_WRAPPED_NAMES

    def renamed(block: TensorBlock) -> TensorBlock:
        begin = next(begin for begin in names if block.tensor.startswith(begin))
        return replace(block, tensor=names[begin] + block.tensor.removeprefix(begin))

    # config.json of a wrapped model says too little about the head.
    tied = spec.tie_embeddings and not checkpoint.weights.has(f"{names['lm_head.']}weight")
    places = _PLACES[spec.family](replace(spec, tie_embeddings=tied), shard)
    return places.map(lambda place: tuple(map(renamed, place)))


def _with_fp8(
    checkpoint: Checkpoint, spec: ModelSpec, places: ModelParameters[Place]
) -> ModelParameters[Place]:
    """Return the same places, with the matrices of feed-forward layers kept in FP8.

    Raises:
        UnsupportedModelError: a layer has experts.
    """
    if spec.experts is not None:
        raise UnsupportedModelError(
            f"{checkpoint.model_dir}: weights are kept in FP8 in models without experts only; set "
            "weight_dtype to auto"
        )
    return replace(places, layers=tuple(map(_layer_with_fp8, places.layers)))


def _layer_with_fp8(layer: LayerParameters[Place]) -> LayerParameters[Place]:
    assert layer.gate_up is not None, "a layer without an MLP"
    assert layer.down is not None, "a layer without an MLP"
    gate_up, gate_up_scales = in_fp8(layer.gate_up)
    down, down_scales = in_fp8(layer.down)
    return replace(
        layer,
        gate_up=gate_up,
        gate_up_scales=gate_up_scales,
        down=down,
        down_scales=down_scales,
    )


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """Weights that the first of an instance's ranks loads."""

    parameters: int
    loaded_bytes: int
    stored_bytes: int
    """Bytes of the tensors that it reads, in the weight files, complete."""
    quantized: tuple[str, ...]
    """Formats of those that are not stored as floats."""
    rounded_twice: bool
    """True if some are stored as FP8 in blocks, and kept as FP8 by row."""


def load_network(
    model_dir: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce | None = None,
    packed: bool = False,
    rounds_kv: bool = False,
    fp8: bool = False,
) -> Network:
    """Load one tensor-parallel rank's shard of a Hugging Face checkpoint, tensor by tensor.

    Args:
        model_dir: holds config.json and safetensors.
        overrides: values that replace those of config.json (`OVERRIDABLE`).
        dtype: the type of the weights in memory; each is converted as it is read.
        all_reduce: sums a tensor over the tensor-parallel group, in place or not, and returns the
            sum; needed when `tp_size` > 1. A callable keeps collectives out of this package.
        packed: whether products of few rows matter most, as in decoding (`Network.of`).
        rounds_kv: whether keys and values are rounded to what 8 bits hold.
        fp8: whether matrices of feed-forward layers are kept in FP8, with a scale for each row of
            this rank's part (`csps.kernels.rowwise_fp8`).

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not supported, or the device
            cannot multiply FP8.
        MissingTensorError: a tensor that the architecture needs is not there.
        CheckpointError: anything else that is wrong with the directory.
    """
    with open_checkpoint(model_dir, overrides) as checkpoint:
        return read_network(
            checkpoint,
            tp_rank=tp_rank,
            tp_size=tp_size,
            dtype=dtype,
            device=device,
            all_reduce=all_reduce,
            packed=packed,
            rounds_kv=rounds_kv,
            fp8=fp8,
        )


def read_network(
    checkpoint: Checkpoint,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce | None = None,
    packed: bool = False,
    rounds_kv: bool = False,
    fp8: bool = False,
) -> Network:
    """Load a network as `load_network` does, from a checkpoint that is open already."""
    if tp_size > 1 and all_reduce is None:
        raise ValueError(
            f"read_network: tp_size {tp_size} needs an all_reduce; only tp_size 1 does without"
        )
    spec = read_spec(checkpoint.model_dir, checkpoint.overrides)
    shard = tp_shard_of(spec, tp_rank, tp_size)
    places = _places(checkpoint, spec, shard)
    if fp8:
        places = _with_fp8(checkpoint, spec, places)
        _check_device(spec, shard, torch.device(device), dtype)
    _log_quantized(_sizes(checkpoint, places, dtype), dtype, fp8=fp8)
    # All tensors before any is read: otherwise malloc places some between the temporary ones of
    # dequantization, whose holes then stay. Pages that nobody has written take no memory.
    parameters = places.map(lambda place: empty(place, dtype, device))
    for place, parameter in zip(places, parameters, strict=True):
        if place[0].kept == "floats":
            checkpoint.read(place, parameter)
    for layer_places, layer in zip(places.layers, parameters.layers, strict=True):
        for source, matrix, scales in (
            (layer_places.gate_up, layer.gate_up, layer.gate_up_scales),
            (layer_places.down, layer.down, layer.down_scales),
        ):
            if source is not None and matrix is not None and scales is not None:
                checkpoint.read_fp8(source, matrix, scales)
    reduce = all_reduce if tp_size > 1 else None
    return Network.of(spec, shard, parameters, reduce, packed=packed, rounds_kv=rounds_kv)


def _check_device(
    spec: ModelSpec, shard: TpShard, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise UnsupportedModelError if a device cannot multiply a rank's matrices in FP8."""
    if device.type != "cuda":
        return
    reason = unsupported_device(device)
    if reason is None and dtype != torch.bfloat16:
        reason = f"products in FP8 have the type bfloat16, and dtype is {dtype}"
    if reason is not None:
        raise UnsupportedModelError(without_fp8(reason))
    _check_alignment(spec, shard)


def _check_alignment(spec: ModelSpec, shard: TpShard) -> None:
    """Raise UnsupportedModelError if no GPU can multiply a rank's matrices in FP8."""
    sides = spec.hidden, len(shard.intermediate)
    if any(side % ALIGNMENT for side in sides):
        raise UnsupportedModelError(
            without_fp8(
                f"a rank's feed-forward matrices are {sides[0]} by {sides[1]}, and GPUs need "
                f"multiples of {ALIGNMENT}"
            )
        )


def without_fp8(reason: str) -> str:
    """Return the error's text where weights cannot be kept in FP8."""
    return f"weight_dtype: fp8: {reason}; set weight_dtype to auto"


def _log_quantized(sizes: WeightSizes, dtype: torch.dtype, *, fp8: bool) -> None:
    if sizes.quantized:
        _log.info(
            "weights stored as %s (%.1f GiB) take %.1f GiB as %s on this rank",
            ", ".join(sizes.quantized),
            sizes.stored_bytes / 2**30,
            sizes.loaded_bytes / 2**30,
            str(dtype).removeprefix("torch.") + (" and FP8" if fp8 else ""),
        )


def weights_checksum(
    checkpoint: Checkpoint, *, part: int = 0, parts: int = 1, threads: int = 1
) -> int:
    """Return 63 bits that stand for all weights a network is loaded from, as they are stored.

    The ranks of an instance divide the work: the sum of all parts, modulo 2**63, is the checksum of
    the whole.
    """
    spec = read_spec(checkpoint.model_dir, checkpoint.overrides)
    # Whole stored tensors: the sum must not depend on the tensor parallelism of the network.
    places = _places(checkpoint, spec, tp_shard_of(spec, 0, 1))
    names = _parts(_stored(checkpoint, places))[part::parts]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(checkpoint.checksum, names)) % 2**63


def measure_weights(
    model_dir: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tp_size: int = 1,
    fp8: bool = False,
    on_gpu: bool = False,
) -> WeightSizes:
    """Measure the weights of the first of `tp_size` ranks; read none.

    Every tensor is looked up in the headers of the weight files. Whatever `load_network` would
    reject is rejected here as well, in the time that it takes to open the files.

    Args:
        on_gpu: whether the ranks compute on GPUs, which multiply FP8 in some shapes only.

    Raises:
        CheckpointError: as `load_network`.
        ValueError: the model cannot be split over `tp_size` ranks.
    """
    spec = read_spec(model_dir, overrides)
    shard = tp_shard_of(spec, 0, tp_size)
    with open_checkpoint(model_dir, overrides) as checkpoint:
        places = _places(checkpoint, spec, shard)
        if fp8:
            places = _with_fp8(checkpoint, spec, places)
            for rank in range(tp_size if on_gpu else 0):
                _check_alignment(spec, tp_shard_of(spec, rank, tp_size))
        return _sizes(checkpoint, places, dtype)


def _sizes(
    checkpoint: Checkpoint, places: ModelParameters[Place], dtype: torch.dtype
) -> WeightSizes:
    counts = [(checkpoint.count(place), memory_dtype(place, dtype).itemsize) for place in places]
    scales = sum(checkpoint.count(place) for place in places if place[0].kept == "scales")
    stored = _stored(checkpoint, places)
    in_fp8 = _stored(checkpoint, (place for place in places if place[0].kept == "fp8"))
    return WeightSizes(
        parameters=sum(count for count, _ in counts) - scales,
        loaded_bytes=sum(count * size for count, size in counts),
        stored_bytes=sum(checkpoint.weights.bytes_of(part) for part in _parts(stored)),
        quantized=tuple(sorted({tensor.format for tensor in stored} - set(FLOATS))),
        rounded_twice=any(one.format == "FP8" and one.read_fp8 is None for one in in_fp8),
    )


def _stored(checkpoint: Checkpoint, places: Iterable[Place]) -> list[StoredTensor]:
    """Return the tensors that places lie in, each once."""
    blocks = {block.tensor: block for place in places for block in place}
    return [checkpoint.stored(block) for block in blocks.values()]


def _parts(stored: Iterable[StoredTensor]) -> list[str]:
    """Return the tensors of the files that stored ones consist of, sorted."""
    return sorted({part for tensor in stored for part in tensor.parts})
