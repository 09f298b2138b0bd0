from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported stays so for the next load test, which looks through all that is not."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
