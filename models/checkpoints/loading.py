"""Load a network from a model directory."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from csps.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from csps.models.checkpoints.families import (
    expert_places,
    glm_places,
    internlm2_places,
    llama_places,
)
from csps.models.network.network import AllReduce, Network
from csps.models.network.parameters import ModelParameters, Place
from csps.models.network.spec import ModelSpec, TpShard, read_spec, tp_shard_of

_PLACES: Mapping[str, Callable[[ModelSpec, TpShard], ModelParameters[Place]]] = {
    "llama": llama_places,
    "mistral": llama_places,
    "qwen2": llama_places,
    "qwen3": llama_places,
    "qwen3_moe": expert_places,
    "mixtral": expert_places,
    "glm4_moe": expert_places,
    "glm": glm_places,
    "internlm2": internlm2_places,
}


def load_network(
    model_dir: Path,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce | None = None,
) -> Network:
    """Load one tensor-parallel rank's shard of a Hugging Face checkpoint, tensor by tensor.

    Args:
        model_dir: holds config.json and safetensors.
        dtype: the type of the weights in memory; each is converted as it is read.
        all_reduce: sums a tensor over the tensor-parallel group, in place or not, and returns the
            sum; needed when `tp_size` > 1. A callable keeps collectives out of this package.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not supported.
        MissingTensorError: a tensor that the architecture needs is not there.
        CheckpointError: anything else that is wrong with the directory.
    """
    with open_checkpoint(model_dir) as checkpoint:
        return read_network(
            checkpoint,
            tp_rank=tp_rank,
            tp_size=tp_size,
            dtype=dtype,
            device=device,
            all_reduce=all_reduce,
        )


def read_network(
    checkpoint: Checkpoint,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce | None = None,
) -> Network:
    """Load a network as `load_network` does, from a checkpoint that is open already."""
    if tp_size > 1 and all_reduce is None:
        raise ValueError(
            f"read_network: tp_size {tp_size} needs an all_reduce; only tp_size 1 does without"
        )
    spec = read_spec(checkpoint.model_dir)
    shard = tp_shard_of(spec, tp_rank, tp_size)
    parameters = _PLACES[spec.family](spec, shard).map(
        lambda place: checkpoint.read(place, dtype, device)
    )
    return Network.of(spec, shard, parameters, all_reduce if tp_size > 1 else None)


def weights_checksum(
    checkpoint: Checkpoint, *, part: int = 0, parts: int = 1, threads: int = 1
) -> int:
    """Return 63 bits that stand for all weights a network is loaded from, as they are stored.

    The ranks of an instance divide the work: the sum of all parts, modulo 2**63, is the checksum of
    the whole.
    """
    spec = read_spec(checkpoint.model_dir)
    # Whole stored tensors: the sum must not depend on the tensor parallelism of the network.
    places = _PLACES[spec.family](spec, tp_shard_of(spec, 0, 1))
    names = sorted({block.tensor for place in places for block in place})[part::parts]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(checkpoint.checksum, names)) % 2**63


def count_parameters(model_dir: Path, *, tp_size: int = 1) -> int:
    """Count the parameters that the first of `tp_size` ranks would load; read no weight.

    Every tensor is looked up in the headers of the weight files. Whatever `load_network` would
    reject is rejected here as well, in the time that it takes to open the files.

    Raises:
        CheckpointError: as `load_network`.
        ValueError: the model cannot be split over `tp_size` ranks.
    """
    spec = read_spec(model_dir)
    places = _PLACES[spec.family](spec, tp_shard_of(spec, 0, tp_size))
    with open_checkpoint(model_dir) as checkpoint:
        return sum(map(checkpoint.count, places))
