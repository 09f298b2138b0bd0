"""Planning again, by simulation: it changes nothing where predictions come true."""

from __future__ import annotations

import tetris_replan


def test_right_predictions_are_not_planned_again() -> None:
    at_once, step_by_step = (
        tetris_replan.ttfts_s("medium", "none", share, requests=60, seed=1) for share in (0, 0.05)
    )
    assert at_once == step_by_step


def test_wrong_ones_are() -> None:
    planned_once, replanned = (
        tetris_replan.ttfts_s("medium", "requests, sigma 0.6", share, requests=200, seed=0)
        for share in (0, 0.05)
    )
    assert planned_once != replanned
