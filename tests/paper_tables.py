"""Table 4 of Context Parallelism: TTFT of pass-KV and pass-Q, 128,000 tokens of context on 4 ranks
of 8 GPUs.

Table 1 of Tetris: the prefill of LLaMA3-8B on A100 (§2.2).
"""

from __future__ import annotations

from csps.configurator.model.fits import RingPoint
from csps.protocols.attention.ring_choice import RingModel, RingSpeeds

CONTEXT = 128_000
MEMBERS = 4
MODEL = RingModel(heads=128, kv_heads=8, element_bytes=2)
SPEEDS = RingSpeeds(flops=515e12, bytes_per_s=26.1e9)
"""Speeds that Table 5 implies."""

_TTFT_MS = {
    1280: (1023.39, 898.71),
    3200: (1110.18, 1046.43),
    4160: (1298.92, 1280.1),
    6400: (1305.56, 1302.01),
    12800: (2080.67, 2205.27),
    25600: (3353.02, 3617.02),
    38400: (4629.23, 4922.52),
    51200: (5745.08, 6217.83),
    64000: (6845.21, 7367.99),
    76800: (7890.35, 8468.66),
    89600: (8697.27, 9666.62),
    102400: (10105.78, 10652.39),
    115200: (11136.4, 11571.62),
    128000: (11462.15, 12360.57),
}
TABLE_4 = [
    RingPoint(new=new, history=CONTEXT - new, kv_s=kv_ms / 1e3, q_s=q_ms / 1e3)
    for new, (kv_ms, q_ms) in _TTFT_MS.items()
]


TETRIS_TABLE_1: dict[int, dict[int, float]] = {
    1: {4: 0.28, 8: 0.57, 16: 1.29, 32: 3.22, 64: 9.05, 128: 29.20},
    2: {4: 0.16, 8: 0.31, 16: 0.69, 32: 1.67, 64: 4.61, 128: 14.30, 256: 50.07},
    4: {4: 0.13, 8: 0.20, 16: 0.39, 32: 0.92, 64: 2.43, 128: 7.32, 256: 24.77},
    8: {4: 0.21, 8: 0.24, 16: 0.31, 32: 0.58, 64: 1.37, 128: 3.96, 256: 12.81},
    16: {4: 0.39, 8: 0.43, 16: 0.46, 32: 0.53, 64: 0.96, 128: 2.31, 256: 7.02},
}
"""Seconds by SP size and by units of 1,024 tokens."""
