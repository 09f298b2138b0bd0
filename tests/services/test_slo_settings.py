"""What a request is held to: the server's objectives, unless its headers bring others."""

from __future__ import annotations

from pathlib import Path

import pytest

from csps.services.http.request_parser import RequestParser
from csps.services.launch.settings import Settings, SloSettings
from csps.services.router.slo import Slo

OWN = SloSettings(ttft_ms=500, ttft_ms_per_1k_tokens=100, tpot_ms=40, e2e_ms=9000)


@pytest.mark.parametrize(
    ("own", "asked", "tokens", "held_to"),
    [
        (SloSettings(), Slo(), 1000, Slo()),
        (SloSettings(), Slo(tpot_ms=7), 1000, Slo(tpot_ms=7)),
        (OWN, Slo(), 0, Slo(ttft_ms=500, tpot_ms=40, e2e_ms=9000)),
        (OWN, Slo(), 20_000, Slo(ttft_ms=2500, tpot_ms=40, e2e_ms=9000)),
        (OWN, Slo(ttft_ms=80), 20_000, Slo(ttft_ms=80, tpot_ms=40, e2e_ms=9000)),
        (SloSettings(ttft_ms_per_1k_tokens=5), Slo(), 1000, Slo()),
    ],
)
def test_headers_come_before_settings(
    tiny_llama: Path, own: SloSettings, asked: Slo, tokens: int, held_to: Slo
) -> None:
    parser = RequestParser(Settings(model=str(tiny_llama), slo=own))
    assert parser.slo(asked, prompt_tokens=tokens) == held_to
