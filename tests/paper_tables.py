"""Table 4 of Context Parallelism: TTFT of pass-KV and pass-Q, 128,000 tokens of context on 4 ranks
of 8 GPUs.

Table 1 of Tetris: the prefill of LLaMA3-8B on A100 (§2.2).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from papers import CONTEXT, MEMBERS, SPEEDS, TABLE_4_MS
from papers import LLAMA_405B as MODEL

from csps.configurator.model.fits import RingPoint

__all__ = ["MEMBERS", "MODEL", "SPEEDS", "TABLE_4", "TETRIS_TABLE_1"]

TABLE_4 = [
    RingPoint(new=new, history=CONTEXT - new, kv_s=kv_ms / 1e3, q_s=q_ms / 1e3)
    for new, (kv_ms, q_ms) in TABLE_4_MS.items()
]


TETRIS_TABLE_1: dict[int, dict[int, float]] = {
    1: {4: 0.28, 8: 0.57, 16: 1.29, 32: 3.22, 64: 9.05, 128: 29.20},
    2: {4: 0.16, 8: 0.31, 16: 0.69, 32: 1.67, 64: 4.61, 128: 14.30, 256: 50.07},
    4: {4: 0.13, 8: 0.20, 16: 0.39, 32: 0.92, 64: 2.43, 128: 7.32, 256: 24.77},
    8: {4: 0.21, 8: 0.24, 16: 0.31, 32: 0.58, 64: 1.37, 128: 3.96, 256: 12.81},
    16: {4: 0.39, 8: 0.43, 16: 0.46, 32: 0.53, 64: 0.96, 128: 2.31, 256: 7.02},
}
"""Seconds by SP size and by units of 1,024 tokens."""
