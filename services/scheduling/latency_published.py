"""Latencies that papers have published, as tables for simulation."""

from __future__ import annotations

from csps.services.scheduling.latency import LatencyKey, LatencyTable, StepCost

_TETRIS_FITS = {
    1: (0.0301, 5.579e-5, 1.265e-9),
    2: (0.0258, 3.014e-5, 6.085e-10),
    4: (0.0585, 1.555e-5, 3.052e-10),
    8: (0.1737, 6.739e-6, 1.644e-10),
    16: (0.3867, 2.466e-6, 8.944e-11),
}
"""(a, b, d) of Eq. 1 in seconds by SP, fitted to Tetris' Table 1, the prefill of LLaMA3-8B on A100
(§2.2): within 6.3 %. c = 2d."""

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
