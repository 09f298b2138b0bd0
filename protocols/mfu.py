"""Operations of a prefill, for comparing what a machine reaches with its peak (CP App. A)."""

from __future__ import annotations


def prefill_flops(
    *, parameters: int, layers: int, width: int, new: int, history: int = 0, batch: int = 1
) -> float:
    """Operations of computing `new` tokens after `history`, causal attention counted by half.

    Args:
        parameters: of the whole model; each is a multiplication and an addition a token.
        width: query heads times head dimension.
    """
    products = 2.0 * parameters * new
    attention = 4.0 * layers * width * new * (history + new / 2)
    return batch * (products + attention)


def flops_per_second(flops: float, *, seconds: float, devices: int) -> float:
    """What each device has reached."""
    return flops / seconds / devices


def utilization(flops: float, *, seconds: float, devices: int, peak: float) -> float:
    """MFU: the part of what the devices could have done.

    Args:
        peak: operations of a device a second.
    """
    return flops_per_second(flops, seconds=seconds, devices=devices) / peak
