"""Triton kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from importlib import reload

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Triton's own library functions took the variable's value when they were imported, which
    # transformers may have brought about already.
    for module in ("triton.language.standard", "triton.language"):
        if module in sys.modules:
            reload(sys.modules[module])


@pytest.fixture(scope="session")
def triton_device() -> str:
    """The device on which Triton kernels can run here."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
