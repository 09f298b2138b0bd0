from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze imported objects, so that a load test's garbage collection does not search them."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
