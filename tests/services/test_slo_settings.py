"""Test the objectives of a request: the server's, unless its headers have others."""

from __future__ import annotations

from pathlib import Path

import pytest

from csps.services.http.request_parser import RequestParser
from csps.services.requests.request_spec import SloBounds
from csps.services.settings.settings import Settings, SloSettings

OWN = SloSettings(ttft_ms=500, ttft_ms_per_1k_tokens=100, tpot_ms=40, e2e_ms=9000)


@pytest.mark.parametrize(
    ("own", "asked", "tokens", "held_to"),
    [
        (SloSettings(), SloBounds(), 1000, SloBounds()),
        (SloSettings(), SloBounds(tpot_ms=7), 1000, SloBounds(tpot_ms=7)),
        (OWN, SloBounds(), 0, SloBounds(ttft_ms=500, tpot_ms=40, e2e_ms=9000)),
        (OWN, SloBounds(), 20_000, SloBounds(ttft_ms=2500, tpot_ms=40, e2e_ms=9000)),
        (OWN, SloBounds(ttft_ms=80), 20_000, SloBounds(ttft_ms=80, tpot_ms=40, e2e_ms=9000)),
        (SloSettings(ttft_ms_per_1k_tokens=5), SloBounds(), 1000, SloBounds()),
    ],
)
def test_headers_come_before_settings(
    tiny_llama: Path, own: SloSettings, asked: SloBounds, tokens: int, held_to: SloBounds
) -> None:
    parser = RequestParser(Settings(model=str(tiny_llama), slo=own))
    assert parser.slo(asked, prompt_tokens=tokens) == held_to
