"""What two gangs must have in common to understand each other's KV."""

from __future__ import annotations

import hashlib

import torch

from csps.actors.instance_group import InstanceGroup
from csps.models.checkpoint import Checkpoint
from csps.models.loading import weights_checksum

_WORD_BITS = 16
"""Few enough that no sum over an instance's ranks overflows a word."""


def model_fingerprint(
    checkpoint: Checkpoint, instance: InstanceGroup, *, dtype: str, device: str, threads: int
) -> str:
    """Digest of the configuration, of the type to compute in, and of the weights as they were
    read, hexadecimal. The same for any number of ranks in an instance, which all have to call this.
    """
    own = weights_checksum(checkpoint, part=instance.rank, parts=instance.size, threads=threads)
    weights = _sum_over(instance, own, device)
    config = (checkpoint.model_dir / "config.json").read_bytes()
    digest = hashlib.blake2b(config, digest_size=8)
    digest.update(f"{dtype} {weights}".encode())
    return digest.hexdigest()


def _sum_over(instance: InstanceGroup, number: int, device: str) -> int:
    """Sum of 63-bit numbers, modulo 2**63."""
    words = [number >> shift & (1 << _WORD_BITS) - 1 for shift in range(0, 64, _WORD_BITS)]
    sums: list[int] = instance.all_reduce(torch.tensor(words, device=device)).tolist()
    return sum(word << index * _WORD_BITS for index, word in enumerate(sums)) % 2**63
