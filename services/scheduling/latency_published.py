"""Latencies that papers have published, as tables for simulation."""

from __future__ import annotations

from csps.services.scheduling.latency import LatencyKey, LatencyTable, StepCost

TETRIS_TABLE_1: dict[int, dict[int, float]] = {
    1: {4: 0.28, 8: 0.57, 16: 1.29, 32: 3.22, 64: 9.05, 128: 29.20},
    2: {4: 0.16, 8: 0.31, 16: 0.69, 32: 1.67, 64: 4.61, 128: 14.30, 256: 50.07},
    4: {4: 0.13, 8: 0.20, 16: 0.39, 32: 0.92, 64: 2.43, 128: 7.32, 256: 24.77},
    8: {4: 0.21, 8: 0.24, 16: 0.31, 32: 0.58, 64: 1.37, 128: 3.96, 256: 12.81},
    16: {4: 0.39, 8: 0.43, 16: 0.46, 32: 0.53, 64: 0.96, 128: 2.31, 256: 7.02},
}
"""Seconds by SP size and by units of 1,024 tokens: prefill of LLaMA3-8B on A100 (Tetris §2.2)."""

_TETRIS_FITS = {
    1: (0.0301, 5.579e-5, 1.265e-9),
    2: (0.0258, 3.014e-5, 6.085e-10),
    4: (0.0585, 1.555e-5, 3.052e-10),
    8: (0.1737, 6.739e-6, 1.644e-10),
    16: (0.3867, 2.466e-6, 8.944e-11),
}
"""(a, b, d) of Eq. 1 in seconds, fitted to the table above: within 6.3 %. c = 2d."""

_LOONGSERVE_FITS = {
    (1, 8): (0.187, 1.479e-5, 1.784e-10),
    (2, 4): (0.062, 1.103e-5, 1.876e-10),
    (4, 2): (0.074, 9.96e-6, 1.938e-10),
    (1, 2): (0.015, 3.22e-5, 7.76e-10),
}
"""(alpha, beta, gamma) of Eq. 7 in seconds by (SP, TP), fitted to LoongServe's Fig. 3: within 2.3 %
of what can be read off it; the last one off Fig. 2. The quantity published is a prompt's prefill,
so history costs what Eq. 1 says: c = 2d."""


def _steps(
    strategy: str, fits: dict[tuple[int, int], tuple[float, float, float]]
) -> tuple[tuple[LatencyKey, StepCost], ...]:
    return tuple(
        (LatencyKey(strategy=strategy, sp=sp, tp=tp), StepCost.of_seconds(a, b, 2 * d, d))
        for (sp, tp), (a, b, d) in fits.items()
    )


TETRIS_LLAMA3_8B_A100 = LatencyTable(
    name="tetris-llama3-8b-a100",
    exact="ring_kv",
    steps=_steps("ring_kv", {(sp, 1): fit for sp, fit in _TETRIS_FITS.items()}),
)
LOONGSERVE_LWM_7B_A800 = LatencyTable(
    name="loongserve-lwm-7b-a800",
    exact="ring_kv",
    steps=_steps("ring_kv", _LOONGSERVE_FITS),
)

PUBLISHED = {it.name: it for it in (TETRIS_LLAMA3_8B_A100, LOONGSERVE_LWM_7B_A800)}
