"""A checksum of a tensor's bytes, against accidents and not against attackers.

CRC-32 because it is twice as fast as the fastest cryptographic hash of the standard library
(BLAKE2b), and who compares it reads gigabytes; a change goes unnoticed once in four billion times.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of a tensor in host memory, row by row. Other threads run meanwhile.

    Args:
        start: of the bytes before it, if they are to count as well.
    """
    bytes_n = tensor.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bytes_n.numpy().data, start)
